"""Waiting for the agents of a controller that died on this machine, while they finish its uploads.

Those of this machine, and those that store through this process's storage server, are known
(`checkpoint.upload_locks`). Others of other machines show by what they put into the draft that they are at it. All end
by themselves within HOLDFAST_LINGER_S; then `Catalog.void_drafts` commits what they have completed. The lease is kept
meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.agent.platform import linger_s
from holdfast.checkpoint.catalog import Leftover
from holdfast.checkpoint.part_records import is_complete
from holdfast.checkpoint.upload_locks import is_uploading
from holdfast.control.lease import GuestLease, Lease
from holdfast.runtime import current
from holdfast.storage.store import Store

__all__ = ["wait_for_uploads"]

_LOOK_S = 0.02
_LOOK_FAR_S = 0.5
_QUIET_S = 6.0
"""An agent of another machine whose controller has died learns that within some 2 s of its successor's start, when it
dials again, and goes on. A draft in which nothing appears for so long is nobody's any more."""
_BEAT_S = 5.0
_MARGIN_S = 5.0
_log = logging.getLogger("holdfast")


def wait_for_uploads(draft: Leftover, *, lease: Lease | GuestLease, far: Store | None = None) -> None:
    """Returns when no agent uploads to the draft any more, or has had more time than it may take. `far` is the run's
    directory, if its agents may be on other machines."""
    if draft.reservation is None:
        return
    token = draft.reservation.token
    wait = _Wait(draft.name, lease)
    if wait.until_not(lambda: is_uploading(token), _LOOK_S) and far is not None and linger_s() > 0:
        progress = _Progress(far, draft.name, token)
        wait.until_not(progress.goes_on, _LOOK_FAR_S)


class _Wait:
    def __init__(self, name: str, lease: Lease | GuestLease) -> None:
        self._name = name
        self._lease = lease
        self._began = self._beat_at = current().monotonic()
        self._warned = False

    def until_not(self, is_busy: Callable[[], bool], look_s: float) -> bool:
        """Wait as long as somebody is busy; False if that takes too long."""
        runtime, limit_s = current(), linger_s() + _MARGIN_S
        while is_busy():
            now = runtime.monotonic()
            if not self._warned:
                text = "%s is still being stored for the driver that died; waiting for it (%g s at most)."
                _log.warning(text, self._name, limit_s)
                self._warned = True
            if now - self._began > limit_s:
                _log.warning("%s is given up: its agent takes too long.", self._name)
                return False
            if now - self._beat_at > _BEAT_S:
                self._lease.beat()
                self._beat_at = now
            runtime.sleep(look_s)
        return True


class _Progress:
    """Whether agents of other machines put anything into a draft."""

    def __init__(self, store: Store, name: str, token: str) -> None:
        self._store = store
        self._name = name
        self._token = token
        self._seen: list[tuple[str, int]] = []
        self._seen_at = current().monotonic()

    def goes_on(self) -> bool:
        if is_complete(self._store, self._name, self._token):
            return False
        now = current().monotonic()
        if is_uploading(self._token):  # through this process, perhaps a large file of which nothing is seen yet
            self._seen_at = now
            return True
        seen = [(entry.key, entry.size_bytes) for entry in self._store.list(self._name)]
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        return now - self._seen_at < _QUIET_S
