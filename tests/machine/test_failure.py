"""A worker dies: one failure is counted, the next generation starts from the last commit, and a budget has an end."""

from __future__ import annotations

import pytest
from tests.machine.rig import NOTHING, Rig, checkpoint_of, committed, died, exited, persist, report, running, stored

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.checkpoint_types import StoredCheckpoint
from holdfast.core.failure_kind import FailureKind
from holdfast.core.machine import Step
from holdfast.core.root_cause import root_cause

STOP = c.StopWorkers(generation=1, agents=("a",))
STOPPED = e.WorkersStopped(generation=1, agent="a")


def ended(at: float, failures: tuple[r.WorkerFailure, ...], iteration: int = 0, **rest: object) -> r.GenerationEnded:
    cause = root_cause(failures)
    why = f"rank {cause.rank} {cause.cause}"
    fields: dict[str, object] = {"generation": 1, "detected_at": 10.0, "counted": True} | rest
    return r.GenerationEnded(at=at, why=why, iteration=iteration, failures=failures, **fields)  # type: ignore[arg-type]


def start(generation: int, checkpoint: StoredCheckpoint | None = None, workers: int = 1) -> c.StartWorkers:
    return c.StartWorkers(
        generation=generation,
        world_size=workers,
        places=(c.Place(agent="a", node_rank=0, ranks=tuple(range(workers))),),
        node_count=1,
        checkpoint=checkpoint.name if checkpoint else None,
        token=checkpoint.token if checkpoint else "",
        iteration=checkpoint.iteration if checkpoint else 0,
        restart_count=generation - 1,
    )


def test_the_next_generation_starts_from_the_last_commit() -> None:
    rig = running(max_failures=1)
    rig.feed(report(1, 4.0, checkpoint=True), 4.0)
    rig.feed(checkpoint_of(1, stored(0, 1)), 5.0)
    rig.feed(report(2, 6.0), 6.0)
    assert rig.feed(exited(died(0)), 10.0) == Step([], [STOP])
    again = r.GenerationStarted(
        at=10.5, generation=2, world_size=1, agents=("a",), iteration=1, checkpoint="checkpoint_000000"
    )
    assert rig.feed(STOPPED, 10.5) == Step([ended(10.5, (died(0),), iteration=2), again], [start(2, stored(0, 1))])
    assert rig.feed(e.WorkersStarted(generation=2, agent="a"), 11.0).records == [
        r.GenerationRunning(at=11.0, generation=2)
    ]
    assert rig.feed(report(1, 12.0, generation=2), 12.0).records == [
        r.Reported(at=12.0, generation=2, iteration=2, metrics={"loss": 1})
    ]


def test_a_worker_that_dies_before_the_group_runs_is_a_failure() -> None:
    rig = Rig(workers_min=1, max_failures=1)
    rig.feed(e.ControllerBegan(epoch=1, host="head", pid=101), 0.0)
    rig.feed(e.AgentJoined(agent="a", host="host-a", slots=1), 1.0)
    rig.feed(e.AgentPrepared(agent="a"), 2.0)
    assert rig.feed(exited(died(0)), 2.001) == Step([], [STOP])
    assert rig.feed(e.WorkersStarted(generation=1, agent="a"), 2.002) == NOTHING


def test_a_spent_failure_budget_ends_the_run_naming_the_rank() -> None:
    rig = running(max_failures=0)
    rig.feed(exited(died(0, "raised ValueError: bad")), 10.0)
    failure = died(0, "raised ValueError: bad")
    failed = r.RunFailed(at=11.0, error="rank 0 raised ValueError: bad", failures=(failure,))
    assert rig.feed(STOPPED, 11.0) == Step([ended(11.0, (failure,)), failed], [c.EndRun(status=c.RunStatus.FAILED)])
    assert rig.feed(report(1, 12.0), 12.0) == NOTHING


def test_an_unlimited_failure_budget_is_never_spent() -> None:
    rig = running(max_failures=-1, backoff_max_s=0.0)
    for generation in range(1, 30):
        rig.feed(exited(died(0), generation), float(10 * generation))
        decided = rig.stopped(generation, "a", 10.0 * generation + 1)
        assert decided.commands[-1] == start(generation + 1)
    assert rig.state.durable.failures == 29


@pytest.mark.parametrize(
    "message", ["Connection closed by peer", "/workspace/src/collective/result.cc:83: [histogram.h:197]: Poll error"]
)
def test_failures_of_several_ranks_count_once_and_the_root_cause_is_named(message: str) -> None:
    rig = running(workers=3, max_failures=0)
    echo = died(2, "raised RuntimeError", error_type="RuntimeError", error=message)
    cause = died(1, "was killed by SIGKILL")
    assert rig.feed(exited(echo), 10.0) == Step([], [STOP])
    assert rig.feed(exited(cause), 10.1) == NOTHING
    assert rig.feed(exited(cause), 10.2) == NOTHING
    failed = r.RunFailed(at=11.0, error="rank 1 was killed by SIGKILL", failures=(echo, cause))
    assert rig.feed(STOPPED, 11.0) == Step([ended(11.0, (echo, cause)), failed], [c.EndRun(status=c.RunStatus.FAILED)])


