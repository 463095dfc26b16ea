"""A spare agent takes the place of one that is lost: no agent is started for that."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.small import save, value_of
from tests.faults.programs import processes
from tests.faults.programs.processes import wait_until
from tests.faults.programs.sandbox import Sandbox

from holdfast import train
from holdfast.cli.main import main
from holdfast.core import records as r
from holdfast.train import FailureConfig, RunConfig, ScalingConfig


def _lose_agent_once(config: dict[str, Any]) -> int:
    """Report a checkpoint, and kill the agent as soon as the test says so; gives what the checkpoint holds."""
    if (checkpoint := train.get_checkpoint()) is not None:
        return value_of(checkpoint)
    save(1, checkpoint_upload_mode=train.CheckpointUploadMode.SYNC)
    Path(config["here"]).write_text("here")
    Path(config["go"]).read_text()
    agent = processes.parent_of(os.getppid())
    assert agent is not None
    os.kill(agent, signal.SIGKILL)
    while True:
        signal.pause()  # whoever kills the agent kills this process with it


def test_the_place_of_a_killed_agent_is_taken_by_the_spare_that_was_prepared_before(
    sandbox: Sandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {end: str(sandbox.root / f"spare.{end}") for end in ("here", "go")}
    for end in config.values():
        os.mkfifo(end)
    trainer = train.DataParallelTrainer(
        _lose_agent_once,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=1, spares=1),
        run_config=RunConfig(
            name="run", storage_path=sandbox.storage, failure_config=FailureConfig(max_failures=1), verbose=0
        ),
    )
    run = str(sandbox.storage / "run")

    def spares() -> list[str]:
        capsys.readouterr()
        assert main(["status", run, "--json"]) == 0
        return [one["agent"] for one in json.loads(capsys.readouterr().out).get("agents", []) if one.get("spare")]

    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor())
        result = threads.submit(trainer.fit)
        Path(config["here"]).read_text()
        stack.callback(main, ["stop", run, "--force"])
        wait_until(spares, "a spare is prepared")
        (spare,) = spares()
        assert main(["status", run]) == 0
        assert "joined (spare)" in capsys.readouterr().out
        Path(config["go"]).write_text("go")
        assert result.result(60).return_value == 1
    records = sandbox.records()
    first, second = (one for one in records if isinstance(one, r.GenerationStarted))
    (lost,) = (one for one in records if isinstance(one, r.AgentRemoved))
    assert first.agents == (lost.agent,) and second.agents == (spare,)
    since_loss = records[records.index(lost) : records.index(second)]
    assert not [one for one in since_loss if isinstance(one, r.AgentAdded)], "nothing was started for it"
