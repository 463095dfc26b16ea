"""Validate keys, and recognise a store's own temporary files.

Every backend checks keys here before it touches its storage, so a key that one of them refuses, all of them refuse.
Neighbours: `store` states the rule, `posix` makes the temporaries.
"""

from __future__ import annotations

import os
import re
import secrets

from holdfast.errors import InvalidURI

__all__ = ["check_key", "check_prefix", "is_temporary", "new_temporary"]

_TEMPORARY = re.compile(r"\.tmp-[0-9]+-[0-9a-f]{16}\Z")


def check_key(key: str) -> str:
    """The key itself, or `InvalidURI`: relative, `/`-separated, no empty, `.` or `..` part, no temporary's name."""
    parts = key.split("/")
    if "" in parts or "." in parts or ".." in parts or "\0" in key:
        raise InvalidURI(
            f"The key {key!r} is refused: write a relative path whose parts, between '/', are not empty, '.' or '..'."
        )
    if any(_TEMPORARY.match(part) for part in parts):
        raise InvalidURI(
            f"The key {key!r} is refused: names like this are the store's own temporaries; rename the file."
        )
    return key


def check_prefix(prefix: str) -> str:
    """Like `check_key`, but the empty prefix is the root."""
    return check_key(prefix) if prefix else prefix


def is_temporary(name: str) -> bool:
    """Whether a file of this name (one part) is an unfinished write."""
    return _TEMPORARY.match(name) is not None


def new_temporary() -> str:
    """A unique name that shows which process made it."""
    return f".tmp-{os.getpid()}-{secrets.token_hex(8)}"
