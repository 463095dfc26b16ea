"""Not-a-number and the infinities in JSON, which has none: they travel as {"$float": "nan"}.

Manifests and journals hold users' metrics, and a diverged loss must come back as it was. A user's own dict with a
single key that begins with `$` gets one more `$`, so that it comes back as it was, too.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["tag_floats", "untag_floats"]


def tag_floats(value: Any) -> Any:
    """The same value with every non-finite float replaced by its tagged form."""
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, dict):
        if len(value) == 1 and isinstance(key := next(iter(value)), str) and key.startswith("$"):
            return {"$" + key: tag_floats(value[key])}
        return {key: tag_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [tag_floats(item) for item in value]
    return value


def untag_floats(value: Any) -> Any:
    """The inverse of `tag_floats`."""
    if isinstance(value, dict):
        if len(value) == 1:
            [(key, item)] = value.items()
            if key == "$float":
                return float(item)
            if key.startswith("$$"):
                return {key[1:]: untag_floats(item)}
        return {key: untag_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [untag_floats(item) for item in value]
    return value
