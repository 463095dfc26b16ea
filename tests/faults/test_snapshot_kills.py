"""Deaths at every moment between `report`'s copy and the commit: nothing torn is ever trusted, and what `report`
accepted is there afterwards, unless the agent that held it is what died."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs import dying_agent, states
from tests.faults.programs.sandbox import Sandbox

from holdfast import train
from holdfast.core import records as r

_STEPS = 5


def _fit(sandbox: Sandbox, workers: int = 1, failures: int = 3, **config: Any) -> train.Result:
    given = {"steps": _STEPS, "accepted": str(sandbox.root / "accepted"), "run": str(sandbox.storage / "run"), **config}
    return train.DataParallelTrainer(
        states.steps,
        train_loop_config=given,
        scaling_config=train.ScalingConfig(num_workers=workers),
        run_config=train.RunConfig(
            name="run", storage_path=sandbox.storage, failure_config=train.FailureConfig(max_failures=failures)
        ),
    ).fit()


def _check(sandbox: Sandbox, result: train.Result) -> None:
    """Every committed checkpoint verifies and is of one step; the last one is the last step's; no memory is left."""
    assert result.return_value == _STEPS
    sandbox.check_stored()
    found = [states.check(checkpoint.load_state()) for checkpoint, _ in result.best_checkpoints]
    assert found == sorted(set(found)) and found[-1] == _STEPS
    assert _memory_in_use(sandbox) == []


_earlier: set[int] = set()
"""The inodes of snapshots that earlier tests of this process left to the garbage collector (the simulator's agents)."""


@pytest.fixture(autouse=True)
def _note_earlier_memory() -> None:
    _earlier.clear()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if "holdfast-snapshot" in str(fd.readlink()):
                _earlier.add(fd.stat().st_ino)


def _memory_in_use(sandbox: Sandbox) -> list[str]:
    """Snapshots of this test's runs in any process that is left; there must be none."""
    marker, found = sandbox.marker.encode(), []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            ours = process.name == str(os.getpid()) or marker in (process / "environ").read_bytes().split(b"\0")
            for fd in (process / "fd").iterdir() if process.name.isdecimal() and ours else ():
                with suppress(OSError):
                    if "holdfast-snapshot" in str(fd.readlink()) and fd.stat().st_ino not in _earlier:
                        found.append(f"{process.name}: {fd.readlink()}")
    return found


def _failures(sandbox: Sandbox) -> int:
    return sum(1 for record in sandbox.records() if isinstance(record, r.GenerationEnded) and record.counted)


@pytest.mark.parametrize("moment", states.MOMENTS)
def test_a_killed_worker_resumes_from_the_snapshot(sandbox: Sandbox, moment: str) -> None:
    result = _fit(sandbox, faults={f"1:{3}": moment}, sources={"2": "memory"})
    assert _failures(sandbox) == 1
    _check(sandbox, result)


@pytest.mark.parametrize("moment", states.MOMENTS)
def test_a_killed_agent_resumes_from_storage(sandbox: Sandbox, moment: str) -> None:
    result = _fit(sandbox, faults={"1:3": moment}, sources={"2": "storage"}, agent=True)
    assert _failures(sandbox) == 1
    _check(sandbox, result)


@pytest.mark.parametrize("step", [*range(1, 12), 19, 20])
def test_an_agent_killed_during_an_upload_leaves_no_partial_checkpoint(
    sandbox: Sandbox, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the beginning and the end of every file of the first checkpoint, and in the middle of the second."""
    monkeypatch.setenv("PYTHONPATH", dying_agent.install(sandbox.root / "path"))
    monkeypatch.setenv("HOLDFAST_FORK_DRIVER", "0")  # this process has not imported that
    monkeypatch.setenv("HOLDFAST_TEST_DIE_AT", str(step))
    monkeypatch.setenv("HOLDFAST_TEST_DIED", str(sandbox.root / "died"))
    result = _fit(sandbox, agent=True)
    assert (sandbox.root / "died").exists()
    assert _failures(sandbox) == 1
    _check(sandbox, result)


@pytest.mark.parametrize("moment", ["half-copied", "unsealed"])
def test_a_half_written_snapshot_buffer_is_not_loaded(
    sandbox: Sandbox, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory for one snapshot only, the newest commit itself is what is being overwritten."""
    monkeypatch.setenv("HOLDFAST_SNAPSHOT_LIMIT_BYTES", str(50 << 20))
    result = _fit(sandbox, faults={"1:3": moment}, sources={"2": "storage"})
    assert _failures(sandbox) == 1
    _check(sandbox, result)


def test_without_snapshot_memory_states_are_written_as_files(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_SNAPSHOT_LIMIT_BYTES", "0")
    result = _fit(sandbox, faults={"1:3": "sent", "2:4": "committed"}, sources={"2": "storage"})
    assert _failures(sandbox) == 2
    _check(sandbox, result)
    assert "HOLDFAST_SNAPSHOT_LIMIT_BYTES" in sandbox.log(1, 0)


def test_a_checkpoint_of_all_ranks_survives_the_failure_of_one(sandbox: Sandbox) -> None:
    """Rank 1 fails when both ranks' reports have returned: the order to stop must not overtake them."""
    result = _fit(sandbox, workers=2, faults={"1:3": "peer-fails"}, sources={"2": "memory"})
    assert _failures(sandbox) == 1
    _check(sandbox, result)


def test_all_ranks_of_a_node_load_one_ranks_snapshot(sandbox: Sandbox) -> None:
    result = _fit(sandbox, workers=2, faults={"1:3": "committed"}, sources={"2": "memory"})
    assert _failures(sandbox) == 1
    _check(sandbox, result)


def test_repeated_worker_kills_with_snapshots(sandbox: Sandbox) -> None:
    faults = {"1:2": "unsealed", "2:3": "sent", "3:4": "half-copied", "4:5": "returned"}
    sources = {str(generation): "memory" for generation in range(2, 6)}
    result = _fit(sandbox, failures=-1, faults=faults, sources=sources)
    assert _failures(sandbox) == 4
    _check(sandbox, result)


def test_unchanged_files_are_not_written_again(sandbox: Sandbox) -> None:
    _check(sandbox, _fit(sandbox))
    first, *others = [one.uploaded_bytes for one in sandbox.records() if isinstance(one, r.CheckpointCommitted)]
    assert first > 2 * (16 << 20)
    assert all(16 << 20 < sent_bytes < (16 << 20) + 10_000 for sent_bytes in others)


def test_snapshots_in_local_mode(sandbox: Sandbox) -> None:
    _check(sandbox, _fit(sandbox, workers=0))
