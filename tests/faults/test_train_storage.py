"""Full storage: training continues while it can, the error is clear, and committed checkpoints stay intact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs import jobs, processes
from tests.faults.programs.driver import Driver
from tests.faults.programs.exact import check_exact
from tests.faults.programs.sandbox import Sandbox
from tests.mounts import tmpfs

pytestmark = pytest.mark.hosts

_STEPS = 40
_HELD: dict[str, Any] = {"steps": _STEPS, "every": 2, "faults": {"1:0:5": "hold", "1:1:5": "hold"}}


@pytest.fixture
def small(sandbox: Sandbox) -> Iterator[Path]:
    """The run's storage, on a file system of 2 MiB."""
    with tmpfs(sandbox.storage, "2m") as storage:
        try:
            yield storage
        finally:
            sandbox.close()


def _fill(storage: Path) -> Path:
    """Use up all free space."""
    ballast = storage / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return ballast


def _held(sandbox: Sandbox, patience_s: str) -> Driver:
    driver = sandbox.start_driver(_HELD, {"HOLDFAST_STORAGE_PATIENCE_S": patience_s})
    driver.expect("CheckpointCommitted", iteration=4)
    driver.expect_step(4)
    return driver


def test_a_run_continues_when_a_full_disk_gets_room_again(sandbox: Sandbox, small: Path) -> None:
    driver = _held(sandbox, "100")
    ballast = _fill(small)
    sandbox.open_gate()
    processes.wait_until(
        lambda: "no space" in driver.errors.lower() or "full" in driver.errors.lower(), "word of the full disk"
    )
    assert sandbox.check_stored() == ["checkpoint_000000", "checkpoint_000001"]
    ballast.unlink()
    assert driver.value() == jobs.undisturbed(_STEPS)[-1]
    check_exact(sandbox, _STEPS)
    assert "Traceback" not in driver.errors


def test_a_disk_that_stays_full_ends_the_run_with_a_clear_error(sandbox: Sandbox, small: Path) -> None:
    driver = _held(sandbox, "1")
    ballast = _fill(small)
    sandbox.open_gate()
    raised = driver.raised()
    assert raised["type"] == "ControllerError"
    assert "OutOfSpace" in raised["text"]
    assert str(small) in raised["text"]
    assert "Traceback" not in driver.errors
    names = sandbox.check_stored()
    assert names[:2] == ["checkpoint_000000", "checkpoint_000001"]
    ballast.unlink()
    assert sandbox.start_driver(_HELD).value() == jobs.undisturbed(_STEPS)[-1]
    check_exact(sandbox, _STEPS)


def test_a_disk_full_from_the_start_is_a_clear_error(sandbox: Sandbox, small: Path) -> None:
    ballast = _fill(small)
    driver = sandbox.start_driver({"steps": 2}, {"HOLDFAST_STORAGE_PATIENCE_S": "1"})
    assert driver.raised()["type"] == "OutOfSpace"
    ballast.unlink()
    assert sandbox.start_driver({"steps": 2}).value() == jobs.undisturbed(2)[-1]
