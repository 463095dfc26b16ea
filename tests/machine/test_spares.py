"""Spare agents: prepared and idle, so that the workers of a lost node start elsewhere at once."""

from __future__ import annotations

from tests.machine.rig import NOTHING, Rig, began, joined

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.machine import Step
from holdfast.core.placement import spare_agents


def with_spare(spares: int = 1, max_failures: int = 2) -> Rig:
    """Ranks 0 and 1 on agents a and b since time 3; c joined as a spare, and is prepared."""
    rig = Rig(workers_min=2, workers_max=2, spares=spares, max_failures=max_failures)
    assert rig.feed(began(), 0.0).commands == [c.RequestAgents(slots=2 + spares)]
    for agent in ("a", "b", "c"):
        rig.feed(joined(agent), 1.0)
    for agent in ("a", "b"):
        rig.feed(e.AgentPrepared(agent=agent), 2.0)
    for agent in ("a", "b"):
        rig.feed(e.WorkersStarted(generation=1, agent=agent), 3.0)
    assert rig.feed(e.AgentPrepared(agent="c"), 4.0) == NOTHING
    return rig


def starts(decided: Step) -> list[tuple[str, ...]]:
    """The agents of each generation that was started."""
    return [tuple(place.agent for place in one.places) for one in decided.commands if isinstance(one, c.StartWorkers)]


def test_an_agent_that_joins_when_all_workers_have_places_is_a_spare() -> None:
    rig = with_spare()
    assert [(one.agent, one.spare) for one in rig.journal if isinstance(one, r.AgentAdded)] == [
        ("a", False),
        ("b", False),
        ("c", True),
    ]
    assert spare_agents(rig.state) == ("c",)
    assert rig.state.generation is not None and rig.state.generation.world_size == 2
    assert rig.deadline is None, "nothing grows into a spare"


def test_the_place_of_a_lost_agent_is_taken_by_the_spare_without_waiting_and_another_spare_is_asked_for() -> None:
    rig = with_spare()
    rig.feed(e.AgentLost(agent="a", why="its connection closed"), 10.0)
    decided = rig.feed(e.WorkersStopped(generation=1, agent="b"), 11.0)
    assert starts(decided) == [("b", "c")]
    assert decided.commands[0] == c.RequestAgents(slots=1)
    assert spare_agents(rig.state) == ()


def test_a_spare_that_is_lost_is_asked_for_again_and_the_group_does_not_notice() -> None:
    rig = with_spare()
    decided = rig.feed(e.AgentLost(agent="c", why="why"), 10.0)
    removed = r.AgentRemoved(at=10.0, agent="c", host="host-c", why="why")
    assert decided == Step([removed], [c.RequestAgents(slots=1)])
    assert rig.state.generation is not None and rig.state.generation.stop_reason is None


def test_a_spare_that_dies_while_it_is_prepared_is_not_started_again_and_again() -> None:
    rig = with_spare(spares=2)
    rig.feed(joined("d"), 10.0)
    assert rig.feed(e.AgentLost(agent="d", why="why"), 11.0).commands == []
    rig.feed(e.AgentLost(agent="a", why="why"), 12.0)
    decided = rig.feed(e.WorkersStopped(generation=1, agent="b"), 12.0)
    assert decided.commands[0] == c.RequestAgents(slots=2)


def test_workers_of_a_drained_agent_move_to_the_spare_at_the_next_checkpoint() -> None:
    rig = with_spare()
    decided = rig.feed(e.AgentDraining(agent="b", why="maintenance"), 10.0)
    assert c.HoldReports(generation=1, number=0, agents=("a", "b")) in decided.commands


def test_an_agent_that_is_prepared_first_has_the_workers_and_the_other_is_the_spare() -> None:
    rig = Rig(workers_min=1, workers_max=1, spares=1, max_failures=1)
    rig.feed(began(), 0.0)
    for agent in ("a", "b"):
        rig.feed(joined(agent), 1.0)
    assert starts(rig.feed(e.AgentPrepared(agent="b"), 2.0)) == [("b",)]
    assert spare_agents(rig.state) == ("a",)
    rig.feed(e.AgentPrepared(agent="a"), 3.0)
    decided = rig.feed(e.AgentLost(agent="b", why="why"), 4.0)
    assert starts(decided) == [("a",)]


def test_lowered_bounds_give_back_what_is_neither_needed_nor_a_spare() -> None:
    rig = Rig(workers_min=1, workers_max=3, spares=1, resize_settle_s=30.0)
    rig.feed(began(), 0.0)
    for agent in ("a", "b", "c", "d"):
        rig.feed(joined(agent), 1.0)
    for agent in ("b", "c", "d", "a"):
        rig.feed(e.AgentPrepared(agent=agent), 2.0)
    assert rig.state.generation is not None and rig.state.generation.world_size == 1
    rig.feed(e.WorkersStarted(generation=1, agent="b"), 3.0)
    decided = rig.feed(e.BoundsRequested(workers_min=1, workers_max=2, why="why"), 10.0)
    released = [one for one in decided.commands if isinstance(one, c.ReleasePlaces)]
    assert released == [c.ReleasePlaces(agent="d", keep=0, held=1)]
    assert spare_agents(rig.state) == ("c",), "agents b and a are those of the workers"
