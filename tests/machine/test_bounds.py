"""Bounds of the number of workers that change while a run goes on: recorded, folded by the next controller, and carried
out as a planned change."""

from __future__ import annotations

from typing import Any

import pytest
from tests.machine.rig import NOTHING, Rig, began, checkpoint_of, joined, stored
from tests.machine.rig import stored as stored_checkpoint

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.bounds import find_problem
from holdfast.core.checkpoint_types import Report
from holdfast.core.machine import Step

WHY = "holdfast scale"


def ask(fewest: int, most: int) -> e.BoundsRequested:
    return e.BoundsRequested(workers_min=fewest, workers_max=most, why=WHY)


def changed(at: float, fewest: int, most: int, why: str = WHY) -> r.BoundsChanged:
    return r.BoundsChanged(at=at, workers_min=fewest, workers_max=most, why=why)


def hold(*agents: str, generation: int = 1) -> c.HoldReports:
    return c.HoldReports(generation=generation, number=0, agents=agents)


def elastic(*agents: str, fewest: int = 1, most: int = 2, slots: int = 1, **settings: Any) -> Rig:
    """Workers on each of these agents since time 2."""
    rig = Rig(workers_min=fewest, workers_max=most, resize_settle_s=30.0, **settings)
    rig.feed(began(), 0.0)
    for agent in agents:
        rig.feed(joined(agent, slots), 1.0)
    for agent in agents[:-1]:
        rig.state.agent_prepared(agent, 0)
    rig.feed(e.AgentPrepared(agent=agents[-1]), 1.0)
    for agent in agents:
        rig.feed(e.WorkersStarted(generation=1, agent=agent), 2.0)
    assert rig.state.generation is not None and rig.state.generation.running_since == 2.0
    return rig


def change_at_next_checkpoint(rig: Rig, at: float) -> Step:
    """Every rank reports its last checkpoint, which is committed; then the workers stop."""
    generation = rig.state.generation
    assert generation is not None
    for rank in range(generation.world_size):
        part = Report(number=1, at=at, metrics={"loss": 1} if rank == 0 else None, checkpoint=True, held=True)
        rig.feed(e.RankReported(generation=1, rank=rank, reports=(part,)), at)
    decided = rig.feed(checkpoint_of(1, stored(0, 1)), at)
    assert any(isinstance(one, c.StopWorkers) for one in decided.commands)
    for place in generation.places:
        decided = rig.feed(e.WorkersStopped(generation=1, agent=place.agent), at)
    return decided


def test_raised_bounds_are_recorded_and_agents_are_asked_for() -> None:
    rig = elastic("a", "b")
    decided = rig.feed(ask(1, 4), 10.0)
    commands: list[c.Command] = [c.ChangeBounds(workers_min=1, workers_max=4), c.RequestAgents(slots=2)]
    assert decided == Step([changed(10.0, 1, 4)], commands)
    assert rig.feed(ask(1, 4), 11.0) == NOTHING, "they are what was asked for"


def test_a_run_grows_without_a_settling_time_once_all_that_was_asked_for_is_there() -> None:
    rig = elastic("a", "b")
    rig.feed(ask(1, 4), 10.0)
    rig.feed(joined("c"), 11.0)
    assert rig.feed(e.AgentPrepared(agent="c"), 12.0) == NOTHING
    assert rig.deadline == 41.0, "of what was asked for, only a part is there"
    rig.feed(joined("d"), 13.0)
    decided = rig.feed(e.AgentPrepared(agent="d"), 14.0)
    planned = r.ChangePlanned(at=14.0, generation=1, why="there is room for 4 workers")
    assert decided == Step([planned], [hold("a", "b")])
    decided = change_at_next_checkpoint(rig, 15.0)
    (start,) = (one for one in decided.commands if isinstance(one, c.StartWorkers))
    assert (start.world_size, start.iteration) == (4, 1)
    assert rig.state.durable.failures == 0


