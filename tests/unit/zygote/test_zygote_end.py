"""What a zygote removes when its connection ends: a real one, whose agent is this process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from holdfast.wire.frames import encode
from holdfast.zygote.messages import Dismiss, ImportAhead, ToZygote


def _end_zygote(directory: Path, *orders: ToZygote, last: bytes = b"") -> None:
    """Send it these, and close the connection while this process lives."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "holdfast.zygote.zygote", str(theirs.fileno()), str(os.getpid())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    for order in (ImportAhead(modules=[], leftovers=[str(directory)]), *orders):
        ours.sendall(encode(order))
    ours.sendall(last)
    ours.close()
    assert process.wait(60) == 0


def test_the_directory_of_an_agent_that_lives_stays(tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    _end_zygote(tmp_path / "agent", Dismiss())
    assert (tmp_path / "agent").is_dir()


def test_the_directory_stays_where_the_last_order_came_no_more_for_want_of_room(tmp_path: Path) -> None:
    """The agent ends a zygote while a large order is half on its way."""
    (tmp_path / "agent").mkdir()
    _end_zygote(tmp_path / "agent", last=encode(ImportAhead(modules=["x"] * 1000, leftovers=[]))[:500])
    assert (tmp_path / "agent").is_dir()
