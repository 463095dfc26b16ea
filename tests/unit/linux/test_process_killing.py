"""Children that cannot be killed: a worker may leave a process of sudo's behind, which becomes its zygote's child."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from holdfast.linux.process import die_with_parent
from holdfast.linux.process_killing import end_children, kill_all


@pytest.fixture
def another_users(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A child that this process may not signal."""
    pid = _fork_sleeper()
    kill = os.kill

    def refuse(other: int, number: int) -> None:
        if other == pid:
            raise PermissionError
        kill(other, number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", refuse)
        yield pid
    kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _fork_sleeper() -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(parent)
        signal.pause()
    return pid


def test_a_child_of_another_user_is_neither_an_error_nor_waited_for(another_users: int) -> None:
    mine = _fork_sleeper()
    assert not kill_all([another_users])
    end_children(lambda pid: pid not in (another_users, mine))
    with pytest.raises(ChildProcessError):
        os.waitpid(mine, os.WNOHANG)
    assert os.waitpid(another_users, os.WNOHANG) == (0, 0)
