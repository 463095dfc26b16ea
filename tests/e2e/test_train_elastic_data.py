"""Workers are killed, and the run goes on with another number of them: each sample is consumed once an epoch."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs.sandbox import Sandbox

from holdfast import train
from holdfast.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig, TrainingFailedError

SIZE, EPOCHS = 29, 2
KILLS = ((0, 3, 1), (1, 1, 0))
"""(epoch, batch, rank), each once."""


def consume(config: dict[str, Any]) -> list[list[int]]:
    """Keep a ledger of the samples that count in the checkpoint itself. The ranks do not wait for each other."""
    rank = train.get_context().get_world_rank()
    seen: list[list[int]] = []
    first = 0
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            parts = [json.loads(path.read_text()) for path in Path(directory).glob("rank_*.json")]
        first = min(part["epoch"] for part in parts)
        seen = [one for part in parts for one in part["seen"]] if rank == 0 else []
    shard = train.get_dataset_shard("train", elastic=True, global_batch_size=5)
    assert shard is not None
    for epoch in range(first, EPOCHS):
        shard.set_epoch(epoch)
        for step, batch in enumerate(shard.iter_batches(local_shuffle_buffer_size=7)):
            if shard.loss_weight:
                seen += [[epoch, int(one)] for one in batch]
            for number, kill in enumerate(KILLS):
                mark = Path(config["marks"], str(number))
                if kill == (epoch, step, rank) and not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            _save(epoch, seen, rank)
    _save(EPOCHS, seen, rank)
    return seen


def _save(epoch: int, seen: list[list[int]], rank: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, f"rank_{rank}.json").write_text(json.dumps({"epoch": epoch, "seen": seen}))
        train.report({"epoch": epoch}, checkpoint=Checkpoint.from_directory(directory))


def test_each_sample_is_consumed_once_over_kills_and_a_resize(sandbox: Sandbox) -> None:
    marks = sandbox.root / "marks"
    marks.mkdir()

    def trainer(workers: int, failures: int) -> train.DataParallelTrainer:
        return train.DataParallelTrainer(
            consume,
            train_loop_config={"marks": str(marks)},
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(
                name="run", storage_path=sandbox.storage, failure_config=FailureConfig(max_failures=failures)
            ),
            datasets={"train": list(range(SIZE))},
        )

    with pytest.raises(TrainingFailedError):
        trainer(2, 1).fit()
    result = trainer(3, 0).fit()
    assert len(list(marks.iterdir())) == len(KILLS)
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        parts = [json.loads(path.read_text()) for path in Path(directory).glob("rank_*.json")]
        assert Path(directory, ".workers.json").exists()
    ledger = Counter((epoch, one) for part in parts for epoch, one in part["seen"])
    assert ledger == Counter((epoch, one) for epoch in range(EPOCHS) for one in range(SIZE))
    sandbox.check_stored()
