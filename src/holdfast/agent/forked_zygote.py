"""A zygote that is forked from its agent, while that has one thread: what the agent has imported is there already."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from holdfast.agent.zygote_client import ForkedZygote
from holdfast.linux.forked_process import rename_command
from holdfast.linux.process import die_with_parent
from holdfast.worker.stdio import open_streams

__all__ = ["fork_zygote"]


def fork_zygote(close: Callable[[], None], preload: Sequence[str] | None = None) -> ForkedZygote:
    """`close` is called in the zygote, and lets go of what is the agent's alone. In a copy of the driver, `preload` is
    what it imports at once."""
    control, theirs = socket.socketpair()
    output, output_end = os.pipe()
    agent = os.getpid()
    pid = os.fork()
    if pid == 0:
        close()
        os.close(output)
        control.close()
        _be_zygote(theirs, output_end, agent, preload)
    theirs.close()
    os.close(output_end)
    return ForkedZygote(pid, control, output)


def _be_zygote(control: socket.socket, output: int, agent: int, preload: Sequence[str] | None) -> NoReturn:
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
