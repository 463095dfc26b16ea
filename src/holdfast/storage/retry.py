"""Trying again, as a decorator around any store.

Only `Unavailable` is tried again, a bounded number of times, after a random pause that grows. A creation whose answer
was lost is never repeated blindly: what is stored there is read back first. `locate` wraps the remote backends in it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from holdfast.core.backoff import backoff_s
from holdfast.errors import AlreadyExists, NotFound, Unavailable
from holdfast.storage.store import Digest, Entry, OnBytes, Source, Store

__all__ = ["RetryingStore", "without_retries"]

_T = TypeVar("_T")


class RetryingStore:
    """`store` with retries: at most `attempts` tries, pausing between 0 and `base_delay_s * 2**n` (at most
    `max_delay_s`) after the n-th failure."""

    def __init__(
        self,
        store: Store,
        attempts: int = 8,
        base_delay_s: float = 0.25,
        max_delay_s: float = 8.0,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._store = store
        self._attempts = attempts
        self._base_delay_s = base_delay_s
        self._max_delay_s = max_delay_s
        self._sleep = sleep
        self._uniform = uniform

    @property
    def uri(self) -> str:
        return self._store.uri

    @property
    def local_root(self) -> Path | None:
        return self._store.local_root

    @property
    def exclusive(self) -> bool:
        return self._retry(lambda: self._store.exclusive)

    def put(self, key: str, data: bytes) -> None:
        self._retry(lambda: self._store.put(key, data))

    def create(self, key: str, data: bytes) -> None:
        """What is created carries a unique token, so equal bytes found afterwards are this call's own."""
        unsure = False

        def attempt() -> None:
            nonlocal unsure
            if unsure and self._settled(key, data):
                return
            try:
                self._store.create(key, data)
            except Unavailable:
                unsure = True
                raise
            except AlreadyExists:
                # A lost answer may have been a success that only now comes to light.
                if not (unsure and self._settled(key, data)):
                    raise

        self._retry(attempt)

    def get(self, key: str) -> bytes:
        return self._retry(lambda: self._store.get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._retry(lambda: self._store.get_range(key, start, length))

    def size(self, key: str) -> int:
        return self._retry(lambda: self._store.size(key))

    def version(self, key: str) -> str | None:
        return self._retry(lambda: self._store.version(key))

    def children(self, prefix: str = "") -> list[str]:
        return self._retry(lambda: self._store.children(prefix))

    def list(self, prefix: str = "") -> list[Entry]:
        return self._retry(lambda: self._store.list(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        again = tuple(keys)
        self._retry(lambda: self._store.delete(again))

    def copy(self, source: str, target: str) -> None:
        self._retry(lambda: self._store.copy(source, target))

    def upload(self, key: str, source: Source, on_bytes: OnBytes | None = None) -> Digest:
        progress = _Progress(on_bytes)
        return self._retry(lambda: self._store.upload(key, source, progress.attempt()))

    def download(self, key: str, target: Path, on_bytes: OnBytes | None = None) -> Digest:
        progress = _Progress(on_bytes)
        return self._retry(lambda: self._store.download(key, target, progress.attempt()))

    def sub(self, prefix: str) -> RetryingStore:
        return self.over(self._store.sub(prefix))

    def over(self, store: Store) -> RetryingStore:
        """The same retries over another store."""
        return RetryingStore(
            store,
            self._attempts,
            self._base_delay_s,
            self._max_delay_s,
            self._sleep,
            self._uniform,
        )

    def close(self) -> None:
        self._store.close()

    def _settled(self, key: str, data: bytes) -> bool:
        """Whether an earlier creation of ours took place; `AlreadyExists` if another's did."""
        try:
            found = self._store.get(key)
        except NotFound:
            return False
        if found != data:
            raise AlreadyExists(f"{key} in {self.uri} exists already, written by another: choose another name.")
        return True

    def _retry(self, action: Callable[[], _T]) -> _T:
        failures = 0
        while True:
            try:
                return action()
            except Unavailable as error:
                failures += 1
                if failures >= self._attempts:
                    message = str(error).rstrip(".")
                    raise Unavailable(f"{message} (given up after {failures} tries).") from error
            self._sleep(self._uniform(0, backoff_s(failures, self._base_delay_s, self._max_delay_s)))


def without_retries(store: Store) -> Store:
    """The store below, which makes each call once: for callers that must check something before they try again."""
    return without_retries(store._store) if isinstance(store, RetryingStore) else store


class _Progress:
    """Reports each byte once, however often its transfer starts over."""

    def __init__(self, on_bytes: OnBytes | None) -> None:
        self._on_bytes = on_bytes
        self._reported_bytes = 0

    def attempt(self) -> OnBytes | None:
        if self._on_bytes is None:
            return None
        on_bytes, done_bytes = self._on_bytes, 0

        def report(count: int) -> None:
            nonlocal done_bytes
            done_bytes += count
            new_bytes = max(0, done_bytes - self._reported_bytes)
            self._reported_bytes += new_bytes
            on_bytes(new_bytes)  # also where it is 0: it may raise to abandon the transfer

        return report
