"""Running a function on several ranks with gloo: forked from this process, which has imported torch already."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["run_on_ranks"]


def run_on_ranks(count: int, work: Callable[[int], None], meeting: Path) -> None:
    """Call `work(rank)` in `count` processes of one process group, which meet at the file `meeting`. What fails there
    fails here, with every rank's traceback."""
    sys.stdout.flush()
    sys.stderr.flush()
    pids: dict[int, int] = {}
    try:
        for rank in range(count):
            pid = os.fork()
            if pid == 0:
                os._exit(_be_rank(rank, count, work, meeting))
            pids[rank] = pid
        outcomes = {rank: os.waitpid(pids.pop(rank), 0)[1] for rank in range(count)}
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    errors = [
        (meeting.parent / f"{meeting.name}-{rank}.txt").read_text() for rank, status in outcomes.items() if status
    ]
    assert not errors, "\n".join(errors)


def _be_rank(rank: int, count: int, work: Callable[[int], None], meeting: Path) -> int:
    try:
        torch.set_num_threads(1)  # The parent's threads are not here, and must not be waited for.
        store = dist.FileStore(str(meeting), count)
        dist.init_process_group("gloo", rank=rank, world_size=count, store=store, timeout=timedelta(seconds=120))
        work(rank)
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001  whatever it is, the parent is to see it
        (meeting.parent / f"{meeting.name}-{rank}.txt").write_text(f"rank {rank}: {traceback.format_exc()}")
        return 1
    return 0
