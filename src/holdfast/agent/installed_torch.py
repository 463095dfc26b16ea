"""The version of torch on this machine, without importing it: agents and drivers start with this."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

__all__ = ["installed_torch"]

_VERSION = re.compile(r"""^__version__ = ['"]([^'"]+)""", re.MULTILINE)


@functools.cache
def installed_torch() -> str | None:
    """The version of torch that this process would import; "" if there is none, None if it does not say.
    `importlib.metadata` is not imported for that either."""
    try:
        found = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if found is None or found.origin is None:
        return ""
    try:
        text = Path(found.origin).with_name("version.py").read_text(errors="replace")
    except OSError:
        return None
    match = _VERSION.search(text)
    return None if match is None else match[1]
