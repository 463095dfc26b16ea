"""What `fit()` does with a run that is complete: nothing where the script is the same, more where it is not."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.small import fit, save, value_of
from tests.faults.programs.place import Place

from holdfast import train
from holdfast.core import records as r
from holdfast.train import Result


def _two_steps() -> int | None:
    start = train.get_checkpoint()
    first = value_of(start) + 1 if start else 0
    for step in range(first, first + 2):
        save(step)
    return first


def test_a_restart_trains_from_the_beginning_in_the_same_directory(place: Place) -> None:
    assert fit(place, _two_steps).return_value == 0
    again = fit(place, _two_steps, resume="restart")
    assert again.return_value == 0, "there was no checkpoint to resume from"
    assert again.checkpoint is not None and Path(again.checkpoint.path).name == "checkpoint_000003"
    assert [Path(one.path).name for one, _ in again.best_checkpoints] == ["checkpoint_000002", "checkpoint_000003"]
    assert place.check_stored() == [f"checkpoint_00000{index}" for index in range(4)], "the old ones are kept"
    assert [one.first_index for one in place.records() if isinstance(one, r.RunRestarted)] == [2]
    frame = again.metrics_dataframe
    assert frame is not None and list(frame["training_iteration"]) == [1, 2]
    lines = (place.storage / "run" / "result.json").read_text().splitlines()
    assert [json.loads(line)["training_iteration"] for line in lines] == [1, 2]
    assert fit(place, _two_steps).return_value == 0, "complete: nothing is run"
    assert sum(isinstance(one, r.ControllerStarted) for one in place.records()) == 2


def test_a_failure_after_a_restart_resumes_from_the_new_checkpoints_only(place: Place) -> None:
    def fails_once(config: dict[str, str]) -> list[int]:
        marker = Path(config["marker"])
        start = train.get_checkpoint()
        seen = [*json.loads(marker.read_text() if marker.exists() else "[]"), value_of(start) if start else -1]
        marker.write_text(json.dumps(seen))
        if len(seen) == 1:
            save(10)
        elif len(seen) == 2:
            raise RuntimeError("before the first checkpoint of this life")
        elif len(seen) == 3:
            save(20, checkpoint_upload_mode=train.CheckpointUploadMode.SYNC)
            raise RuntimeError("after it")
        return seen

    config = {"marker": str(place.root / "marker")}
    failure = train.FailureConfig(max_failures=2)
    fit(place, fails_once, config=config, failure_config=failure)
    done = fit(place, fails_once, config=config, failure_config=failure, resume="restart")
    assert done.return_value == [-1, -1, -1, 20]
    assert Result.from_path(done.path).return_value == done.return_value


def test_restart_needs_no_run_to_be_there(place: Place) -> None:
    assert fit(place, _two_steps, resume="restart").return_value == 0
    assert not any(isinstance(one, r.RunRestarted) for one in place.records())
