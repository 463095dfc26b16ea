"""Not-a-number and the infinities in JSON, which has none: they travel as {"$float": "nan"}.

Manifests and journals hold users' metrics, and a diverged loss must come back as it was.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["tag_floats", "untag_floats"]


def tag_floats(value: Any) -> Any:
    """The same value with every non-finite float replaced by its tagged form."""
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, dict):
        return {key: tag_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [tag_floats(item) for item in value]
    return value


def untag_floats(value: Any) -> Any:
    """The inverse of `tag_floats`."""
    if isinstance(value, dict):
        if value.keys() == {"$float"}:
            return float(value["$float"])
        return {key: untag_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [untag_floats(item) for item in value]
    return value
