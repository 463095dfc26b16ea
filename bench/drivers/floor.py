"""The least that a scenario of `bench.train` can cost: `python floor.py SCENARIO DIRECTORY`.

`noop`: torch.multiprocessing's spawn and a gloo group. `steps`: workers forked from a process that has imported all
that they need, and forked again when one of them dies; no controller, no journal, no checkpoints but a file.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist
from bench.drivers.one_file import load, save
from bench.workload import Log, train_steps

SCENARIO, DIRECTORY = sys.argv[1], sys.argv[2]


def join(rank: int, port: int) -> Log:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    return Log(f"{DIRECTORY}/log")


def noop(rank: int, port: int) -> None:
    join(rank, port).say("line")
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def keep(rank: int, step: int, write: Callable[[Path], None]) -> None:
    save(DIRECTORY, rank, write)


def fork_group() -> list[int]:
    port, pids = free_port(), []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            log = join(rank, port)
            train_steps(log, rank, 100_000, lambda: load(DIRECTORY), partial(keep, rank))
            os._exit(0)
        pids.append(pid)
    return pids


def main() -> None:
    if SCENARIO == "noop":
        import torch.multiprocessing as mp

        mp.spawn(noop, args=(free_port(),), nprocs=2)
        return
    importlib.import_module("torch._dynamo")  # what the first optimizer would import, in every worker
    Path(DIRECTORY, "kept").mkdir()
    while True:
        pids = fork_group()
        os.wait()
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                continue


if __name__ == "__main__":
    main()
