"""A worker fails in every way and at every moment: the run resumes from the last commit, and its result is exact."""

from __future__ import annotations

from typing import Any

import pytest
from tests.faults.programs import jobs
from tests.faults.programs.exact import check_exact, ends, starts
from tests.faults.programs.sandbox import Sandbox

from holdfast.core import records as r
from holdfast.errors import TrainingFailedError
from holdfast.train import Result

_STEPS = 6


_DEATHS = [
    ("raise", "raised ValueError: the data is bad"),
    ("exit", "called sys.exit(0)"),
    ("kill", "was killed by SIGKILL"),
    ("crash", "was killed by SIGSEGV"),
]


@pytest.mark.parametrize(("how", "cause"), _DEATHS, ids=[how for how, _ in _DEATHS])
@pytest.mark.parametrize("step", [0, 3])
def test_a_failed_worker_is_recovered_from(sandbox: Sandbox, how: str, cause: str, step: int) -> None:
    sandbox.fit({"steps": _STEPS, "every": 2, "faults": {f"1:1:{step}": how}}, failure={"max_failures": 1})
    check_exact(sandbox, _STEPS)
    (end,) = ends(sandbox)
    assert end.counted
    (failure,) = end.failures
    assert (failure.rank, failure.cause) == (1, cause)
    assert failure.host
    if how == "raise":
        assert failure.error_type == "ValueError"
        assert failure.traceback is not None and "_raise" in failure.traceback
    if how == "crash":
        assert failure.traceback is not None and "_crash" in failure.traceback


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_killed_while_staging_a_checkpoint(sandbox: Sandbox, rank: int) -> None:
    """The copy was half made: that checkpoint never was, and the one before it counts."""
    faults = {f"1:{rank}:3": "staging"}
    sandbox.fit({"steps": _STEPS, "every": 2, "faults": faults}, failure={"max_failures": 1})
    check_exact(sandbox, _STEPS)
    assert [one.iteration for one in starts(sandbox)] == [0, 2]
    assert not list(sandbox.storage.rglob("half.bin"))


def test_workers_killed_while_their_checkpoint_is_uploaded(sandbox: Sandbox) -> None:
    """Both ranks' parts were staged: the checkpoint is committed although they are gone, and no step is repeated."""
    faults = {"1:0:3": "uploading", "1:1:3": "uploading"}
    sandbox.fit({"steps": _STEPS, "every": 2, "faults": faults}, failure={"max_failures": 1})
    check_exact(sandbox, _STEPS)
    assert [one.iteration for one in starts(sandbox)] == [0, 4]


def test_a_run_fails_when_the_failure_budget_is_spent(sandbox: Sandbox) -> None:
    config = {"steps": _STEPS, "every": 2, "faults": {"*:1:3": "raise"}, "settled": True}
    with pytest.raises(TrainingFailedError, match="rank 1 raised ValueError: the data is bad") as caught:
        sandbox.fit(config, failure={"max_failures": 2, "stop_on_repeated_error": False})
    failures = caught.value.worker_failures
    assert list(failures) == [1]
    assert isinstance(failures[1], ValueError)
    assert str(failures[1]) == "the data is bad"
    assert "_raise" in "".join(failures[1].__notes__)
    assert len([end for end in ends(sandbox) if end.counted]) == 3
    text = (sandbox.storage / "run" / "error.txt").read_text()
    assert "ValueError: the data is bad" in text
    assert Result.from_path(sandbox.storage / "run").error is not None
    assert sandbox.check_stored() == ["checkpoint_000000"]


def test_an_error_that_comes_twice_in_the_same_way_ends_the_run(sandbox: Sandbox) -> None:
    with pytest.raises(TrainingFailedError, match="the same error at the same line after the same iteration, twice"):
        sandbox.fit({"steps": 2, "faults": {"*:0:0": "raise"}}, failure={"max_failures": -1})
    assert len(ends(sandbox)) == 2


def test_failures_of_both_ranks_are_reported(sandbox: Sandbox) -> None:
    def function() -> None:
        from holdfast import train

        rank = train.get_context().get_world_rank()
        train.collective.barrier()
        raise LookupError(f"rank {rank} found nothing")

    from holdfast import train

    trainer = train.DataParallelTrainer(
        function,
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(name="run", storage_path=sandbox.storage),
    )
    with pytest.raises(TrainingFailedError) as caught:
        trainer.fit()
    for rank, error in caught.value.worker_failures.items():
        assert isinstance(error, LookupError)
        assert str(error) == f"rank {rank} found nothing"
    assert set(caught.value.worker_failures) <= {0, 1}


def test_unlimited_max_failures(sandbox: Sandbox) -> None:
    faults = {f"{generation}:{generation % 2}:{generation}": "kill" for generation in range(1, 6)}
    sandbox.fit({"steps": _STEPS, "faults": faults}, failure={"max_failures": -1})
    check_exact(sandbox, _STEPS)
    assert len(ends(sandbox)) == 5


def test_repeated_failures_back_off(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_BACKOFF_S", "0.05")
    with pytest.raises(TrainingFailedError):
        failure = {"max_failures": 4, "stop_on_repeated_error": False}
        sandbox.fit({"steps": 2, "faults": {"*:0:0": "raise"}}, failure=failure)
    waits = _waits(sandbox)
    assert len(waits) == 4
    for wait_s, least_s in zip(waits[1:], (0.05, 0.1, 0.2), strict=True):
        assert wait_s >= least_s


def test_a_failure_after_progress_does_not_back_off(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an hour to wait, the test would not end."""
    monkeypatch.setenv("HOLDFAST_BACKOFF_S", "3600")
    faults = {f"{generation}:0:{generation}": "raise" for generation in range(1, 5)}
    sandbox.fit({"steps": _STEPS, "faults": faults, "settled": True}, failure={"max_failures": 4})
    check_exact(sandbox, _STEPS)


def _waits(sandbox: Sandbox) -> list[float]:
    ended: float | None = None
    waits = []
    for record in sandbox.records():
        if isinstance(record, r.GenerationEnded):
            ended = record.at
        elif isinstance(record, r.GenerationStarted) and ended is not None:
            waits.append(record.at - ended)
    return waits


_HANGS: list[tuple[dict[str, Any], str]] = [
    ({"1:1:3": "stop"}, "_stop"),
    ({"1:1:3": "deadlock"}, "_deadlock"),
    ({"1:1:3": "barrier"}, "_wait_for_others"),
]


@pytest.mark.parametrize(("faults", "frame"), _HANGS, ids=["stopped", "deadlock", "collective"])
def test_a_hung_worker_is_replaced_and_its_stacks_are_logged(
    sandbox: Sandbox, faults: dict[str, Any], frame: str
) -> None:
    failure = {"max_failures": 1, "progress_timeout_s": 4}
    sandbox.fit({"steps": _STEPS, "every": 2, "faults": faults}, failure=failure)
    check_exact(sandbox, _STEPS)
    (end,) = ends(sandbox)
    assert end.counted
    assert "no progress for 4 s" in end.why
    assert any(one.rank == 1 and "taken for hung" in one.cause for one in end.failures)
    assert frame in sandbox.log(1, 1)
    assert "most recent call first" in sandbox.log(1, 1)


def test_slow_steps_with_reports_are_no_hang(sandbox: Sandbox) -> None:
    result = sandbox.fit({"steps": 40, "every": 7}, failure={"progress_timeout_s": 30})
    assert result.return_value == jobs.undisturbed(40)[-1]
    assert ends(sandbox) == []