def test_an_agent_that_joins_after_the_run_has_grown_waits_for_the_settling_time_again() -> None:
    rig = elastic("a", "b")
    rig.feed(ask(1, 4), 10.0)
    rig.feed(joined("c"), 11.0)
    rig.feed(e.AgentPrepared(agent="c"), 12.0)
    rig.feed(e.TimePassed(), 42.0)
    change_at_next_checkpoint(rig, 43.0)
    for agent in ("a", "b", "c"):
        rig.feed(e.WorkersStarted(generation=2, agent=agent), 44.0)
    rig.feed(joined("d"), 50.0)
    assert rig.feed(e.AgentPrepared(agent="d"), 51.0) == NOTHING
    assert rig.deadline == 80.0


def test_lowered_bounds_shrink_the_run_at_a_checkpoint_and_give_the_last_places_back() -> None:
    rig = elastic("a", "b", "c", most=3)
    decided = rig.feed(ask(1, 1), 10.0)
    planned = r.ChangePlanned(at=10.0, generation=1, why="1 worker at most may run now")
    assert decided.records == [changed(10.0, 1, 1), planned]
    assert decided.commands == [c.ChangeBounds(workers_min=1, workers_max=1), hold("a", "b", "c")]
    decided = change_at_next_checkpoint(rig, 11.0)
    (ended,) = (one for one in decided.records if isinstance(one, r.GenerationEnded))
    assert (ended.planned, ended.counted, ended.iteration) == (True, False, 1)
    (started,) = (one for one in decided.records if isinstance(one, r.GenerationStarted))
    assert (started.world_size, started.iteration, started.agents) == (1, 1, ("a",))
    released = [one for one in decided.commands if isinstance(one, c.ReleasePlaces)]
    assert released == [c.ReleasePlaces(agent=agent, keep=0, held=1) for agent in ("b", "c")]
    removed = [one.agent for one in decided.records if isinstance(one, r.AgentRemoved)]
    assert removed == ["b", "c"] and list(rig.state.agents) == ["a"]
    assert rig.feed(e.AgentLost(agent="b", why="its places were given back"), 12.0) == NOTHING


def test_places_that_no_worker_uses_are_given_back_at_once() -> None:
    rig = elastic("a", "b", most=4)
    rig.feed(joined("c"), 5.0)
    rig.feed(e.AgentPrepared(agent="c"), 5.0)
    decided = rig.feed(ask(1, 2), 10.0)
    assert decided.commands == [
        c.ChangeBounds(workers_min=1, workers_max=2),
        c.ReleasePlaces(agent="c", keep=0, held=1),
    ]
    assert rig.deadline is None, "there is no room any more"


def test_some_of_an_agents_places_are_given_back_once_its_workers_are_fewer() -> None:
    rig = elastic("a", most=4, slots=4)
    assert rig.feed(ask(2, 2), 10.0).commands[0] == c.ChangeBounds(workers_min=2, workers_max=2)
    decided = change_at_next_checkpoint(rig, 11.0)
    assert decided.commands[-1] == c.ReleasePlaces(agent="a", keep=2, held=4)
    assert rig.state.agents["a"].slots == rig.state.slots == rig.state.ready_slots == 2


def test_a_group_below_a_raised_minimum_goes_on_until_there_is_room_for_it() -> None:
    rig = elastic("a", "b", most=3)
    rig.feed(ask(4, 4), 10.0)
    rig.feed(joined("c"), 11.0)
    assert rig.feed(e.AgentPrepared(agent="c"), 11.0) == NOTHING
    assert rig.deadline is None, "three workers are not enough"
    rig.feed(joined("d"), 12.0)
    decided = rig.feed(e.AgentPrepared(agent="d"), 13.0)
    assert decided.commands == [hold("a", "b")]


