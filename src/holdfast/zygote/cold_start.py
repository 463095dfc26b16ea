"""A worker as a fresh process: `python -m holdfast.zygote.cold_start FD...`, where forking is unsafe or not wanted.

The zygote starts it, so that it is reaped, killed and cleaned up like any forked worker. Its first descriptor
holds its orders and the assignment, the second the pickled function; the others are its connection and pipes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from holdfast.linux.process import prefer_for_oom_kill
from holdfast.worker.job import Assignment
from holdfast.worker.job_loader import load_job, set_up_imports
from holdfast.worker.stdio import WorkerFds, buffer_lines, watch_for_crashes
from holdfast.zygote.messages import Load

__all__ = ["ColdStart", "main"]


class ColdStart(msgspec.Struct, frozen=True):
    """Everything that a cold worker is given."""

    load: Load
    assignment: Assignment


def main() -> NoReturn:
    prefer_for_oom_kill()
    fds = [int(text) for text in sys.argv[1:]]
    for fd in fds:
        os.set_inheritable(fd, False)
    orders_fd, function_fd, connection, dump, *listen = fds
    watch_for_crashes(dump)  # also of what the function imports
    orders = msgspec.msgpack.decode(Path(f"/proc/self/fd/{orders_fd}").read_bytes(), type=ColdStart)
    os.close(orders_fd)
    set_up_imports(orders.load.sys_path, orders.load.environment)
    loaded = load_job(function_fd)
    os.close(function_fd)
    from holdfast.worker.bootstrap import run_worker

    buffer_lines()
    run_worker(loaded, orders.assignment, WorkerFds(connection, 1, 2, dump, listen[0] if listen else None))


if __name__ == "__main__":
    main()
