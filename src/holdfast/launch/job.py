"""A host's place in a job: its session in the rendezvous, the keys that it sees, and its writes, for an event loop.

    jobs/<n>/opened          of the host that began the job, while it lives
    jobs/<n>/hosts/<id>      of each host, while it lives
    jobs/<n>/token           the run secret, where nobody brought one
    jobs/<n>/over            the job has ended: who comes now begins another

A job lives while some host of it does. So keys of an earlier one, which nobody has cleaned up, are never taken for this
one's. The rendezvous may lose everything: what this host has put is put again, since every decision is made from the
keys that are seen, again and again.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import threading
from collections.abc import Callable

from holdfast.errors import Unreachable
from holdfast.rendezvous.rendezvous import Rendezvous, SessionExpiredError
from holdfast.rendezvous.session import Session

__all__ = ["Job"]

_JOB = re.compile(r"jobs/(\d{6})/")
_log = logging.getLogger(__name__)


class Job:
    """Made by `open`, in the event loop's thread; `write` and `close` are its coroutines."""

    def __init__(self, rendezvous: Rendezvous, ttl_s: float) -> None:
        self._rendezvous = rendezvous
        self._ttl_s = ttl_s
        self._loop = asyncio.get_running_loop()
        self.entries: dict[str, bytes] = {}
        """The job's keys, without its prefix."""
        self.changed = asyncio.Event()
        """Set when `entries`, or anything that is decided from, has changed."""
        self.reopened_at: float | None = None
        """When the session was lost and opened anew, by the loop's clock: others may be about to do the same."""
        self._watching = True
        self._kept: dict[str, bytes] = {}
        self._tasks: set[asyncio.Task[bool]] = set()

    async def open(self, host_id: str, host: bytes) -> None:
        """Join the job that lives, or begin one. `host` is the value of this host's key."""
        self._session = await asyncio.to_thread(Session, self._rendezvous, self._ttl_s, self._on_reopen)
        self.number = await asyncio.to_thread(self._choose_number, host_id)
        self.prefix = f"jobs/{self.number:06d}/"
        await asyncio.to_thread(self._session.register, f"{self.prefix}hosts/{host_id}", host)
        self._watch = await asyncio.to_thread(self._rendezvous.watch, self.prefix)
        self._thread = threading.Thread(target=self._follow, name="holdfast-job-watch", daemon=True)
        self._thread.start()

    def _choose_number(self, host_id: str) -> int:
        while True:
            keys = self._rendezvous.list("jobs/")
            number = max((int(found[1]) for key in keys if (found := _JOB.match(key))), default=0)
            prefix = f"jobs/{number:06d}/"
            lives = any(key == f"{prefix}opened" or key.startswith(f"{prefix}hosts/") for key in keys)
            if lives and f"{prefix}over" not in keys:
                return number
            value = f"{host_id} {secrets.token_hex(4)}".encode()
            if self._rendezvous.create(f"jobs/{number + 1:06d}/opened", value, self._session.id):
                for key in keys:  # of the last one some hosts may still read the result
                    if not key.startswith(prefix):
                        self._rendezvous.delete(key)
                return number + 1

    @property
    def session_id(self) -> str:
        return self._session.id

    async def register(self, key: str, value: bytes) -> bool:
        """Put a key that stays as long as this host does; False if the rendezvous is away, as of `create`."""

        def register() -> bool:
            self._session.register(self.prefix + key, value)
            return True

        return await self._write(register)

    async def create(self, key: str, value: bytes, *, leased: bool = False) -> bool:
        """Create a key of the job, which goes with this host if it is `leased`; False if it is there, or the rendezvous
        is away: the caller decides again from what it sees."""
        return await self._write(
            lambda: self._rendezvous.create(self.prefix + key, value, self._session.id if leased else "")
        )

    async def put(self, key: str, value: bytes, *, leased: bool = False) -> None:
        def put() -> bool:
            self._rendezvous.put(self.prefix + key, value, self._session.id if leased else "")
            return True

        await self._write(put)

    async def _write(self, write: Callable[[], bool]) -> bool:
        try:
            done = await asyncio.to_thread(write)
        except SessionExpiredError:
            done = False  # the session will be opened anew, and `changed` set
        except Unreachable as error:
            _log.warning("%s It is tried again.", error)
            done = False
        if not done:
            self._loop.call_later(min(1.0, self._ttl_s / 3), self.changed.set)
        return done

    async def keep(self, key: str, value: bytes) -> bytes:
        """Create a key that outlives this host, and again when the rendezvous has lost it; what is there, if another
        was faster."""
        found: bytes | None = value
        if not await asyncio.to_thread(self._rendezvous.create, self.prefix + key, value):
            found = await asyncio.to_thread(self._rendezvous.get, self.prefix + key)
        self._kept[key] = found or value
        return self._kept[key]

    async def close(self) -> None:
        """Leave: this host's keys are gone."""
        self._watching = False
        await asyncio.to_thread(self._watch.close)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._session.close)
        self._rendezvous.close()

    def _follow(self) -> None:
        entries: dict[str, bytes] | None = None
        while self._watching:
            found = self._watch.wait(entries, 3600.0)
            if found != entries:
                entries = found
                self._loop.call_soon_threadsafe(self._set, found)

    def _set(self, entries: dict[str, bytes]) -> None:
        self.entries = {key.removeprefix(self.prefix): value for key, value in entries.items()}
        self.changed.set()

    def _on_reopen(self) -> None:
        self._loop.call_soon_threadsafe(self._note_reopen)

    def _note_reopen(self) -> None:
        self.reopened_at = self._loop.time()
        self.changed.set()
        for key, value in self._kept.items():
            task = self._loop.create_task(self.create(key, value))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
