"""`fit()` on a complete run: it returns at once if the script is the same, and trains on if it changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.small import fit, save, value_of
from tests.faults.programs.sandbox import Sandbox

from holdfast import train
from holdfast.core import records as r
from holdfast.train import Result


def _two_steps() -> int | None:
    start = train.get_checkpoint()
    first = value_of(start) + 1 if start else 0
    for step in range(first, first + 2):
        save(step)
    return first


def test_a_restart_trains_from_the_beginning_in_the_same_directory(sandbox: Sandbox) -> None:
    assert fit(sandbox, _two_steps).return_value == 0
    again = fit(sandbox, _two_steps, resume="restart")
    assert again.return_value == 0, "there was no checkpoint to resume from"
    assert again.checkpoint is not None and Path(again.checkpoint.path).name == "checkpoint_000003"
    assert [Path(one.path).name for one, _ in again.best_checkpoints] == ["checkpoint_000002", "checkpoint_000003"]
    assert sandbox.check_stored() == [f"checkpoint_00000{index}" for index in range(4)], "the old ones are kept"
    assert [one.first_index for one in sandbox.records() if isinstance(one, r.RunRestarted)] == [2]
    frame = again.metrics_dataframe
    assert frame is not None and list(frame["training_iteration"]) == [1, 2]
    lines = (sandbox.storage / "run" / "result.json").read_text().splitlines()
    assert [json.loads(line)["training_iteration"] for line in lines] == [1, 2]
    assert fit(sandbox, _two_steps).return_value == 0, "complete: nothing is run"
    assert sum(isinstance(one, r.ControllerStarted) for one in sandbox.records()) == 2


def test_a_failure_after_a_restart_resumes_from_the_new_checkpoints_only(sandbox: Sandbox) -> None:
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

    config = {"marker": str(sandbox.root / "marker")}
    failure = train.FailureConfig(max_failures=2)
    fit(sandbox, fails_once, config=config, failure_config=failure)
    done = fit(sandbox, fails_once, config=config, failure_config=failure, resume="restart")
    assert done.return_value == [-1, -1, -1, 20]
    assert Result.from_path(done.path).return_value == done.return_value


def test_restart_works_without_an_existing_run(sandbox: Sandbox) -> None:
    assert fit(sandbox, _two_steps, resume="restart").return_value == 0
    assert not any(isinstance(one, r.RunRestarted) for one in sandbox.records())


_SCRIPT = """
import json, tempfile
from pathlib import Path
from holdfast import train
import beside

EPOCHS = 2

def train_loop(config):
    first = 0
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as directory:
            first = json.loads(Path(directory, "state.json").read_text()) + 1
    for epoch in range(first, EPOCHS):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "state.json").write_text(json.dumps(epoch))
            checkpoint = None
            if config["checkpoints"] and train.get_context().get_world_rank() == 0:
                checkpoint = train.Checkpoint.from_directory(directory)
            train.report({"epoch": epoch, "scaled": beside.scaled(epoch)}, checkpoint=checkpoint)
    return [first, EPOCHS]

result = train.DataParallelTrainer(
    train_loop,
    train_loop_config={"checkpoints": True, "api_key": "hunter2"},
    scaling_config=train.ScalingConfig(num_workers=1),
    run_config=train.RunConfig(name="run", storage_path=STORAGE),
).fit()
print(json.dumps([result.return_value, len(result.metrics_dataframe)]))
"""


class _Project:
    """A script with a module beside it, to be edited and run again."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.script = sandbox.root / "script.py"
        self.script.write_text(_SCRIPT.replace("STORAGE", repr(str(sandbox.storage))))
        (sandbox.root / "beside.py").write_text("def scaled(value):\n    return value * 2\n")

    def edit(self, old: str, new: str, file: str = "script.py") -> None:
        path = self.sandbox.root / file
        assert path.read_text().count(old) == 1
        path.write_text(path.read_text().replace(old, new))

    def run(self) -> tuple[list[int], int, str]:
        """The function's return value, the number of reports that count, and standard error."""
        environment = os.environ | {"HOLDFAST_QUIET": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, str(self.script)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        value, reports = json.loads(done.stdout.splitlines()[-1])
        return value, reports, done.stderr

    @property
    def controllers(self) -> int:
        return sum(isinstance(one, r.ControllerStarted) for one in self.sandbox.records())


def test_more_epochs_in_an_edited_script_are_trained_from_the_last_checkpoint(sandbox: Sandbox) -> None:
    project = _Project(sandbox)
    assert project.run()[:2] == ([0, 2], 2)
    value, reports, said = project.run()
    assert (value, reports, said, project.controllers) == ([0, 2], 2, "", 1), "the same script returns at once"

    project.edit("EPOCHS = 2", "EPOCHS = 4")
    value, reports, said = project.run()
    assert (value, reports) == ([2, 4], 4)
    assert "was complete, and is called again from checkpoint_000001" in said
    assert "`EPOCHS` was 2 and is 4" in said
    value, _, said = project.run()
    assert (value, said, project.controllers) == ([2, 4], "", 2), "and returns at once again"

    project.edit("num_workers=1", "num_workers=2")
    project.edit("import beside", "import beside  # a comment")
    value, _, said = project.run()
    assert (value, said, project.controllers) == ([2, 4], "", 2), "the number of workers does not count"

    project.edit("value * 2", "value * 3", "beside.py")
    value, reports, said = project.run()
    assert (value, reports) == ([4, 4], 4)
    assert "source of `beside.scaled` changed" in said

    project.edit("hunter2", "hunter3")
    _, _, said = project.run()
    assert "train_loop_config `api_key` changed" in said and "hunter" not in said
    kept = [path for path in (sandbox.storage / "run").rglob("*") if path.is_file()]
    assert kept and not [path for path in kept if b"hunter" in path.read_bytes()]


def test_an_edited_script_without_checkpoints_is_called_again_from_the_beginning(sandbox: Sandbox) -> None:
    project = _Project(sandbox)
    project.edit('"checkpoints": True', '"checkpoints": False')
    assert project.run()[:2] == ([0, 2], 2)
    project.edit("EPOCHS = 2", "EPOCHS = 3")
    value, reports, said = project.run()
    assert (value, reports) == ([0, 3], 3)
    assert "is called again from the beginning" in said


def test_the_journal_records_what_changed_in_the_script(sandbox: Sandbox) -> None:
    fit(sandbox, _two_steps)

    def more() -> str:
        return "more"

    assert fit(sandbox, more).return_value == "more"
    told = [one.changes for one in sandbox.records() if isinstance(one, r.ControllerStarted)]
    assert told[0] == () and any("training function was" in change for change in told[1])
