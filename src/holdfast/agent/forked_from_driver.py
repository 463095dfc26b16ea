"""Being an agent in a process that was forked from the driver (`engines.driver_fork`), with a zygote forked from that.

Both are single-threaded copies of the driver that were put in order. From here on nothing distinguishes them from
processes that were started anew, but that modules are there already.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import msgspec

from holdfast.agent.zygote_client import ForkedZygote
from holdfast.linux.forked_process import rename_command
from holdfast.linux.process import die_with_parent
from holdfast.worker.stdio import open_streams

__all__ = ["run_agent"]

_ORDER_MAX_BYTES = 64 * 1024


def run_agent(connection: socket.socket, preload: Sequence[str]) -> int:
    """Wait for the command line and the run secret's descriptor, and be that agent; gives the exit code. The zygote is
    forked at once, and imports `preload` meanwhile."""
    rename_command("holdfast.agent")
    with suppress(PermissionError):
        os.setsid()
    zygote = _fork_zygote(connection, preload)
    from holdfast.agent.__main__ import main  # now, while the driver is busy

    order, fds, _, _ = socket.recv_fds(connection, _ORDER_MAX_BYTES, 1)
    if not order:
        return 0  # the driver has ended, or needs no agent
    arguments = msgspec.msgpack.decode(order, type=list[str])
    connection.close()
    return main([*arguments, "--token-fd", str(fds[0])], zygote)


def _fork_zygote(connection: socket.socket, preload: Sequence[str]) -> ForkedZygote:
    control, theirs = socket.socketpair()
    output, output_end = os.pipe()
    agent = os.getpid()
    pid = os.fork()
    if pid == 0:
        connection.close()
        os.close(output)
        control.close()
        _be_zygote(theirs, output_end, agent, preload)
    theirs.close()
    os.close(output_end)
    return ForkedZygote(pid, control, output)


def _be_zygote(control: socket.socket, output: int, agent: int, preload: Sequence[str]) -> NoReturn:
    try:
        die_with_parent(agent)  # until it serves the agent
        rename_command("holdfast.zygote")
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        open_streams()
        from holdfast.zygote.zygote import main

        main(control.detach(), agent, imports=preload)
    except BaseException:  # noqa: BLE001  nothing may reach what the agent was doing
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)
