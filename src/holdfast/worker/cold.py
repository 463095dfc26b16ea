"""A worker as a fresh process: `python -m holdfast.worker.cold FD...`, where forking is unsafe or not wanted.

The zygote starts it, so that it is reaped, killed and cleaned up like any forked worker. Its first descriptor
holds its orders and the assignment, the second the pickled function; the others are its wires.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from holdfast.worker.job import Assignment
from holdfast.worker.kinship import prefer_for_oom_kill
from holdfast.worker.loading import load_job, set_up_imports
from holdfast.worker.orders import Load
from holdfast.worker.stdio import Wires, buffer_lines

__all__ = ["Parcel", "main"]


class Parcel(msgspec.Struct, frozen=True):
    """Everything that a cold worker is given."""

    load: Load
    assignment: Assignment


def main() -> NoReturn:
    prefer_for_oom_kill()
    fds = [int(text) for text in sys.argv[1:]]
    for fd in fds:
        os.set_inheritable(fd, False)
    parcel_fd, function_fd, connection, dump, *listen = fds
    parcel = msgspec.msgpack.decode(Path(f"/proc/self/fd/{parcel_fd}").read_bytes(), type=Parcel)
    os.close(parcel_fd)
    set_up_imports(parcel.load.sys_path, parcel.load.environment)
    loaded = load_job(function_fd, parcel.load.filesystem)
    os.close(function_fd)
    from holdfast.worker.bootstrap import run_worker

    buffer_lines()
    run_worker(loaded, parcel.assignment, Wires(connection, 1, 2, dump, listen[0] if listen else None))


if __name__ == "__main__":
    main()
