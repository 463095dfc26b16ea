"""Retention during user commands, takeovers and full disks: no run fails, and nothing is removed that must stay."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from typing import Any

import pytest
from tests.faults.programs import jobs, processes
from tests.faults.programs.driver import Driver
from tests.faults.programs.sandbox import Sandbox
from tests.mounts import read_only_bind

from holdfast.cli.main import main
from holdfast.core import records as r
from holdfast.errors import ControllerError, OutOfSpace, Unavailable
from holdfast.storage.posix.store import PosixStore

_STEPS = 8


def _held(sandbox: Sandbox, at: int, keep: int = 1, **config: Any) -> Driver:
    """A driver whose run stands still before step `at`, with the checkpoints of all steps before it committed."""
    config = {"steps": _STEPS, "faults": {f"*:0:{at}": "hold", f"*:1:{at}": "hold"}, **config}
    driver = sandbox.start_driver(config, run=_config(num_to_keep=keep), failure={"max_failures": 1})
    driver.expect("CheckpointCommitted", iteration=at)
    return driver


def _names(sandbox: Sandbox) -> list[str]:
    return sorted(path.name for path in (sandbox.storage / "run").glob("checkpoint_*"))


def _deleted(sandbox: Sandbox) -> list[str]:
    return [record.name for record in sandbox.records() if isinstance(record, r.CheckpointDeleted)]


def test_pin_and_unpin_during_a_run_are_respected(sandbox: Sandbox) -> None:
    later = sandbox.gate("later")
    faults = {f"*:{rank}:{step}": fault for rank in (0, 1) for step, fault in ((2, "hold"), (4, "hold-later"))}
    driver = _held(sandbox, 2, faults=faults, later=later)
    driver.expect("CheckpointDeleted", name="checkpoint_000000")
    pinned = str(sandbox.storage / "run" / "checkpoint_000001")
    assert main(["ckpt", "pin", pinned]) == 0
    sandbox.open_gate()
    driver.expect("CheckpointDeleted", name="checkpoint_000002")
    assert _names(sandbox) == ["checkpoint_000001", "checkpoint_000003"]
    assert main(["ckpt", "unpin", pinned]) == 0
    sandbox.open_gate(later)
    assert driver.value() == jobs.undisturbed(_STEPS)[-1]
    assert _names(sandbox) == [f"checkpoint_{_STEPS - 1:06d}"]
    assert "Traceback" not in driver.errors
    sandbox.check_stored()


def test_a_checkpoint_removed_by_the_user_during_a_run_is_no_error(sandbox: Sandbox) -> None:
    driver = _held(sandbox, 3, keep=2)
    driver.expect("CheckpointDeleted", name="checkpoint_000000")
    assert main(["ckpt", "rm", str(sandbox.storage / "run" / "checkpoint_000001")]) == 0
    sandbox.open_gate()
    assert driver.value() == jobs.undisturbed(_STEPS)[-1]
    assert driver.expect("CheckpointDeleted", name="checkpoint_000001")["why"] == "somebody else removed it"
    assert _names(sandbox) == [f"checkpoint_{_STEPS - 2:06d}", f"checkpoint_{_STEPS - 1:06d}"]
    assert "Traceback" not in driver.errors


def test_a_run_resumes_from_the_previous_checkpoint_when_the_newest_was_removed(sandbox: Sandbox) -> None:
    driver = _held(sandbox, 3, keep=2)
    driver.expect("CheckpointDeleted", name="checkpoint_000000")
    assert main(["ckpt", "rm", "--force", str(sandbox.storage / "run" / "checkpoint_000002")]) == 0
    os.kill(driver.workers()[0], signal.SIGKILL)
    driver.expect("GenerationStarted", checkpoint="checkpoint_000001")
    sandbox.open_gate()
    assert driver.value() == jobs.undisturbed(_STEPS)[-1]


def test_checkpoint_names_are_reusable_once_retention_removed_them(sandbox: Sandbox) -> None:
    config = {"steps": 6, "names": ["even", "odd"], "files": 40}
    result = sandbox.fit(config, run=_config(num_to_keep=1))
    assert result.return_value == jobs.undisturbed(6)[-1]
    assert sandbox.check_stored() == ["odd"]
    assert _deleted(sandbox) == ["even", "odd"] * 2 + ["even"]


def _config(**settings: Any) -> dict[str, Any]:
    return {"checkpoint_config": settings}


def test_a_controller_paused_in_a_removal_does_not_delete_its_successors_checkpoint(sandbox: Sandbox) -> None:
    """The first stops itself while it removes the first checkpoint of a name that its successor uses again."""
    names = ["even", "odd"]
    faults = {f"*:{rank}:4": "hold" for rank in (0, 1)}
    config = {"steps": _STEPS, "names": names, "faults": faults}
    first = sandbox.start_driver(config, {"HOLDFAST_TEST_STOP_IN_REMOVAL": "even"}, run=_config(num_to_keep=1))
    # What it printed before it stopped may still be in its memory: its state is all that can be waited for.
    processes.wait_until(
        lambda: processes.describe(first.pid).split("state ")[1][0] == "T", "the first driver is stopped"
    )
    second = sandbox.start_driver(config, run={**_config(num_to_keep=1), "takeover": True})
    second.expect("CheckpointCommitted", iteration=3, name="even")
    second.expect("CheckpointCommitted", iteration=4, name="odd")
    second.expect("CheckpointDeleted", after=_after(second, "CheckpointCommitted", 3), name="even")
    sandbox.open_gate()
    second.expect("CheckpointCommitted", iteration=5, name="even")
    first.kill(signal.SIGCONT)
    assert first.raised()["type"] == "Fenced"
    assert second.value() == jobs.undisturbed(_STEPS)[-1]
    assert sandbox.check_stored() == ["odd"]


def _after(driver: Driver, kind: str, iteration: int) -> int:
    return next(
        at for at, line in enumerate(driver.lines) if (line.get("kind"), line.get("iteration")) == (kind, iteration)
    )


def test_the_next_driver_finishes_a_removal_begun_by_a_killed_one(sandbox: Sandbox) -> None:
    """The driver dies when only the manifest of a checkpoint that retention removes is deleted."""
    first = _held(sandbox, 2, keep=2)
    first.kill()
    first.end()
    (sandbox.storage / "run" / "checkpoint_000000" / ".manifest.json").unlink()
    sandbox.open_gate()
    second = sandbox.start_driver({"steps": _STEPS}, run=_config(num_to_keep=1))
    assert second.value() == jobs.undisturbed(_STEPS)[-1]
    assert _names(sandbox) == [f"checkpoint_{_STEPS - 1:06d}"]
    assert second.expect("CheckpointDeleted", name="checkpoint_000000").get("why") is None
    assert second.all("CheckpointDamaged") == []


@pytest.mark.hosts
def test_a_failed_removal_is_reported_once_and_retried(sandbox: Sandbox) -> None:
    later = sandbox.gate("later")
    faults = {f"*:{rank}:{step}": fault for rank in (0, 1) for step, fault in ((2, "hold"), (6, "hold-later"))}
    driver = _held(sandbox, 2, keep=2, faults=faults, later=later)
    doomed = sandbox.storage / "run" / "checkpoint_000000"
    with read_only_bind(doomed, doomed):
        sandbox.open_gate()
        assert "read-only" in driver.expect("RemovalFailed", name="checkpoint_000000")["why"]
        driver.expect("CheckpointDeleted", name="checkpoint_000003")
        assert "checkpoint_000000" not in _deleted(sandbox)
    driver.expect("CheckpointDeleted", name="checkpoint_000000")
    sandbox.open_gate(later)
    assert driver.value() == jobs.undisturbed(_STEPS)[-1]
    assert len(driver.all("RemovalFailed")) == 1
    assert sandbox.check_stored() == _names(sandbox) == [f"checkpoint_{_STEPS - 2:06d}", f"checkpoint_{_STEPS - 1:06d}"]


def test_a_reservation_with_a_lost_answer_is_recognised_as_our_own(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reservation is made, its answer is lost, and storage is away for longer than one call is patient."""
    create, lost = PosixStore.create, ["best/.reserved.json"]

    def deaf(self: PosixStore, key: str, data: bytes) -> None:
        create(self, key, data)
        if key in lost:
            lost.remove(key)
            raise Unavailable("no answer")

    monkeypatch.setattr(PosixStore, "create", deaf)
    result = sandbox.fit({"steps": 1, "names": ["best"]})
    assert lost == []
    assert result.return_value == jobs.undisturbed(1)[-1]
    assert sandbox.check_stored() == ["best"]


def test_a_disk_full_right_after_the_manifest_was_linked_loses_no_file(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its fsync nor a tombstone finds space, until the run has no patience left."""
    create, delete = PosixStore.create, PosixStore.delete
    linked: list[str] = []

    def full(self: PosixStore, key: str, data: bytes) -> None:
        if not linked:
            create(self, key, data)
        if key.endswith("checkpoint_000001/.manifest.json") or linked:
            linked.append(key)
            raise OutOfSpace("No space is left.")

    def unsynced(self: PosixStore, keys: Iterable[str]) -> None:
        delete(self, keys)
        if linked:
            raise OutOfSpace("No space is left.")

    with monkeypatch.context() as patch, pytest.raises(ControllerError, match="OutOfSpace"):
        patch.setattr(PosixStore, "create", full)
        patch.setattr(PosixStore, "delete", unsynced)
        patch.setenv("HOLDFAST_STORAGE_PATIENCE_S", "0.5")
        sandbox.fit({"steps": 2})
    assert sandbox.check_stored() == ["checkpoint_000000", "checkpoint_000001"]
