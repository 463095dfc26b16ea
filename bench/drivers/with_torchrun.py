"""One scenario of `bench.train` under torchrun: `torchrun ... with_torchrun.py SCENARIO DIRECTORY`.

Checkpoints are the user's own business there: a file that is replaced.
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from bench.drivers.one_file import load, save
from bench.workload import Log, train_steps

SCENARIO, DIRECTORY = sys.argv[1], sys.argv[2]


dist.init_process_group("gloo")
log = Log(f"{DIRECTORY}/log")
if SCENARIO == "noop":
    log.say("line")
else:
    rank = dist.get_rank()
    train_steps(log, rank, 100_000, lambda: load(DIRECTORY), lambda _, write: save(DIRECTORY, rank, write))
dist.destroy_process_group()