def test_the_next_generation_waits_for_a_complete_checkpoint_of_the_last() -> None:
    rig = running(max_failures=1)
    asked = rig.feed(report(1, 4.0, checkpoint=True), 4.0)
    assert asked.commands == [persist(1, ((0, "a"),))]
    rig.feed(exited(died(0)), 10.0)
    assert rig.feed(STOPPED, 10.5) == Step([ended(10.5, (died(0),), iteration=1)], [])
    assert rig.deadline is None
    announced = c.AnnounceCheckpoint(ticket=e.Ticket(1, 1), name="checkpoint_000000", token="token-0", agents=("a",))
    again = r.GenerationStarted(
        at=12.0, generation=2, world_size=1, agents=("a",), iteration=1, checkpoint="checkpoint_000000"
    )
    found = stored(0, 1)
    assert rig.feed(checkpoint_of(1, found), 12.0) == Step(
        [committed(found, 12.0), again], [announced, start(2, found)]
    )


def test_an_incomplete_checkpoint_is_given_up_with_its_generation() -> None:
    rig = running(workers=2, max_failures=1)
    rig.feed(report(1, 4.0, checkpoint=True), 4.0)
    rig.feed(exited(died(1)), 10.0)
    given_up = r.CheckpointAbandoned(
        at=10.5, generation=1, iteration=1, why="the workers stopped before every rank had reported it"
    )
    again = r.GenerationStarted(at=10.5, generation=2, world_size=2, agents=("a",), iteration=0)
    announced = c.AnnounceCheckpoint(ticket=e.Ticket(1, 1), name=None, agents=("a",))
    assert rig.feed(STOPPED, 10.5) == Step(
        [ended(10.5, (died(1),), iteration=1), given_up, again], [announced, start(2, workers=2)]
    )


def test_reports_of_a_stopping_generation_count() -> None:
    rig = running(workers=2, max_failures=1)
    rig.feed(report(1, 4.0, checkpoint=True), 4.0)
    rig.feed(exited(died(0)), 10.0)
    assert rig.feed(report(1, 9.9, checkpoint=True, rank=1), 10.1).commands == [
        persist(1, ((0, "a"), (1, "a")), world_size=2)
    ]


def raised(rank: int) -> r.WorkerFailure:
    return died(rank, "raised ValueError: bad", error_type="ValueError", error="bad")


def test_ranks_may_make_the_report_after_which_another_rank_raised() -> None:
    rig = running(workers=3, max_failures=1)
    rig.feed(report(1, 9.5, rank=1), 9.5)
    assert rig.feed(exited(raised(1)), 10.0) == NOTHING
    assert rig.deadline == 11.5
    rig.feed(report(1, 10.2, checkpoint=True), 10.2)
    caught_up = rig.feed(report(1, 10.3, rank=2), 10.3)
    assert caught_up == Step([], [STOP, persist(1, ((0, "a"),), world_size=3)])
    assert rig.deadline is None


def test_ranks_that_do_not_catch_up_with_one_that_raised_are_stopped() -> None:
    rig = running(workers=2, max_failures=1)
    rig.feed(report(1, 9.5, rank=1), 9.5)
    rig.feed(exited(raised(1)), 10.0)
    assert rig.feed(e.TimePassed(), 11.4) == NOTHING
    assert rig.feed(e.TimePassed(), 11.5) == Step([], [STOP])


def test_ranks_that_fail_as_well_are_not_waited_for() -> None:
    rig = running(workers=2, max_failures=1)
    rig.feed(report(1, 9.5, rank=1), 9.5)
    rig.feed(exited(raised(1)), 10.0)
    assert rig.feed(exited(raised(0)), 10.1) == Step([], [STOP])


@pytest.mark.parametrize(
    ("failure", "at"),
    [(died(1), 10.0), (raised(0), 10.0), (raised(1), 12.0)],
    ids=["killed", "not ahead", "long after its report"],
)
def test_ranks_are_stopped_at_once_where_waiting_saves_nothing(failure: r.WorkerFailure, at: float) -> None:
    rig = running(workers=2, max_failures=1)
    rig.feed(report(1, 9.5, rank=1), 9.5)
    assert rig.feed(exited(failure), at) == Step([], [STOP])


def test_a_request_to_stop_ends_the_wait_for_ranks_that_are_behind() -> None:
    rig = running(workers=2, max_failures=1)
    rig.feed(report(1, 9.5, rank=1), 9.5)
    rig.feed(exited(raised(1)), 10.0)
    assert rig.feed(e.StopRequested(why="Ctrl+C"), 10.1) == Step([], [STOP])


