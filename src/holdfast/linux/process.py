"""Parent death signals, subreapers, children and threads: what makes sure that no process outlives its parent.

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
    "environment_of",
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
    `parent_pid` is the expected parent; without it, only a parent that ended since this call began is noticed."""
    expected = os.getppid() if parent_pid is None else parent_pid
    _prctl(_PR_SET_PDEATHSIG, sig)
    if os.getppid() != expected:
        os._exit(1)


def live_without_parent() -> None:
    """Undo `die_with_parent`: this process is about to end by itself, and must be able to finish."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def change_death_signal(sig: int) -> None:
    """Change the signal that the kernel sends when the parent ends; does nothing without `die_with_parent`."""
    current = ctypes.c_int(0)
    _libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(current), 0, 0, 0)
    if current.value not in (0, sig):
        _prctl(_PR_SET_PDEATHSIG, sig)


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show; at most 15 characters."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def prefer_for_oom_kill() -> None:
    """Let the OOM killer choose this process and its children before its parents.

    The kernel's score is the share of memory in thousandths plus this value. The agent may hold half of the memory for
    snapshots, so even a small worker is chosen before a large agent, and another process that fills most of the machine
    is still chosen before both. Raising the value needs no privilege."""
    with suppress(OSError):  # a /proc that is read-only, as in some sandboxes
        # Without Path and file objects: what a forked process touches, it copies.
        fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        try:
            score = min(_OOM_SCORE_MAX, int(os.read(fd, 16)) + _OOM_SCORE_RAISE)
            os.pwrite(fd, str(score).encode(), 0)
        finally:
            os.close(fd)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process instead of init, so that it can kill them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children(pid: int | None = None) -> list[int]:
    """The pids of the children of this or another process, with adopted orphans and zombies."""
    found: list[int] = []
    tasks = f"/proc/{'self' if pid is None else pid}/task"
    with suppress(FileNotFoundError, ProcessLookupError):  # a process that has just ended
        for task in os.listdir(tasks):  # noqa: PTH208  Path is slow, and there may be many threads
            with suppress(FileNotFoundError, ProcessLookupError), open(f"{tasks}/{task}/children", "rb") as file:  # noqa: PTH123
                found += map(int, file.read().split())
    return found


def environment_of(pid: int) -> dict[str, str]:
    """The variables that a process was started with; none if it is gone or another user's."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in text.split(b"\0") if item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def is_exiting(pid: int) -> bool:
    """Whether the process is exiting or gone: its descriptors may be closed long before it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    # The second field is the command in parentheses, and may hold anything.
    return bool(int(stat.rpartition(")")[2].split()[6]) & _PF_EXITING)


def thread_names() -> list[str]:
    """The names of all threads of this process; with more than one, forking is not safe."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            names.append((task / "comm").read_text().strip())
    return names


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}) failed: {os.strerror(code)}")
