"""The driver is killed, stopped, or meets a second driver: nothing is left behind, and the same call resumes the
run."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from tests.faults.programs import jobs, processes
from tests.faults.programs.driver import Driver
from tests.faults.programs.sandbox import Sandbox

from holdfast.core import records as r
from holdfast.errors import ConfigError, RunBusy, TrainingFailedError
from holdfast.train import Result

_STEPS = 8
_HELD = {"steps": _STEPS, "every": 2, "faults": {"*:0:5": "hold", "*:1:5": "hold"}}
"""Both ranks stop after their fifth step, with two checkpoints made, until the test lets them go."""


def _held(sandbox: Sandbox, **options: Any) -> Driver:
    """A driver whose run stands still at step 5 with both checkpoints committed."""
    driver = sandbox.start_driver(_HELD, **options)
    driver.expect("CheckpointCommitted", iteration=4)
    driver.expect_step(4)
    return driver


def _until_shown(sandbox: Sandbox, rows: int) -> None:
    """Until a driver has nothing more to write into the run's files than what is there."""
    results = sandbox.storage / "run" / "result.json"
    processes.wait_until(
        lambda: results.exists() and results.read_bytes().count(b"\n") == rows, f"{rows} rows in result.json"
    )


def _check_resumed(sandbox: Sandbox, driver: Driver) -> None:
    """It resumed from the last commit, its result is exact, and no failure was counted."""
    assert driver.value() == jobs.undisturbed(_STEPS)[-1]
    assert driver.expect("GenerationStarted")["iteration"] == 4
    result = Result.from_path(sandbox.storage / "run")
    frame = result.metrics_dataframe
    assert frame is not None
    assert list(frame["loss"]) == jobs.losses(_STEPS)
    assert [record for record in sandbox.records() if isinstance(record, r.GenerationEnded) and record.counted] == []
    sandbox.check_stored()


def test_all_processes_die_with_a_killed_driver_and_the_same_call_resumes(sandbox: Sandbox) -> None:
    first = _held(sandbox)
    below = processes.descendants(first.pid)
    assert len(below) >= 4  # agent, zygote, two workers
    first.kill()
    first.end()
    processes.wait_gone(*below)
    sandbox.check_nothing_left()
    sandbox.open_gate()
    _check_resumed(sandbox, sandbox.start_driver(_HELD))


def test_the_same_call_resumes_after_all_processes_were_killed_at_once(sandbox: Sandbox) -> None:
    first = _held(sandbox)
    everyone = [first.pid, *processes.descendants(first.pid)]
    processes.signal_all(everyone, signal.SIGSTOP)  # or the first to die would take the others along
    processes.signal_all(everyone, signal.SIGKILL)
    first.end()
    processes.wait_gone(*everyone)
    sandbox.open_gate()
    _check_resumed(sandbox, sandbox.start_driver(_HELD))


@pytest.mark.parametrize(("number", "why"), [(signal.SIGINT, "Ctrl+C"), (signal.SIGTERM, "SIGTERM")])
def test_sigint_and_sigterm_stop_the_run_and_print_how_to_resume(sandbox: Sandbox, number: int, why: str) -> None:
    first = sandbox.start_driver(_HELD, {"HOLDFAST_JSON": "0", "HOLDFAST_QUIET": "0"})
    journal = sandbox.storage / "run" / "journal"

    def is_held() -> bool:
        text = b"".join(path.read_bytes() for path in journal.glob("000001-*.jsonl"))
        return b'"step":4' in text and b"checkpoint_000001" in text

    processes.wait_until(is_held, "step 4, and the commit of step 3")
    below = processes.descendants(first.pid)
    first.kill(number)
    assert first.raised()["type"] == "KeyboardInterrupt"
    processes.wait_gone(*below)
    said = first.errors
    assert "Training was stopped after 5 iterations" in said
    assert f"({why})" in said
    assert "To continue from checkpoint_000001, run this again:" in said
    assert "-m tests.faults.programs.driver_main" in said
    assert "Traceback" not in said
    assert any(isinstance(record, r.RunInterrupted) for record in sandbox.records())
    sandbox.open_gate()
    _check_resumed(sandbox, sandbox.start_driver(_HELD))


