"""Parents, children and threads, as the kernel sees them: what makes sure that nothing outlives its parent.

Used by the agent, the zygote and the workers, and by whatever starts an agent. Linux only: prctl and /proc.
"""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

__all__ = [
    "become_subreaper",
    "change_death_signal",
    "children",
    "die_with_parent",
    "is_exiting",
    "live_without_parent",
    "name_process",
    "prefer_for_oom_kill",
    "thread_names",
]

_PR_SET_PDEATHSIG = 1
_PR_GET_PDEATHSIG = 2
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 4
_OOM_SCORE_RAISE = 500
_OOM_SCORE_MAX = 1000
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int | None = None, sig: int = signal.SIGKILL) -> None:
    """Let the kernel send `sig` to this process when its parent ends; end at once if it has ended already.

    "Parent" is the thread that forked this process: start long-lived children from a thread that lives as long.
    `parent_pid` is who it must be; without it, only a parent that is gone since this call began is noticed."""
    expected = os.getppid() if parent_pid is None else parent_pid
    _prctl(_PR_SET_PDEATHSIG, sig)
    if os.getppid() != expected:
        os._exit(1)


def live_without_parent() -> None:
    """Take `die_with_parent` back: this process is about to end by itself, and shall come to its end."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def change_death_signal(sig: int) -> None:
    """What the kernel sends when the parent ends, where `die_with_parent` was called; nothing otherwise."""
    current = ctypes.c_int(0)
    _libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(current), 0, 0, 0)
    if current.value not in (0, sig):
        _prctl(_PR_SET_PDEATHSIG, sig)


def name_process(name: str) -> None:
    """What `ps` and `top` call this process; 15 characters."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def prefer_for_oom_kill() -> None:
    """Have the kernel choose this process, and what it starts, before its parents when memory runs out.

    The kernel's score is the share of memory in thousandths plus this. The agent may hold half of the memory for
    snapshots, so a small worker goes before a large agent, and somebody else's process that fills most of the machine
    still before both. Raising needs no privilege."""
    file = Path("/proc/self/oom_score_adj")
    with suppress(OSError):  # a /proc that is read-only, as in some sandboxes
        file.write_text(str(min(_OOM_SCORE_MAX, int(file.read_text()) + _OOM_SCORE_RAISE)))


def become_subreaper() -> None:
    """Orphaned descendants become children of this process instead of init's, so that it can end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children(pid: int | None = None) -> list[int]:
    """The pids of this or another process's children: its own, and orphans that it was given. Zombies are among
    them."""
    found: list[int] = []
    tasks = f"/proc/{'self' if pid is None else pid}/task"
    with suppress(FileNotFoundError, ProcessLookupError):  # a process that has just ended
        for task in os.listdir(tasks):  # noqa: PTH208  Path is slow, and there may be many threads
            with suppress(FileNotFoundError, ProcessLookupError), open(f"{tasks}/{task}/children", "rb") as file:  # noqa: PTH123
                found += map(int, file.read().split())
    return found


def is_exiting(pid: int) -> bool:
    """Whether the process is on its way out, or gone: its descriptors may be closed long before it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    # The second field is the command in parentheses, and may hold anything.
    return bool(int(stat.rpartition(")")[2].split()[6]) & _PF_EXITING)


def thread_names() -> list[str]:
    """The names of all of this process's threads; more than one means that forking it is not safe."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            names.append((task / "comm").read_text().strip())
    return names


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}) failed: {os.strerror(code)}")
