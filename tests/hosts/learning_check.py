"""The checker of all tests in which hosts come and go: the samples and the weights of a run of `learning.learn`.

- Every epoch consumed each sample once, in the order of an undisturbed run, whatever joined or died.
- The weights are those of the undisturbed run within 1e-6, since the global batch is constant.
- They are bit for bit those of other processes that change the number of workers at the same steps, and that nothing
  disturbs (`python -m tests.hosts.learning_check STATE OUT`, without any of Holdfast's code at work).
- What is stored is whole; what a planned change ended in time went on without a lost step.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.hosts.learning import BATCH, FEATURES, SAMPLES, descend, make_trainer, share_of_gradient

from holdfast.checkpoint.verify import verify
from holdfast.control.history import read_records
from holdfast.core import records as r
from holdfast.storage.locate import open_store
from holdfast.train import Result, ScalingConfig
from holdfast.train.elastic import split

__all__ = ["check_learning"]


def check_learning(run: Path, scratch: Path) -> list[int]:
    """Raise if anything is not exact; the number of workers at each step. `scratch` is an empty directory's name."""
    stored = verify(open_store(run), deep=True)
    assert stored.ok and not stored.damaged, stored
    result = Result.from_path(run)
    assert result.checkpoint is not None and result.return_value is not None
    found: dict[str, Any] = result.checkpoint.load_state()
    steps = len(found["ids"])
    assert result.return_value["step"] == steps
    frame = result.metrics_dataframe
    assert frame is not None
    assert list(frame["step"]) == list(range(1, steps + 1)), "every step is reported once"
    assert list(frame["workers"]) == found["workers"].tolist()
    _check_samples(found["ids"])

    scratch.mkdir()
    undisturbed = make_trainer(scratch, scratch, ScalingConfig(num_workers=0), steps=steps, step_s=0).fit()
    assert undisturbed.checkpoint is not None
    expected = undisturbed.checkpoint.load_state()
    assert torch.equal(found["ids"].sort().values, expected["ids"].sort().values), "the order is of the seed alone"
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=1e-6, atol=0)

    torch.save({"ids": found["ids"], "workers": found["workers"]}, scratch / "history.pt")
    command = [sys.executable, "-m", "tests.hosts.learning_check", str(scratch / "history.pt"), str(scratch / "out.pt")]
    subprocess.run(command, check=True, timeout=120)
    assert torch.equal(found["weights"], torch.load(scratch / "out.pt")), "weights are equal bit for bit"
    _check_planned_changes(run)
    workers: list[int] = found["workers"].tolist()
    return workers


def _check_samples(ids: torch.Tensor) -> None:
    per_epoch = -(-SAMPLES // BATCH)
    for first in range(0, len(ids), per_epoch):
        epoch = ids[first : first + per_epoch]
        seen = epoch[epoch >= 0].tolist()
        assert len(seen) == len(set(seen)), f"a sample was seen twice in the epoch of step {first}"
        assert len(epoch) < per_epoch or len(seen) == SAMPLES, f"a sample was not seen in the epoch of step {first}"


def _check_planned_changes(run: Path) -> None:
    records = list(read_records(open_store(run)))
    for place, record in enumerate(records):
        if isinstance(record, r.GenerationEnded) and record.planned and not record.why.endswith("its time is up"):
            starts = (one for one in records[place:] if isinstance(one, r.GenerationStarted))
            after = next(starts, None)
            assert after is None or after.iteration == record.iteration, f"{record.why}: steps were lost"


# ------------------------------------------------------------ the same history of workers, without Holdfast


def replay(rank: int, history: str, out: str, store: str, most: int) -> None:
    """One of `most` processes, of which as many take part in a step as there were workers."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=most)
    groups = [dist.new_group(list(range(count + 1))) for count in range(most)]
    told = torch.load(history)
    weights = torch.zeros(FEATURES, dtype=torch.float64)
    for ids, workers in zip(told["ids"], told["workers"].tolist(), strict=True):
        ids = ids[ids >= 0]
        gradient = torch.zeros_like(weights)
        if rank < workers:
            share = split(len(ids), rank, workers)
            gradient = share_of_gradient(weights, ids[share.start : share.stop], share.weight)
            if workers > 1:
                dist.all_reduce(gradient, group=groups[workers - 1])
        dist.broadcast(gradient, 0)
        weights = descend(weights, gradient, workers)
    if rank == 0:
        torch.save(weights, out)
    dist.destroy_process_group()


def main() -> None:
    history, out = sys.argv[1:]
    most = int(torch.load(history)["workers"].max())
    torch.set_num_threads(1)
    mp.start_processes(replay, (history, out, f"{out}.store", most), nprocs=most, start_method="fork")


if __name__ == "__main__":
    main()