def test_a_second_interrupt_stops_at_once(sandbox: Sandbox) -> None:
    """The agent is stopped and answers nobody: the second Ctrl+C does not wait for it."""
    first = _held(sandbox)
    below = processes.descendants(first.pid)
    (agent,) = first.agents()
    os.kill(agent, signal.SIGSTOP)
    first.kill(signal.SIGINT)
    first.kill(signal.SIGTERM)  # two of a kind might arrive as one
    assert first.raised()["type"] == "KeyboardInterrupt"
    processes.wait_gone(*below)
    sandbox.open_gate()
    _check_resumed(sandbox, sandbox.start_driver(_HELD))


def test_the_failure_budget_survives_the_driver(sandbox: Sandbox) -> None:
    config = {**_HELD, "faults": {**_HELD["faults"], "1:1:1": "kill", "3:0:6": "raise"}}  # type: ignore[dict-item]
    failure = {"max_failures": 1}
    first = sandbox.start_driver(config, failure=failure)
    first.expect("CheckpointCommitted", iteration=4)
    first.expect_step(4, generation=2)
    first.kill()
    first.end()
    sandbox.open_gate()
    second = sandbox.start_driver(config, failure=failure)
    raised = second.raised()
    assert raised["type"] == "WorkerGroupError"
    assert list(raised["failures"]) == ["0"]
    assert "the data is bad" in raised["failures"]["0"]


def test_a_failed_run_that_is_started_again_has_its_whole_failure_budget(sandbox: Sandbox) -> None:
    config = {"steps": _STEPS, "every": 2, "faults": {"1:0:3": "raise", "2:0:5": "raise", "3:0:7": "raise"}}
    with pytest.raises(TrainingFailedError):
        sandbox.fit(config, failure={"max_failures": 1})
    assert (sandbox.storage / "run" / "error.txt").exists()
    result = sandbox.fit(config, failure={"max_failures": 1})
    assert result.return_value == jobs.undisturbed(_STEPS)[-1]
    assert result.error is None
    assert not (sandbox.storage / "run" / "error.txt").exists()


def test_a_second_driver_is_refused_naming_the_lease_holder(sandbox: Sandbox) -> None:
    first = _held(sandbox)
    with pytest.raises(RunBusy, match=rf"held by process {first.pid} on {os.uname().nodename} .*takeover=True"):
        sandbox.fit(_HELD)
    first.kill()
    first.end()
    sandbox.open_gate()
    _check_resumed(sandbox, sandbox.start_driver(_HELD))


def test_a_takeover_fences_the_first_driver_and_voids_its_later_commits(sandbox: Sandbox) -> None:
    first = _held(sandbox)
    _until_shown(sandbox, 5)
    held = [first.pid, *processes.descendants(first.pid)]
    processes.signal_all(held, signal.SIGSTOP)
    # The first wakes up, with workers that go on from step 5, while the second is in the middle of its work.
    gate = sandbox.gate("second")
    config = {**_HELD, "go": gate, "faults": {"*:0:7": "hold", "*:1:7": "hold"}}
    second = sandbox.start_driver(config, run={"takeover": True})
    second.expect("CheckpointCommitted", iteration=6)
    sandbox.open_gate()
    processes.signal_all(held, signal.SIGCONT)
    raised = first.raised()
    assert raised["type"] == "Fenced"
    assert str(second.pid) in raised["text"]
    processes.wait_gone(*held)
    sandbox.open_gate(gate)
    assert second.value() == jobs.undisturbed(_STEPS)[-1]
    _check_taken_over(sandbox)


