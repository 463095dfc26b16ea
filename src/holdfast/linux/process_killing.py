"""Kill all descendants of this process, a subreaper, and let those finish that clean up after others.

A process that uses multiprocessing's spawn or forkserver has a resource tracker, a process that unlinks named
semaphores and shared memory when the last holder of its pipe has ended. Killed earlier, it would leave them in
/dev/shm. A worker that has started a run of its own has an agent below it, which ends with the worker, and whose zygote
ends all workers and removes the agent's directory if the agent could not. So all others are killed first, and these
only if they do not end by themselves in time.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

from holdfast.linux.process import children

__all__ = ["end_children", "is_resource_tracker", "kill_all", "kill_children", "kill_descendants", "kill_group"]

_CLEANING_TIMEOUT_S = 1.0
"""How long those may take; less than the time that the agent gives its zygote to end."""
_TRACKER_COMMAND = b"resource_tracker import main"
"""Part of the command line of the trackers of multiprocessing and joblib."""
_CLEANING = (b"hf-agent\n", b"hf-zygote\n")
"""The names of agents and zygotes in /proc: forked workers have the command line of a zygote, but not its name."""


def is_resource_tracker(pid: int) -> bool:
    """Whether the process is a resource tracker that has not ended: a zombie has no command line."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return _TRACKER_COMMAND in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _cleans_up(pid: int) -> bool:
    """Whether the process is to end by itself: a resource tracker, or an agent or a zygote of a run below."""
    if is_resource_tracker(pid):
        return True
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_bytes() in _CLEANING
    return False


def kill_descendants(pids: Collection[int]) -> None:
    """SIGKILL these children and, without waiting for them, all their descendants but those that clean up.

    A process that is missed because it was orphaned at that moment becomes a child of this process: `kill_children`
    finds it."""
    for pid in pids:
        _kill(pid)
    for pid in _below(pids):
        if not _cleans_up(pid):
            with suppress(PermissionError):  # as sudo's
                _kill(pid)


def kill_group(leader: int, candidates: Iterable[int]) -> None:
    """SIGKILL the process group of a child that led it and is now a zombie, but those that clean up. Of the children
    of this process only `candidates` may be in it."""
    members = [pid for pid in candidates if pid != leader and os.getpgid(pid) == leader]
    family = [*members, *_below(members)]
    if any(map(_cleans_up, family)):
        for pid in family:
            if not _cleans_up(pid):
                with suppress(PermissionError):
                    _kill(pid)
    else:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def kill_children(spared: Collection[int] = ()) -> bool:
    """SIGKILL every child that is not in `spared`, those that clean up excepted while there are others. With only
    these left, wait for them for a bounded time, then kill them. False if there was no child left, not even a
    zombie."""
    return kill_all([pid for pid in children() if pid not in spared])


def kill_all(found: Sequence[int]) -> bool:
    """As `kill_children`, for these children only."""
    found = list(filter(_may_kill, found))
    others = [pid for pid in found if not _cleans_up(pid)]
    for pid in others:
        _kill(pid)
    if not others:
        _end_cleaning(found)
    return bool(found)


def end_children(is_spared: Callable[[int], bool]) -> None:
    """Kill and reap until only children are left that are spared, or another user's: each death may turn grandchildren
    into children."""
    while found := [pid for pid in children() if not is_spared(pid) and _may_kill(pid)]:
        kill_all(found)
        others = [pid for pid in found if not _cleans_up(pid)]
        with suppress(ChildProcessError):
            os.waitpid((others or found)[0], 0)


def _end_cleaning(pids: Iterable[int]) -> None:
    deadline = monotonic() + _CLEANING_TIMEOUT_S
    for pid in pids:
        pidfd = os.pidfd_open(pid)  # a child that was not waited for, so the pid is its own
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll(max(0.0, deadline - monotonic()) * 1000)
        finally:
            os.close(pidfd)
        _kill(pid)


def _below(pids: Iterable[int]) -> Iterator[int]:
    """All descendants of these, each before its own children are listed: the caller has killed it by then, so it cannot
    fork any more."""
    for pid in pids:
        for child in children(pid):
            yield child
            yield from _below([child])


def _may_kill(pid: int) -> bool:
    """Whether a child is this user's. One of sudo's, which a worker left, lives on: nothing can be done about it."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    except ProcessLookupError:
        pass
    return True


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
