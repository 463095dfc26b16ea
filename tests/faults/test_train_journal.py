"""Damaged or removed journal files: the run continues, its result is right, and a warning is printed."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs import jobs, processes
from tests.faults.programs.driver import Driver
from tests.faults.programs.exact import check_exact
from tests.faults.programs.sandbox import Sandbox

from holdfast.cli.main import main
from holdfast.train import Result

_STEPS = 8


def _holding(step: int, gate: str) -> dict[str, Any]:
    return {"steps": _STEPS, "every": 2, "go": gate, "faults": {f"*:0:{step}": "hold", f"*:1:{step}": "hold"}}


def _held_at(sandbox: Sandbox, step: int, gate: str, **options: Any) -> Driver:
    """A driver whose workers stand still before this step, with all checkpoints before it committed."""
    driver = sandbox.start_driver(_holding(step, gate), **options)
    driver.expect("CheckpointCommitted", iteration=step // 2 * 2)
    driver.expect_step(step - 1)
    return driver


def _flip_a_bit_of_each_third_line(segment: Path) -> None:
    lines = segment.read_bytes().split(b"\n")
    for n in range(1, len(lines) - 1, 3):
        middle = len(lines[n]) // 2
        lines[n] = lines[n][:middle] + bytes([lines[n][middle] ^ 4]) + lines[n][middle + 1 :]
    segment.write_bytes(b"\n".join(lines))


def test_a_run_resumes_with_a_damaged_journal(sandbox: Sandbox, capsys: pytest.CaptureFixture[str]) -> None:
    first = _held_at(sandbox, 5, sandbox.go)
    first.kill()
    first.end()
    run = sandbox.storage / "run"
    (segment,) = (run / "journal").glob("*.jsonl")
    _flip_a_bit_of_each_third_line(segment)
    (run / "journal" / "notes.txt").write_text("mine")
    assert Result.from_path(run).checkpoint is not None
    assert main(["events", str(run)]) == 0
    output = capsys.readouterr().out
    assert "DAMAGED  journal/notes.txt" in output
    assert f"DAMAGED  journal/{segment.name}" in output
    sandbox.open_gate()
    second = sandbox.start_driver({"steps": _STEPS, "every": 2})
    assert second.value() == jobs.undisturbed(_STEPS)[-1]
    assert "notes.txt is no segment of this journal" in second.errors
    assert Result.from_path(run).return_value == jobs.undisturbed(_STEPS)[-1]


def test_a_journal_removed_during_a_run_is_written_again(sandbox: Sandbox) -> None:
    driver = _held_at(sandbox, 5, sandbox.go)
    shutil.rmtree(sandbox.storage / "run" / "journal")
    sandbox.open_gate()
    assert driver.value() == jobs.undisturbed(_STEPS)[-1]
    assert "was removed while the run goes on" in driver.errors
    check_exact(sandbox, _STEPS)
    again = sandbox.start_driver(_holding(5, sandbox.go))
    assert again.value() == jobs.undisturbed(_STEPS)[-1]
    assert again.all("ControllerStarted") == [], "it is complete"


def test_a_fenced_driver_that_wakes_up_does_not_change_result_files(sandbox: Sandbox) -> None:
    """Each driver is stopped before its next step, overtaken, and let go while its successor is at work."""
    stopped: tuple[Driver, list[int], str] | None = None
    for number, step in enumerate((3, 5, 7), start=1):
        gate = sandbox.gate(f"gate_{number}")
        driver = _held_at(sandbox, step, gate, run={"takeover": number > 1})
        if stopped is not None:
            _wake(sandbox, *stopped, driver)
        held = [driver.pid, *processes.descendants(driver.pid)]
        processes.signal_all(held, signal.SIGSTOP)
        stopped = (driver, held, gate)
    last = sandbox.start_driver({"steps": _STEPS, "every": 2}, run={"takeover": True})
    assert last.value() == jobs.undisturbed(_STEPS)[-1]
    before = _files(sandbox)
    assert stopped is not None
    _wake(sandbox, *stopped, last)
    assert _files(sandbox) == before
    check_exact(sandbox, _STEPS)
    assert "error.txt" not in before
    assert [path.name for path in (sandbox.storage / "run").glob(".tmp*")] == []


def _wake(sandbox: Sandbox, driver: Driver, held: list[int], gate: str, successor: Driver) -> None:
    sandbox.open_gate(gate)
    processes.signal_all(held, signal.SIGCONT)
    raised = driver.raised()
    assert raised["type"] == "Fenced"
    assert str(successor.pid) in raised["text"]
    processes.wait_gone(*held)


def _files(sandbox: Sandbox) -> dict[str, bytes]:
    """All result files; TensorBoard's are each controller's own."""
    run = sandbox.storage / "run"
    return {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
