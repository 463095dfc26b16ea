"""A host's session: renewed by a thread, opened anew when the backend has forgotten it, with the host's keys in it.

A backend that is away, slow or partitioned ends nothing here: the thread tries again as long as the host lives.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from holdfast.errors import ConfigError, WireError
from holdfast.rendezvous.rendezvous import Rendezvous, SessionExpiredError

__all__ = ["Session"]

_log = logging.getLogger(__name__)


class Session:
    """One host's session from its making to `close`. Methods may be called from any thread."""

    def __init__(self, rendezvous: Rendezvous, ttl_s: float, on_reopen: Callable[[], None] = lambda: None) -> None:
        """`on_reopen` is called in the session's thread after the session was lost and opened anew."""
        self._rendezvous = rendezvous
        self._ttl_s = ttl_s
        self._on_reopen = on_reopen
        self._lock = threading.Lock()
        self._registered: dict[str, bytes] = {}
        self._closed = threading.Event()
        self._id = rendezvous.open_session(ttl_s)
        self._thread = threading.Thread(target=self._keep_alive, name="holdfast-rendezvous-session", daemon=True)
        self._thread.start()

    @property
    def id(self) -> str:
        """Of the present session; another one after it was lost."""
        return self._id

    def register(self, key: str, value: bytes) -> None:
        """Put a key that stays as long as this host does: it is put again after the session was lost."""
        with self._lock:
            self._registered[key] = value
            with suppress(SessionExpiredError):  # the thread will find out, and put it
                self._rendezvous.put(key, value, self._id)

    def close(self) -> None:
        """The host leaves: its keys are gone at once, if the backend answers, and after the time-to-live otherwise."""
        self._closed.set()
        self._thread.join()
        with suppress(WireError, ConfigError):
            self._rendezvous.end_session(self._id)

    def _keep_alive(self) -> None:
        is_away = False
        while not self._closed.wait(self._ttl_s / 3 if not is_away else min(1.0, self._ttl_s / 3)):
            try:
                if not self._rendezvous.renew(self._id):
                    self._reopen()
                is_away = False
            except (WireError, ConfigError) as error:  # a user that etcd refuses now may be known to it again later
                if not is_away:
                    _log.warning("The rendezvous does not answer; this host goes on and tries again: %s", error)
                is_away = True

    def _reopen(self) -> None:
        with self._lock:
            session = self._rendezvous.open_session(self._ttl_s)
            for key, value in self._registered.items():
                self._rendezvous.put(key, value, session)
            self._id = session  # only now: where a key could not be put, all of this is done again
        _log.warning("The rendezvous had given this host up; it is registered again.")
        self._on_reopen()
