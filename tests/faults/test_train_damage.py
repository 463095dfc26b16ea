"""Checkpoints that were altered after they were committed: a run notices before it trains on them, and falls back."""

from __future__ import annotations

from typing import Any

import pytest
from tests.faults.programs import jobs
from tests.faults.programs.altering import count_steps, flip_byte, keep_one_file
from tests.faults.programs.sandbox import Sandbox

from holdfast import train
from holdfast.checkpoint.verify import verify
from holdfast.core import records as r
from holdfast.storage.locate import open_store

_STEPS = 6


def _fit(sandbox: Sandbox, read: str, workers: int = 1, **run: Any) -> list[r.Record]:
    """Run to the end with a budget for the one failure that the function itself has; gives the records."""
    trainer = train.DataParallelTrainer(
        count_steps,
        train_loop_config={"steps": _STEPS, "read": read, "run": str(sandbox.storage / "run")},
        scaling_config=train.ScalingConfig(num_workers=workers),
        run_config=train.RunConfig(
            name="run", storage_path=str(sandbox.storage), failure_config=train.FailureConfig(max_failures=1), **run
        ),
    )
    assert trainer.fit().return_value == _STEPS
    return sandbox.records()


def _check_fallback(records: list[r.Record]) -> None:
    """Checkpoint 3 was found damaged and checkpoint 2 used; of the two ends only the function's own counted."""
    damaged = [record for record in records if isinstance(record, r.CheckpointDamaged)]
    assert [record.name for record in damaged] == ["checkpoint_000003"]
    assert "state.json" in damaged[0].why
    started = [record.checkpoint for record in records if isinstance(record, r.GenerationStarted)]
    assert started == [None, "checkpoint_000003", "checkpoint_000002"]
    ended = [record for record in records if isinstance(record, r.GenerationEnded)]
    assert [record.counted for record in ended] == [True, False]


@pytest.mark.parametrize("read", ["as_directory", "to_directory"])
def test_a_worker_that_finds_a_remote_checkpoint_damaged_makes_the_run_fall_back(sandbox: Sandbox, read: str) -> None:
    """The worker's exception travels over the wire to the core, which does not count it as a failure."""
    from fsspec.implementations.local import LocalFileSystem
    from pyarrow import fs

    filesystem = fs.PyFileSystem(fs.FSSpecHandler(LocalFileSystem()))
    _check_fallback(_fit(sandbox, read, storage_filesystem=filesystem))


@pytest.mark.parametrize("workers", [1, 0], ids=["processes", "inline"])
@pytest.mark.parametrize("read", ["as_directory", "to_directory", "load_state"])
def test_a_local_checkpoint_is_verified_before_a_generation_starts_from_it(
    sandbox: Sandbox, read: str, workers: int
) -> None:
    records = _fit(sandbox, read, workers)
    _check_fallback(records)
    ended = [record for record in records if isinstance(record, r.GenerationEnded)]
    assert (ended[1].why, ended[1].failures) == ("checkpoint_000003 is damaged", ())


def test_a_checkpoint_that_was_altered_between_two_drivers_is_not_used(sandbox: Sandbox) -> None:
    with pytest.raises(train.TrainingFailedError):
        sandbox.fit({"steps": 6, "faults": {"1:0:4": "raise"}, "settled": True}, workers=1)
    flip_byte(sandbox.storage / "run" / "checkpoint_000003" / "rank_0.json")
    result = sandbox.fit({"steps": 6}, workers=1)
    assert result.return_value == jobs.undisturbed(6)[-1]
    started = [record.checkpoint for record in sandbox.records() if isinstance(record, r.GenerationStarted)]
    assert started == [None, "checkpoint_000003", "checkpoint_000002"]


def test_a_file_altered_in_the_parent_checkpoint_is_uploaded_instead_of_linked(sandbox: Sandbox) -> None:
    trainer = train.DataParallelTrainer(
        keep_one_file,
        train_loop_config={"run": str(sandbox.storage / "run")},
        run_config=train.RunConfig(name="run", storage_path=str(sandbox.storage)),
    )
    trainer.fit()
    report = verify(open_store(sandbox.storage / "run"), deep=True)
    assert list(report.damaged) == ["checkpoint_000000"]
    assert len(report.ok) == 3
