"""A program that forks a process for each job; the process kills itself where the job says.

It reads jobs as JSON lines and answers each with one line once the process has ended. It stays single-threaded and
opens no remote store itself, so that forking is safe and costs a millisecond instead of an import. `KillingStore` sends
SIGKILL before the Nth call to the store; with `delay_s` this program kills the process after a time.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.commit import commit, commit_directory, merge_parts, reserve, upload_part
from holdfast.checkpoint.known_files import process_wide
from holdfast.checkpoint.removal import remove
from holdfast.checkpoint.verify import repair, verify
from holdfast.storage.locate import open_store
from holdfast.storage.store import Digest, Entry, OnBytes, Source, Store

__all__ = ["Calls", "Job", "KillingStore", "Outcome", "main"]

_T = TypeVar("_T")
Calls = list[str]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to do, and when to be killed: before a call, at a block of an upload, after a time, or (None) not at all."""

    uri: str
    task: str
    source: str = ""
    name: str | None = None
    attempt: int = 0
    before_call: int | None = None
    at_block: int | None = None
    delay_s: float | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended: `killed`, or the calls that it made to the store, in order."""

    killed: bool
    calls: list[str] = []
    took_s: float = 0.0
    error: str = ""


class KillingStore:
    """A store that counts its calls, and kills the process before one of them."""

    def __init__(self, store: Store, before_call: int | None, calls: Calls, lock: threading.Lock | None = None) -> None:
        self._store = store
        self._before_call = before_call
        self._calls = calls
        self._lock = lock or threading.Lock()

    @property
    def uri(self) -> str:
        return self._store.uri

    @property
    def local_root(self) -> Path | None:
        return self._store.local_root

    @property
    def exclusive(self) -> bool:
        return self._store.exclusive

    def put(self, key: str, data: bytes) -> None:
        self._call(f"put {key}", lambda: self._store.put(key, data))

    def create(self, key: str, data: bytes) -> None:
        self._call(f"create {key}", lambda: self._store.create(key, data))

    def get(self, key: str) -> bytes:
        return self._call(f"get {key}", lambda: self._store.get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._call(f"get_range {key}", lambda: self._store.get_range(key, start, length))

    def size(self, key: str) -> int:
        return self._call(f"size {key}", lambda: self._store.size(key))

    def version(self, key: str) -> str | None:
        return self._call(f"version {key}", lambda: self._store.version(key))

    def list(self, prefix: str = "") -> list[Entry]:
        return self._call(f"list {prefix}", lambda: self._store.list(prefix))

    def children(self, prefix: str = "") -> Calls:
        return self._call(f"children {prefix}", lambda: self._store.children(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        """One by one: a deletion may be cut short between any two keys."""
        for key in keys:
            self._call(f"delete {key}", lambda key=key: self._store.delete([key]))  # type: ignore[misc]

    def copy(self, source: str, target: str) -> None:
        self._call(f"copy {target}", lambda: self._store.copy(source, target))

    def upload(self, key: str, source: Source, on_bytes: OnBytes | None = None) -> Digest:
        return self._call(f"upload {key}", lambda: self._store.upload(key, source, on_bytes))

    def download(self, key: str, target: Path, on_bytes: OnBytes | None = None) -> Digest:
        return self._call(f"download {key}", lambda: self._store.download(key, target, on_bytes))

    def sub(self, prefix: str) -> KillingStore:
        return KillingStore(self._store.sub(prefix), self._before_call, self._calls, self._lock)

    def close(self) -> None:
        self._store.close()

    def _call(self, what: str, action: Callable[[], _T]) -> _T:
        with self._lock:  # of two threads that count at once, both would pass the call to die at
            if len(self._calls) == self._before_call:
                _die()
            self._calls.append(what)
        return action()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _work(job: Job) -> list[str]:
    calls: list[str] = []
    plain = open_store(job.uri)
    if job.task == "commit" and (newest := Catalog(plain).newest()) is not None:
        for entry in newest.files:  # as if this process had written them: on remote stores only such files are copied
            process_wide.read_digest(plain, f"{newest.name}/{entry.path}")
    store = KillingStore(plain, job.before_call, calls)
    blocks = itertools.count()  # threads share it

    def on_bytes(_: int) -> None:
        if next(blocks) == job.at_block:
            _die()

    metrics = {"attempt": job.attempt}
    if job.task == "commit":
        commit_directory(store, Path(job.source), metrics=metrics, name=job.name, on_bytes=on_bytes)
    elif job.task == "ranks":
        draft = reserve(store, name=job.name)
        parts = {
            rank: upload_part(store, draft, Path(job.source, f"rank{rank}"), rank=rank, parent_files=None, threads=1)
            for rank in (0, 1)
        }
        commit(store, draft, merge_parts(parts), metrics=metrics, world_size=2)
    elif job.task == "remove":
        remove(store, str(job.name))
    elif job.task == "seal":
        Catalog(store).void_drafts(job.attempt, floor=10**6)
    elif job.task == "repair":
        repair(store, verify(store, deep=False))
    else:
        raise ValueError(job.task)
    return calls


def _child(job: Job, report: int) -> None:
    """Do the job and leave without running anything of the parent's."""
    try:
        answer = Outcome(killed=False, calls=_work(job))
    except BaseException:  # noqa: BLE001  told to the test, which fails of it
        answer = Outcome(killed=False, error=traceback.format_exc())
    with os.fdopen(report, "wb") as pipe:
        pipe.write(msgspec.json.encode(answer))
    os._exit(0)


def _run(job: Job) -> Outcome:
    reading, writing = os.pipe()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _child(job, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        # The pipe ends when the process does, so this waits for the earlier of the two.
        if job.delay_s is not None and not select.select([pipe], [], [], job.delay_s)[0]:
            os.kill(pid, signal.SIGKILL)
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    took_s = time.monotonic() - started
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and not answer:
        return Outcome(killed=True, took_s=took_s)
    return msgspec.structs.replace(msgspec.json.decode(answer, type=Outcome), took_s=took_s)


def main() -> None:
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(msgspec.json.encode(_run(msgspec.json.decode(line, type=Job))) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
