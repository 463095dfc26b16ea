"""Damaged or removed journal files: the run continues, its result is right, and a warning is printed."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs import jobs, kin
from tests.faults.programs.driver import Driver
from tests.faults.programs.exact import check_exact
from tests.faults.programs.place import Place

from holdfast.cli.main import main
from holdfast.train import Result

_STEPS = 8


def _holding(step: int, gate: str) -> dict[str, Any]:
    return {"steps": _STEPS, "every": 2, "go": gate, "faults": {f"*:0:{step}": "hold", f"*:1:{step}": "hold"}}


def _held_at(place: Place, step: int, gate: str, **options: Any) -> Driver:
    """A driver whose workers stand still before this step, with all checkpoints before it committed."""
    driver = place.drive(_holding(step, gate), **options)
    driver.expect("CheckpointCommitted", iteration=step // 2 * 2)
    driver.expect_step(step - 1)
    return driver


def _flip_a_bit_of_each_third_line(segment: Path) -> None:
    lines = segment.read_bytes().split(b"\n")
    for n in range(1, len(lines) - 1, 3):
        middle = len(lines[n]) // 2
        lines[n] = lines[n][:middle] + bytes([lines[n][middle] ^ 4]) + lines[n][middle + 1 :]
    segment.write_bytes(b"\n".join(lines))


def test_a_run_resumes_with_a_damaged_journal(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    first = _held_at(place, 5, place.go)
    first.kill()
    first.end()
    run = place.storage / "run"
    (segment,) = (run / "journal").glob("*.jsonl")
    _flip_a_bit_of_each_third_line(segment)
    (run / "journal" / "notes.txt").write_text("mine")
    assert Result.from_path(run).checkpoint is not None
    assert main(["events", str(run)]) == 0
    told = capsys.readouterr().out
    assert "DAMAGED  journal/notes.txt" in told
    assert f"DAMAGED  journal/{segment.name}" in told
    place.let_go()
    second = place.drive({"steps": _STEPS, "every": 2})
    assert second.value() == jobs.undisturbed(_STEPS)[-1]
    assert "notes.txt is no segment of this journal" in second.errors
    assert Result.from_path(run).return_value == jobs.undisturbed(_STEPS)[-1]


def test_a_journal_removed_during_a_run_is_written_again(place: Place) -> None:
    driver = _held_at(place, 5, place.go)
    shutil.rmtree(place.storage / "run" / "journal")
    place.let_go()
    assert driver.value() == jobs.undisturbed(_STEPS)[-1]
    assert "was removed while the run goes on" in driver.errors
    check_exact(place, _STEPS)
    again = place.drive(_holding(5, place.go))
    assert again.value() == jobs.undisturbed(_STEPS)[-1]
    assert again.all("ControllerStarted") == [], "it is complete"


def test_a_fenced_driver_that_wakes_up_does_not_change_result_files(place: Place) -> None:
    """Each driver is stopped before its next step, overtaken, and let go while its successor is at work."""
    stopped: tuple[Driver, list[int], str] | None = None
    for number, step in enumerate((3, 5, 7), start=1):
        gate = place.gate(f"gate_{number}")
        driver = _held_at(place, step, gate, run={"takeover": number > 1})
        if stopped is not None:
            _wake(place, *stopped, driver)
        held = [driver.pid, *kin.descendants(driver.pid)]
        kin.signal_all(held, signal.SIGSTOP)
        stopped = (driver, held, gate)
    last = place.drive({"steps": _STEPS, "every": 2}, run={"takeover": True})
    assert last.value() == jobs.undisturbed(_STEPS)[-1]
    before = _files(place)
    assert stopped is not None
    _wake(place, *stopped, last)
    assert _files(place) == before
    check_exact(place, _STEPS)
    assert "error.txt" not in before
    assert [path.name for path in (place.storage / "run").glob(".tmp*")] == []


def _wake(place: Place, driver: Driver, held: list[int], gate: str, successor: Driver) -> None:
    place.let_go(gate)
    kin.signal_all(held, signal.SIGCONT)
    raised = driver.raised()
    assert raised["type"] == "Fenced"
    assert str(successor.pid) in raised["text"]
    kin.gone(*held, within_s=10)


def _files(place: Place) -> dict[str, bytes]:
    """All result files; TensorBoard's are each controller's own."""
    run = place.storage / "run"
    return {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
