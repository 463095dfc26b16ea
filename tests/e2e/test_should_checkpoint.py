"""`train.should_checkpoint()` in a real run: ranks of different speeds get the same answers at the same calls."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy
import pytest

from holdfast import train

_CALLS = 400
_LEAST_DUE = 3


def _loop(config: dict[str, Any]) -> None:
    rank = train.get_context().get_world_rank()
    answers: list[bool] = []
    for step in itertools.count():
        if step >= _CALLS and sum(answers) >= _LEAST_DUE:  # where storage is slow, few are due: ranks agree on when
            break
        if rank == step // 50 % 2:
            time.sleep(0.002)  # the step; the other rank is faster for a while
        due = train.should_checkpoint()
        answers.append(due)
        state = train.Checkpoint.from_state({"weights": numpy.full(1000, step)}) if due and rank == 0 else None
        if due:
            train.report({"step": step}, checkpoint=state)
    Path(config["answers"], f"{rank}.json").write_text(json.dumps(answers))


def test_every_rank_gets_the_same_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller, in this process, expects failures every few milliseconds: so checkpoints are due all the time."""
    monkeypatch.setenv("HOLDFAST_LOCAL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOLDFAST_QUIET", "1")
    monkeypatch.setattr("holdfast.core.checkpoint_interval._FIRST_MTBF_S", 0.01)
    result = train.DataParallelTrainer(
        _loop,
        train_loop_config={"answers": str(tmp_path)},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            name="run",
            storage_path=tmp_path / "storage",
            checkpoint_config=train.CheckpointConfig(target_overhead=1.0),
        ),
    ).fit()
    first, second = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert len(first) >= _CALLS
    assert first == second
    assert _LEAST_DUE <= sum(first) < len(first)
    assert len(result.best_checkpoints) == sum(first)
    assert result.checkpoint is not None
    steps = [step for step, due in enumerate(first) if due]
    assert result.checkpoint.load_state()["weights"][0] == steps[-1]