def test_a_damaged_checkpoint_counts_as_no_failure_and_is_not_used_again() -> None:
    rig = Rig(workers_min=1, max_failures=0)
    rig.feed(e.ControllerBegan(epoch=1, host="head", pid=101, stored=(stored(0, 1), stored(1, 2))), 0.0)
    rig.feed(e.AgentJoined(agent="a", host="host-a", slots=1), 1.0)
    assert rig.feed(e.AgentPrepared(agent="a"), 2.0).commands == [start(1, stored(1, 2))]
    named = {"error_type": "holdfast.errors.Damaged", "damaged_checkpoint": "checkpoint_000001"}
    failure = died(0, "raised Damaged: a hash differs", kind=FailureKind.DAMAGED, error="a hash differs", **named)
    rig.feed(exited(failure), 10.0)
    damaged = r.CheckpointDamaged(at=11.0, name="checkpoint_000001", why="a hash differs")
    again = r.GenerationStarted(
        at=11.0, generation=2, world_size=1, agents=("a",), iteration=1, checkpoint="checkpoint_000000"
    )
    assert rig.feed(STOPPED, 11.0) == Step(
        [ended(11.0, (failure,), iteration=2, counted=False), damaged, again], [start(2, stored(0, 1))]
    )


def test_damage_found_by_an_agent_makes_the_run_fall_back() -> None:
    """Also with no budget for failures, and whether or not another agent's workers have started meanwhile."""
    rig = Rig(workers_min=2, max_failures=0)
    rig.feed(e.ControllerBegan(epoch=1, host="head", pid=101, stored=(stored(0, 1), stored(1, 2))), 0.0)
    for agent in ("a", "b"):
        rig.feed(e.AgentJoined(agent=agent, host=f"host-{agent}", slots=1), 1.0)
    for agent in ("a", "b"):
        rig.feed(e.AgentPrepared(agent=agent), 2.0)
    assert rig.state.generation is not None and rig.state.generation.checkpoint == "checkpoint_000001"
    rig.feed(e.WorkersStarted(generation=1, agent="b"), 3.0)
    found = e.DamageFound(generation=1, agent="a", checkpoint="checkpoint_000001", why="a hash differs")
    assert rig.feed(found, 10.0) == Step([], [c.StopWorkers(generation=1, agents=("a", "b"))])
    assert rig.feed(e.DamageFound(generation=1, agent="b", checkpoint="checkpoint_000001", why="x"), 10.1) == NOTHING
    rig.feed(exited(died(1, "raised RuntimeError", agent="b")), 10.2)
    rig.feed(e.WorkersStopped(generation=1, agent="b"), 10.3)
    decided = rig.feed(STOPPED, 11.0)
    assert decided.records == [
        r.GenerationEnded(
            at=11.0, generation=1, why="checkpoint_000001 is damaged", detected_at=10.0, iteration=2, counted=False
        ),
        r.CheckpointDamaged(at=11.0, name="checkpoint_000001", why="a hash differs"),
        r.GenerationStarted(
            at=11.0, generation=2, world_size=2, agents=("a", "b"), iteration=1, checkpoint="checkpoint_000000"
        ),
    ]
    assert rig.feed(found, 12.0) == NOTHING, "news of a generation that is gone"


@pytest.mark.parametrize("named", [None, "checkpoint_000007"])
def test_damage_in_a_foreign_checkpoint_counts_as_a_failure(named: str | None) -> None:
    """Pretrained weights, or a checkpoint that the run does not have (any more): trying again would change nothing."""
    rig = Rig(workers_min=1, max_failures=0)
    rig.feed(e.ControllerBegan(epoch=1, host="head", pid=101, stored=(stored(0, 1),)), 0.0)
    rig.feed(e.AgentJoined(agent="a", host="host-a", slots=1), 1.0)
    rig.feed(e.AgentPrepared(agent="a"), 2.0)
    failure = died(0, "raised Damaged: a hash differs", kind=FailureKind.DAMAGED, damaged_checkpoint=named)
    rig.feed(exited(failure), 10.0)
    decided = rig.feed(STOPPED, 11.0)
    assert decided.commands == [c.EndRun(status=c.RunStatus.FAILED)]
    assert not [record for record in decided.records if isinstance(record, r.CheckpointDamaged)]


@pytest.mark.parametrize("budget", [0, 3])
def test_the_failure_budget_survives_the_driver(budget: int) -> None:
    rig = running(max_failures=budget, backoff_max_s=0.0)
    for generation in range(1, budget + 1):
        rig.feed(exited(died(0), generation), 10.0 * generation)
        rig.stopped(generation, "a", 10.0 * generation)
    rig = rig.next_controller()
    rig.feed(e.ControllerBegan(epoch=2, host="head", pid=102), 100.0)
    rig.feed(e.AgentJoined(agent="a", host="host-a", slots=1), 101.0)
    generation = budget + 2
    assert rig.feed(e.AgentPrepared(agent="a"), 102.0).commands == [start(generation)]
    rig.feed(exited(died(0), generation), 110.0)
    decided = rig.feed(e.WorkersStopped(generation=generation, agent="a"), 111.0)
    assert decided.commands == [c.EndRun(status=c.RunStatus.FAILED)]
