"""What a rendezvous offers: keys that are created once, keys that vanish with their host, and a watch over all of them.

Every call may be made from any thread, blocks for at most the backend's patience, and raises `Unreachable` after that.
Keys are paths such as `jobs/000001/hosts/a`; values are small (a few kilobytes). All hosts of a job see the same keys,
each of them in the same order of values, but two keys may be seen in any order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from holdfast.errors import WireError

__all__ = ["Rendezvous", "SessionExpiredError", "Watch"]


class SessionExpiredError(WireError):
    """The session is over, and its keys are gone: open another."""


class Watch(Protocol):
    """The keys below a prefix, as they change. Used from one thread, except for `close`."""

    def wait(self, known: Mapping[str, bytes] | None, timeout_s: float) -> dict[str, bytes]:
        """What is there now; waits while that is equal to `known`. Intermediate states may be left out, the last one
        never. While the backend is away, what was there last is there."""
        ...

    def close(self) -> None:
        """Let `wait` return, and stop."""
        ...


class Rendezvous(Protocol):
    """One job's keys."""

    def get(self, key: str) -> bytes | None: ...

    def list(self, prefix: str = "") -> dict[str, bytes]:
        """All keys that begin with `prefix`, and their values."""
        ...

    def create(self, key: str, value: bytes, session: str = "") -> bool:
        """Create a key that is not there; of several hosts that try, one succeeds. False if it is there. A caller that
        repeats the call with the same value after an error is told whether that value is there: values must differ
        between callers. With a session the key is gone when the session is; `SessionExpiredError` if that is so."""
        ...

    def put(self, key: str, value: bytes, session: str = "") -> None:
        """Set a key, whether it is there or not."""
        ...

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        ...

    def watch(self, prefix: str = "") -> Watch: ...

    def open_session(self, ttl_s: float) -> str:
        """Begin a session, which ends when it is not renewed for `ttl_s`, by the clocks of those who are left."""
        ...

    def renew(self, session: str) -> bool:
        """Show that the session's owner lives; False if the session is over. One attempt only."""
        ...

    def end_session(self, session: str) -> None:
        """End a session at once: its keys are gone when this returns."""
        ...

    def close(self) -> None: ...
