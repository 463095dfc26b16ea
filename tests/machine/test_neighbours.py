"""Which agents are named to those that start workers, since they may have the checkpoint in memory."""

from __future__ import annotations

from tests.machine.rig import Rig, began, checkpoint_of, died, exited, report, stored

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.machine import Step

PORTS = {"a": 7001, "b": 7002, "c": 7003}
LOST_B = e.AgentLost(agent="b", why="its connection closed")


def agents_join(rig: Rig, names: str, at: float, *, sharing: str = "") -> Step:
    """Of those in `sharing` nobody reads the memory: they see the run's storage."""
    for name in names:
        address = f"10.0.0.{name}"
        rig.feed(e.AgentJoined(agent=name, host=f"host-{name}", slots=1, address=address), at)
    for name in names:
        port = 0 if name in sharing else PORTS[name]
        decided = rig.feed(e.AgentPrepared(agent=name, snapshot_port=port), at)
    return decided


def two_running(*, sharing: str = "") -> Rig:
    rig = Rig(workers_min=2, workers_max=2, max_failures=-1, backoff_base_s=0.0)
    rig.feed(began(), 0.0)
    agents_join(rig, "ab", 1.0, sharing=sharing)
    for agent in "ab":
        rig.feed(e.WorkersStarted(generation=1, agent=agent), 3.0)
    return rig


def commit(rig: Rig, number: int, at: float, *givers: int, generation: int = 1) -> None:
    """Both ranks report; these give parts, which are committed."""
    for rank in (0, 1):
        rig.feed(report(number, at, rank in givers, rank, generation), at)
    rig.feed(checkpoint_of(number, stored(number, number, generation)), at)


def fail(rig: Rig, at: float, generation: int = 1) -> c.StartWorkers:
    """Rank 1 dies where it is; gives the next start."""
    rig.feed(exited(died(1, agent="b"), generation), at)
    for agent in "ab":
        decided = rig.stopped(generation, agent, at)
    (start,) = [one for one in decided.commands if isinstance(one, c.StartWorkers)]
    return start


def named(start: c.StartWorkers) -> list[str]:
    assert all(
        one == c.Neighbour(agent=one.agent, address=f"10.0.0.{one.agent}", port=PORTS[one.agent])
        for one in start.neighbours
    )
    return [one.agent for one in start.neighbours]


def test_those_that_gave_parts_are_named() -> None:
    rig = two_running()
    commit(rig, 1, 5.0, 0)
    assert named(fail(rig, 6.0)) == ["a"]
    both = two_running()
    commit(both, 1, 5.0, 0, 1)
    assert named(fail(both, 6.0)) == ["a", "b"]


def test_nobody_is_named_before_there_is_a_checkpoint() -> None:
    assert named(fail(two_running(), 6.0)) == []


def test_an_agent_that_sees_the_storage_gives_nothing() -> None:
    rig = two_running(sharing="a")
    commit(rig, 1, 5.0, 0, 1)
    assert named(fail(rig, 6.0)) == ["b"]


def test_only_the_newest_checkpoint_is_remembered() -> None:
    rig = two_running()
    commit(rig, 1, 5.0, 0, 1)
    commit(rig, 2, 6.0, 1)
    assert named(fail(rig, 7.0)) == ["b"]
    damaged = two_running()
    commit(damaged, 1, 5.0, 0)
    commit(damaged, 2, 6.0, 0)
    fail(damaged, 7.0)
    found = e.DamageFound(generation=2, agent="a", checkpoint=stored(2, 2).name, why="it is damaged")
    damaged.feed(found, 8.0)
    for agent in "ab":
        decided = damaged.stopped(2, agent, 9.0)
    (start,) = [one for one in decided.commands if isinstance(one, c.StartWorkers)]
    assert start.checkpoint == stored(1, 1).name and named(start) == []


def test_an_agent_that_is_lost_is_not_named_also_when_another_has_its_name() -> None:
    rig = two_running()
    commit(rig, 1, 5.0, 0, 1)
    rig.feed(LOST_B, 6.0)
    rig.stopped(1, "a", 6.0)
    (start,) = [one for one in agents_join(rig, "b", 7.0).commands if isinstance(one, c.StartWorkers)]
    assert named(start) == ["a"]


def test_an_agent_that_has_started_from_a_checkpoint_has_it_too() -> None:
    rig = two_running()
    commit(rig, 1, 5.0, 0)
    fail(rig, 6.0)
    for agent in "ab":
        rig.feed(e.WorkersStarted(generation=2, agent=agent), 7.0)
    assert named(fail(rig, 8.0, generation=2)) == ["a", "b"]


def test_the_next_controller_names_nobody() -> None:
    rig = two_running()
    commit(rig, 1, 5.0, 0, 1)
    after = rig.next_controller()
    after.feed(began(stored(1, 1), epoch=2), 6.0)
    (start,) = [one for one in agents_join(after, "ab", 7.0).commands if isinstance(one, c.StartWorkers)]
    assert start.checkpoint == stored(1, 1).name and named(start) == []