def test_a_fenced_driver_ends_with_an_error_and_writes_nothing(sandbox: Sandbox) -> None:
    """After the last checkpoint only reports are left: the first could finish without meeting the fence."""
    config = {"steps": 5, "every": 2, "faults": {"1:0:4": "hold", "1:1:4": "hold"}}
    first = sandbox.start_driver(config)
    first.expect("CheckpointCommitted", iteration=4)
    _until_shown(sandbox, 4)
    held = [first.pid, *processes.descendants(first.pid)]
    processes.signal_all(held, signal.SIGSTOP)
    second = sandbox.start_driver(config, run={"takeover": True})
    assert second.value() == jobs.undisturbed(5)[-1]
    before = {path.name: path.read_bytes() for path in (sandbox.storage / "run").iterdir() if path.is_file()}
    sandbox.open_gate()
    processes.signal_all(held, signal.SIGCONT)
    assert first.raised()["type"] == "Fenced"
    after = {path.name: path.read_bytes() for path in (sandbox.storage / "run").iterdir() if path.is_file()}
    assert after == before
    assert sandbox.fit(config).return_value == jobs.undisturbed(5)[-1]


def _check_taken_over(sandbox: Sandbox) -> None:
    """One curve, in the journal and in the files, and one checkpoint for every two steps of it."""
    frame = Result.from_path(sandbox.storage / "run").metrics_dataframe
    assert frame is not None
    assert list(frame["loss"]) == jobs.losses(_STEPS)
    lines = (sandbox.storage / "run" / "result.json").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == jobs.losses(_STEPS)
    assert not (sandbox.storage / "run" / "error.txt").exists()
    assert len(sandbox.check_stored()) == _STEPS // 2


def test_a_complete_run_returns_at_once_without_workers(sandbox: Sandbox) -> None:
    done = sandbox.fit({"steps": 4})
    before = sorted(path for path in sandbox.storage.rglob("*"))
    again = sandbox.start_driver({"steps": 4})
    assert again.value() == done.return_value == jobs.undisturbed(4)[-1]
    assert again.all("ControllerStarted") == []
    assert sorted(path for path in sandbox.storage.rglob("*")) == before
    assert sandbox.fit({"steps": 4}).metrics == done.metrics


def test_a_changed_configuration_under_the_same_name_is_warned_about(
    sandbox: Sandbox, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"steps": 4, "every": 2, "faults": {"1:0:3": "raise"}}
    with pytest.raises(TrainingFailedError):
        sandbox.fit(config)
    assert "not as it was started" not in caplog.text
    result = sandbox.fit({**config, "steps": 6}, workers=1)
    assert "continues, but not as it was started" in caplog.text
    assert "train_loop_config `steps` was 4 and is 6" in caplog.text
    assert "num_workers" not in caplog.text
    assert "another name" in caplog.text
    assert result.return_value == jobs.undisturbed(6)[-1]


def test_a_changed_function_under_the_same_name_is_warned_about(
    sandbox: Sandbox, caplog: pytest.LogCaptureFixture
) -> None:
    from holdfast import train

    with pytest.raises(TrainingFailedError):
        sandbox.fit({"steps": 1, "faults": {"*:0:0": "raise"}}, workers=1)

    def other(config: dict[str, Any]) -> str:
        return "other"

    trainer = train.DataParallelTrainer(
        other,
        train_loop_config={"steps": 1},
        scaling_config=train.ScalingConfig(num_workers=1),
        run_config=train.RunConfig(name="run", storage_path=sandbox.storage),
    )
    assert trainer.fit().return_value == "other"
    assert "function was `tests.faults.programs.jobs.steps`" in caplog.text


def test_resume_modes_never_and_must(sandbox: Sandbox) -> None:
    with pytest.raises(ConfigError, match=r'resume="must".*no run at'):
        sandbox.fit({"steps": 2}, run={"resume": "must"})
    assert not sandbox.storage.exists()
    sandbox.fit({"steps": 2}, run={"resume": "never"})
    with pytest.raises(ConfigError, match=r'resume="never".*holds a run already'):
        sandbox.fit({"steps": 2}, run={"resume": "never"})
    assert sandbox.fit({"steps": 2}, run={"resume": "must"}).return_value == jobs.undisturbed(2)[-1]