def test_a_run_that_waits_for_agents_starts_when_its_minimum_is_lowered_to_what_is_there() -> None:
    rig = Rig(workers_min=2, workers_max=3)
    rig.feed(began(), 0.0)
    rig.feed(joined("a"), 1.0)
    rig.feed(e.AgentPrepared(agent="a"), 2.0)
    decided = rig.feed(ask(1, 1), 3.0)
    (start,) = (one for one in decided.commands if isinstance(one, c.StartWorkers))
    assert start.world_size == 1


def test_ranks_that_begin_to_finish_are_left_alone() -> None:
    rig = elastic("a", "b")
    rig.feed(e.WorkerFinished(generation=1, rank=0), 5.0)
    assert rig.feed(ask(1, 1), 10.0).commands == [c.ChangeBounds(workers_min=1, workers_max=1)]


def test_ranks_go_on_when_the_bounds_are_raised_again_before_the_last_checkpoint() -> None:
    rig = elastic("a", "b")
    rig.feed(ask(1, 1), 10.0)
    decided = rig.feed(ask(1, 2), 11.0)
    assert c.HoldReports(generation=1, number=None, agents=("a", "b")) in decided.commands
    assert rig.state.generation is not None and rig.state.generation.change is None


# ---------------------------------------------------------------- later controllers


def test_the_next_controller_has_the_bounds_that_were_set() -> None:
    rig = elastic("a", "b").next_controller()
    rig.feed(began(epoch=2), 20.0)
    assert (rig.state.workers_min, rig.state.workers_max) == (1, 2)
    rig.feed(ask(2, 5), 21.0)
    later = rig.next_controller()
    decided = later.feed(began(epoch=3), 30.0)
    assert decided.records[1] == changed(30.0, 2, 5, "as was set before this driver started")
    assert decided.commands == [c.ChangeBounds(workers_min=2, workers_max=5), c.RequestAgents(slots=5)]


def test_a_script_that_asks_for_another_number_of_workers_counts_more() -> None:
    rig = elastic("a", "b")
    rig.feed(ask(1, 5), 10.0)
    edited = Rig(rig.spec.__class__(workers_min=1, workers_max=3), rig.journal)
    edited.feed(began(epoch=2), 20.0)
    assert edited.state.workers_max == 3
    back = Rig(rig.spec, edited.journal)
    back.feed(began(epoch=3), 30.0)
    assert back.state.workers_max == 2, "what was set is forgotten"


def test_a_run_that_starts_over_has_the_bounds_of_its_script() -> None:
    rig = elastic("a", "b")
    rig.feed(ask(1, 5), 10.0)
    again = rig.next_controller()
    again.feed(began(stored_checkpoint(0, 1), epoch=2, restart=True), 20.0)
    assert again.state.workers_max == 2


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(("fewest", "most"), [(0, 2), (0, 0), (3, 2), (-1, 1)])
def test_bounds_that_are_none_are_refused(fewest: int, most: int) -> None:
    rig = elastic("a", "b")
    problem = find_problem(rig.state, fewest, most)
    assert problem == f"The bounds {fewest}:{most} must be 1 or more, and the first not above the second."
    assert rig.feed(ask(fewest, most), 10.0) == NOTHING


def test_the_bounds_of_a_run_with_a_fixed_number_of_workers_are_refused() -> None:
    rig = elastic("a", "b", fewest=2)
    problem = find_problem(rig.state, 1, 2)
    assert problem is not None and problem.startswith("The run has a fixed number of workers, 2: set ScalingConfig(")
    assert rig.feed(ask(1, 2), 10.0) == NOTHING


def test_one_number_for_both_can_be_changed_again() -> None:
    rig = elastic("a", "b")
    rig.feed(ask(2, 2), 10.0)
    assert find_problem(rig.state, 1, 2) is None


def test_the_bounds_of_a_run_that_ends_are_refused() -> None:
    rig = elastic("a", "b")
    rig.feed(e.StopRequested(why="Ctrl+C"), 5.0)
    assert find_problem(rig.state, 1, 1) == ("The run is about to end: its number of workers cannot change any more.")
    assert rig.feed(ask(1, 1), 10.0) == NOTHING
