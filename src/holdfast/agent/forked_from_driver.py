"""Being an agent in a process that was forked from the driver (`engines.driver_fork`), with a zygote forked from that.

Both are single-threaded copies of the driver that were put in order. From here on nothing distinguishes them from
processes that were started anew, but that modules are there already.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from holdfast.agent.forked_zygote import fork_zygote
from holdfast.linux.forked_process import rename_command
from holdfast.worker.environment import RUN_VARIABLE

__all__ = ["run_agent"]

_ORDER_MAX_BYTES = 64 * 1024


def run_agent(connection: socket.socket, preload: Sequence[str]) -> int:
    """Wait for the command line and the run secret's descriptor, and be that agent; gives the exit code. The zygote is
    forked at once, and imports `preload` meanwhile."""
    rename_command("holdfast.agent")
    with suppress(PermissionError):
        if RUN_VARIABLE in os.environ:
            os.setpgid(0, 0)  # in the session of a worker, by which the zygote of that knows whose this process is
        else:
            os.setsid()
    zygote = fork_zygote(connection.close, preload)
    from holdfast.agent.__main__ import main  # now, while the driver is busy

    order, fds, _, _ = socket.recv_fds(connection, _ORDER_MAX_BYTES, 1)
    if not order:
        return 0  # the driver has ended, or needs no agent
    arguments = msgspec.msgpack.decode(order, type=list[str])
    connection.close()
    return main([*arguments, "--token-fd", str(fds[0])], zygote)
