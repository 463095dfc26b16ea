"""From nothing to a running group: which agents are asked for, who is placed where, and what is written down."""

from __future__ import annotations

import pytest
from tests.machine.rig import NOTHING, Rig, began, here, joined, started

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.failure_kind import FailureKind
from holdfast.core.machine import Step


def test_a_run_asks_for_agents_and_starts_when_they_are_ready() -> None:
    rig = Rig(workers_min=2)
    assert rig.feed(began(), 0.0) == Step([started(rig, 0.0)], [c.RequestAgents(slots=2)])
    assert rig.deadline == 600.0
    assert rig.feed(joined("a", 2), 1.0) == Step([here("a", 1.0, 2)], [])
    assert rig.feed(e.AgentPrepared(agent="a"), 2.0) == Step(
        [r.GenerationStarted(at=2.0, generation=1, world_size=2, agents=("a",), iteration=0)],
        [
            c.StartWorkers(
                generation=1,
                world_size=2,
                places=(c.Place(agent="a", node_rank=0, ranks=(0, 1)),),
                node_count=1,
                checkpoint=None,
                iteration=0,
                restart_count=0,
            )
        ],
    )
    assert rig.deadline is None
    assert rig.feed(e.WorkersStarted(generation=1, agent="a"), 3.0) == Step(
        [r.GenerationRunning(at=3.0, generation=1)], []
    )


def test_a_generation_runs_when_its_last_agent_has_started() -> None:
    rig = Rig(workers_min=3)
    rig.feed(began(), 0.0)
    rig.feed(joined("a", 2), 1.0)
    rig.feed(joined("b", 2), 1.0)
    assert rig.feed(e.AgentPrepared(agent="b"), 2.0) == NOTHING
    formed = rig.feed(e.AgentPrepared(agent="a"), 2.0)
    places = (c.Place(agent="a", node_rank=0, ranks=(0, 1)), c.Place(agent="b", node_rank=1, ranks=(2,)))
    start = c.StartWorkers(
        generation=1, world_size=3, places=places, node_count=len(places), checkpoint=None, iteration=0, restart_count=0
    )
    assert formed.commands == [start]
    assert rig.feed(e.WorkersStarted(generation=1, agent="b", pids={2: 30}), 3.0) == NOTHING
    assert rig.feed(e.WorkersStarted(generation=1, agent="a", pids={0: 10, 1: 20}), 4.0).records == [
        r.GenerationRunning(at=4.0, generation=1, pids={0: 10, 1: 20, 2: 30})
    ]


def test_an_elastic_run_starts_with_the_minimum_of_workers() -> None:
    rig = Rig(workers_min=1, workers_max=4)
    assert rig.feed(began(), 0.0).commands == [c.RequestAgents(slots=4)]
    rig.feed(joined("a", 3), 1.0)
    formed = rig.feed(e.AgentPrepared(agent="a"), 2.0)
    assert [command.world_size for command in formed.commands if isinstance(command, c.StartWorkers)] == [3]


def test_a_failing_engine_is_retried_and_then_given_up() -> None:
    rig = Rig(workers_min=1)
    rig.feed(began(), 0.0)
    refused = e.AgentUnavailable(slots=1, why="no room")
    assert rig.feed(refused, 10.0) == NOTHING
    assert rig.deadline == 11.0
    assert rig.feed(e.TimePassed(), 11.0) == Step([], [c.RequestAgents(slots=1)])
    assert rig.feed(refused, 20.0) == NOTHING
    assert rig.deadline == 22.0
    assert rig.feed(e.TimePassed(), 22.0) == Step([], [c.RequestAgents(slots=1)])
    failed = r.RunFailed(at=30.0, error="No agent could be started: no room", error_type=FailureKind.RUN)
    assert rig.feed(refused, 30.0) == Step([failed], [c.EndRun(status=c.RunStatus.FAILED)])
    assert rig.feed(joined("a"), 31.0) == NOTHING


def test_missing_agents_beyond_the_minimum_are_no_failure() -> None:
    rig = Rig(workers_min=1, workers_max=4)
    rig.feed(began(), 0.0)
    rig.feed(joined("a"), 1.0)
    rig.feed(e.AgentPrepared(agent="a"), 2.0)
    for now in (3.0, 4.0, 5.0, 6.0):
        assert rig.feed(e.AgentUnavailable(slots=1, why="no room"), now) == NOTHING
    assert rig.state.fatal is None


def test_a_run_without_enough_agents_fails_and_says_how_many_joined() -> None:
    rig = Rig(workers_min=2, agents_timeout_s=60.0)
    rig.feed(began(), 0.0)
    rig.feed(joined("a"), 1.0)
    assert rig.feed(e.AgentPrepared(agent="a"), 2.0) == NOTHING
    assert rig.deadline == 60.0
    error = (
        "Only 1 of the 2 workers that the run needs could be placed within 60 s; "
        "add nodes or lower ScalingConfig(num_workers)."
    )
    failed = r.RunFailed(at=60.0, error=error, error_type=FailureKind.RUN)
    assert rig.feed(e.TimePassed(), 60.0) == Step([failed], [c.EndRun(status=c.RunStatus.FAILED)])
    assert rig.deadline is None


def test_an_agent_that_the_run_cannot_use_is_told_of_and_named_if_the_run_fails_without() -> None:
    rig = Rig(workers_min=1, agents_timeout_s=60.0)
    rig.feed(began(), 0.0)
    why = "Agent a gets no workers of this run, which needs torch: install torch 2.13 there."
    refused = r.AgentRefused(at=1.0, agent="a", why=why)
    assert rig.feed(e.AgentRefused(agent="a", why=why), 1.0) == Step([refused], [])
    (failed,) = rig.feed(e.TimePassed(), 60.0).records
    assert isinstance(failed, r.RunFailed) and failed.error.endswith(f"lower ScalingConfig(num_workers). {why}")


@pytest.mark.parametrize("stop", [True, False])
def test_nothing_is_decided_before_the_controller_has_begun(stop: bool) -> None:
    rig = Rig(workers_min=1)
    assert rig.feed(joined("a"), 1.0) == Step([here("a", 1.0)], [])
    assert rig.feed(e.AgentPrepared(agent="a"), 2.0) == NOTHING
    assert rig.deadline is None
    if stop:
        assert rig.feed(e.StopRequested(why="Ctrl+C"), 3.0) == NOTHING
        ended = Step(
            [started(rig, 4.0), r.RunInterrupted(at=4.0, why="Ctrl+C")], [c.EndRun(status=c.RunStatus.INTERRUPTED)]
        )
        assert rig.feed(began(), 4.0) == ended
    else:
        assert [type(one) for one in rig.feed(began(), 4.0).commands] == [c.StartWorkers]


def test_a_run_that_waits_for_its_turn_does_not_give_up() -> None:
    rig = Rig(workers_min=2, agents_timeout_s=60.0)
    rig.feed(began(), 0.0)
    assert rig.deadline == 60.0
    assert rig.feed(e.PlacesTaken(), 50.0) == NOTHING
    assert rig.deadline == 110.0
    assert rig.feed(e.TimePassed(), 60.0) == NOTHING
