"""The fingerprint of a run: which code and which values its training function depends on, and what differs from before.

`holdfast.train.code_fingerprint` makes one from the user's function and configuration; it is kept in the journal with
each `ControllerStarted`, and compared when the run is started again. Only digests of code are kept. Of values, a digest
and, where it is short, the value itself, so that a person can be told "was 20 and is 40". What looks like a secret
(`core.masking`) is kept as a salted, slow and short hash, which tells that it changed and little else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.runtime import current

__all__ = ["SOURCE_CHANGED", "Fingerprint", "Value"]

SOURCE_CHANGED = "source of"
"""How a change begins that is of code alone."""
_FORMAT = 1
_KDF_ROUNDS = 60_000
_SECRET_DIGEST_BYTES = 4
"""Short on purpose: many guesses fit it, so that not even a long search tells a weak password for certain."""


@dataclass(frozen=True, slots=True)
class Value:
    """A global, closure variable, default or entry of the configuration."""

    digest: bytes = field(repr=False)
    shown: str | None = None
    """How it is told to a person, secrets masked; None: only that it changed."""
    secret: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Everything by name. Names of what lies in `__main__` stand without a module."""

    function: str = ""
    python: str = ""
    """Byte code of two Python versions cannot be compared."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Digest of each function, class and module that the training function reaches."""
    values: Mapping[str, Value] = field(default_factory=dict)
    config: Mapping[str, Value] = field(default_factory=dict)
    """`train_loop_config`; nested keys are joined by dots."""

    def stored(self, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """As the journal keeps it. `before` is what the journal holds of an earlier start: its salt is used again."""
        salt = str((before or {}).get("salt") or current().token_hex(16))
        return {
            "format": _FORMAT,
            "function": self.function,
            "python": self.python,
            "salt": salt,
            "code": dict(self.code),
            "values": {name: _stored(value, salt) for name, value in self.values.items()},
            "config": {name: _stored(value, salt) for name, value in self.config.items()},
        }

    def changes_since(self, before: Mapping[str, Any]) -> list[str]:
        """What differs from a fingerprint that the journal holds, each as a phrase for a person."""
        if before.get("format") != _FORMAT:
            return []  # of a version that kept something else: nothing can be said
        now = self.stored(before)
        changes: list[str] = []
        if before["function"] != now["function"]:
            changes.append(f"the training function was `{before['function']}` and is `{now['function']}`")
        changes += _value_changes("train_loop_config ", before["config"], now["config"])
        changes += _value_changes("", before["values"], now["values"])
        if before["python"] != now["python"]:
            changes.append(f"Python was {before['python']} and is {now['python']}, so that code cannot be compared")
        elif before["function"] == now["function"]:  # of another function everything else differs as well
            changes += _code_changes(before["code"], now["code"])
        return changes


def _stored(value: Value, salt: str) -> list[str | None]:
    if not value.secret:
        return [value.digest.hex(), value.shown]
    kept = hashlib.pbkdf2_hmac("sha256", value.digest, bytes.fromhex(salt), _KDF_ROUNDS, dklen=_SECRET_DIGEST_BYTES)
    return [f"salted:{kept.hex()}", value.shown]


def _value_changes(kind: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old is None or new is None:
            # A global that code no longer reads is told by that code; of the configuration the user must hear.
            if kind:
                what = "is new" if old is None else "is not there any more"
                yield f"{kind}`{name}` {what}"
        elif old[0] != new[0]:
            if old[1] is None or new[1] is None or old[1] == new[1]:
                yield f"{kind}`{name}` changed"
            else:
                yield f"{kind}`{name}` was {old[1]} and is {new[1]}"


def _code_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    changed = [
        f"{SOURCE_CHANGED} `{_plain(name)}` changed" for name in before if name in now and before[name] != now[name]
    ]
    new = [f"`{_plain(name)}` is used now" for name in now if name not in before]
    gone = [f"`{_plain(name)}` is not used any more" for name in before if name not in now]
    return list(dict.fromkeys([*sorted(changed), *sorted(new), *sorted(gone)]))


def _plain(name: str) -> str:
    """Without the number that tells functions of the same name apart."""
    return name.partition("#")[0]
