"""What a process is given by the machine under it: clock, sleep, randomness, threads, and who it is.

The controller's shell (`control`, `journal`, `checkpoint`) asks `current()` for all of these, and never `time`,
`random`, `secrets` or `os.getpid` itself; coroutines ask their event loop. In a real process the answer is always the
same `Runtime`. The simulator (`tests/sim`) runs many processes in one thread, on virtual time: it sets `runtime_var` in
the context of each of them, and tasks inherit it.
"""

from __future__ import annotations

import fcntl
import functools
import os
import platform
import random
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

__all__ = ["Runtime", "current", "runtime_var"]

_T = TypeVar("_T")
_R = TypeVar("_R")


class Runtime:
    """The real thing."""

    def now(self) -> float:
        """Wall time, in seconds since 1970."""
        return time.time()

    def monotonic(self) -> float:
        """A clock that never goes backwards, from any origin."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block the calling thread; coroutines use `asyncio.sleep`."""
        time.sleep(seconds)

    def uniform(self, low: float, high: float) -> float:
        """A random number between these two."""
        return random.uniform(low, high)

    def token_hex(self, size_bytes: int) -> str:
        """Random hexadecimal digits that nobody else has or can guess."""
        return secrets.token_hex(size_bytes)

    def map_in_threads(self, function: Callable[[_T], _R], items: Iterable[_T], threads: int) -> list[_R]:
        """The function of each item, in order, with as many threads at most."""
        work = list(items)
        if len(work) < 2:
            return [function(item) for item in work]
        with ThreadPoolExecutor(min(threads, len(work)), "holdfast-map") as pool:
            return list(pool.map(function, work))

    def make_executor(self, threads: int, name: str, initializer: Callable[[], None]) -> Executor:
        """Threads for blocking calls, started as they are needed."""
        return ThreadPoolExecutor(threads, name, initializer)

    def pid(self) -> int:
        return os.getpid()

    def machine(self) -> tuple[str, str, str]:
        """Host name, boot id and PID namespace; the last two are "" where the system does not tell."""
        return _machine()

    def process_status(self, pid: int) -> tuple[str, int] | None:
        """State letter and start time (in ticks since boot) of a process of this machine; None if there is none."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            return None
        # The command's name stands in parentheses and may hold anything, parentheses and blanks included.
        fields = text.rpartition(")")[2].split()
        return fields[0], int(fields[19])

    def lock_file(self, path: Path) -> Callable[[], None]:
        """Create a file and lock it (flock) until this process ends, or what is returned is called, which removes it.
        Where the filesystem has no locks, nothing is locked."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

        def release() -> None:
            path.unlink(missing_ok=True)
            os.close(fd)

        return release

    def has_locked_file(self, directory: Path, pattern: str) -> bool:
        """Whether some process of this machine holds a lock (flock) on a file below the directory that matches."""
        return any(_is_locked(path) for path in directory.glob(pattern))


runtime_var: ContextVar[Runtime] = ContextVar("runtime")
_real = Runtime()


def current() -> Runtime:
    """The runtime of the calling process."""
    return runtime_var.get(_real)


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


@functools.cache
def _machine() -> tuple[str, str, str]:
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        boot_id = namespace = ""
    return platform.node(), boot_id, namespace
