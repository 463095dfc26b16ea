"""A node is lost: its ranks failed with it, its parts are gone, and the next group forms on what remains or comes."""

from __future__ import annotations

from tests.machine.rig import (
    NOTHING,
    Rig,
    began,
    checkpoint_of,
    committed,
    died,
    here,
    joined,
    persist,
    report,
    reported,
    running,
    stored,
    two_nodes,
)

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.checkpoint_types import Report
from holdfast.core.machine import Step

GONE_B = r.AgentRemoved(at=10.0, agent="b", host="host-b", why="its connection closed")
LOST_B = e.AgentLost(agent="b", why="its connection closed")
STOP_A = c.StopWorkers(generation=1, agents=("a",))
WITH_NODE = "was lost with its node (its connection closed)"


def ended(at: float, rank: int, agent: str, iteration: int = 0) -> r.GenerationEnded:
    return r.GenerationEnded(
        at=at,
        generation=1,
        why=f"rank {rank} {WITH_NODE}",
        detected_at=10.0,
        iteration=iteration,
        counted=True,
        failures=(died(rank, WITH_NODE, agent=agent),),
    )


def test_a_lost_agent_is_replaced_and_its_ranks_are_placed_on_the_replacement() -> None:
    rig = two_nodes(max_failures=1)
    assert rig.feed(LOST_B, 10.0) == Step([GONE_B], [STOP_A])
    decided = rig.feed(e.WorkersStopped(generation=1, agent="a"), 11.0)
    assert decided == Step([ended(11.0, 1, "b")], [c.RequestAgents(slots=1)])
    assert rig.feed(joined("c"), 12.0) == Step([here("c", 12.0)], [])
    places = (c.Place(agent="a", node_rank=0, ranks=(0,)), c.Place(agent="c", node_rank=1, ranks=(1,)))
    again = r.GenerationStarted(at=13.0, generation=2, world_size=2, agents=("a", "c"), iteration=0)
    start = c.StartWorkers(
        generation=2, world_size=2, places=places, node_count=len(places), checkpoint=None, iteration=0, restart_count=1
    )
    assert rig.feed(e.AgentPrepared(agent="c"), 13.0) == Step([again], [start])


def test_an_elastic_run_continues_with_the_remaining_agents() -> None:
    rig = Rig(workers_min=1, workers_max=2, max_failures=1)
    rig.feed(began(), 0.0)
    for agent in ("a", "b"):
        rig.feed(joined(agent), 1.0)
    rig.feed(e.AgentPrepared(agent="a"), 2.0)
    assert [place.agent for place in rig.state.generation.places] == ["a"]  # type: ignore[union-attr]
    rig.feed(e.AgentPrepared(agent="b"), 2.0)
    lost = rig.feed(e.AgentLost(agent="a", why="its connection closed"), 10.0)
    start = c.StartWorkers(
        generation=2,
        world_size=1,
        places=(c.Place(agent="b", node_rank=0, ranks=(0,)),),
        node_count=1,
        checkpoint=None,
        iteration=0,
        restart_count=1,
    )
    gone = r.AgentRemoved(at=10.0, agent="a", host="host-a", why="its connection closed")
    again = r.GenerationStarted(at=10.0, generation=2, world_size=1, agents=("b",), iteration=0)
    assert lost == Step([gone, ended(10.0, 0, "a"), again], [c.RequestAgents(slots=1), start])


def test_all_agents_lost_at_once_are_replaced() -> None:
    rig = two_nodes(max_failures=1)
    rig.feed(LOST_B, 10.0)
    decided = rig.feed(e.AgentLost(agent="a", why="its connection closed"), 10.2)
    assert decided.commands == [c.RequestAgents(slots=2)]
    assert [type(one) for one in decided.records] == [r.AgentRemoved, r.GenerationEnded]
    assert rig.state.durable.failures == 1


def test_the_loss_of_an_unknown_agent_is_ignored() -> None:
    rig = two_nodes()
    assert rig.feed(e.AgentLost(agent="z", why="its connection closed"), 10.0) == NOTHING
    assert rig.feed(e.AgentPrepared(agent="z"), 10.0) == NOTHING


def test_the_loss_of_an_idle_agent_does_not_restart_the_group() -> None:
    rig = two_nodes()
    rig.feed(joined("c"), 5.0)
    decided = rig.feed(e.AgentLost(agent="c", why="its connection closed"), 6.0)
    assert decided == Step([r.AgentRemoved(at=6.0, agent="c", host="host-c", why="its connection closed")], [])


def test_a_checkpoint_whose_part_is_lost_is_given_up() -> None:
    rig = two_nodes(max_failures=1)
    rig.feed(report(1, 5.0, checkpoint=True, rank=1), 5.0)
    assert rig.feed(LOST_B, 10.0) == Step([GONE_B], [STOP_A])
    assert rig.feed(report(1, 9.9, checkpoint=True), 10.1) == Step([reported(1, 9.9, checkpoint=True)], [])
    given_up = r.CheckpointAbandoned(at=11.0, generation=1, iteration=1, why="agent b was lost with its part")
    announced = c.AnnounceCheckpoint(ticket=e.Ticket(1, 1), name=None, agents=("a",))
    decided = rig.feed(e.WorkersStopped(generation=1, agent="a"), 11.0)
    assert decided == Step([ended(11.0, 1, "b", iteration=1), given_up], [announced, c.RequestAgents(slots=1)])


def test_a_lost_agent_drops_queued_uploads_and_leaves_running_ones_to_their_outcome() -> None:
    rig = two_nodes(max_failures=1)
    for number in (1, 2):
        rig.feed(report(number, 5.0, checkpoint=True), 5.0)
        rig.feed(report(number, 5.0, checkpoint=True, rank=1), 5.0)
    given_up = r.CheckpointAbandoned(at=10.0, generation=1, iteration=2, why="agent b was lost with its part")
    announced = c.AnnounceCheckpoint(ticket=e.Ticket(1, 2), name=None, agents=("a",))
    assert rig.feed(LOST_B, 10.0) == Step([GONE_B, given_up], [announced, STOP_A])
    found = stored(0, 1)
    announced = c.AnnounceCheckpoint(ticket=e.Ticket(1, 1), name=found.name, token=found.token, agents=("a",))
    assert rig.feed(checkpoint_of(1, found), 10.5) == Step([committed(found, 10.5)], [announced])


def test_the_loss_of_an_agent_with_finished_ranks_is_no_failure() -> None:
    rig = two_nodes()
    rig.feed(e.WorkerFinished(generation=1, rank=1), 9.0)
    assert rig.feed(LOST_B, 10.0) == Step([GONE_B], [])
    finished = rig.feed(e.WorkerFinished(generation=1, rank=0, value=7), 11.0)
    assert finished == Step([r.RunFinished(at=11.0, return_value=7)], [c.EndRun(status=c.RunStatus.FINISHED)])


def test_a_finished_rank_fails_if_its_last_checkpoint_is_lost_with_its_agent() -> None:
    rig = two_nodes(max_failures=1)
    rig.feed(report(1, 5.0, checkpoint=True, rank=1), 5.0)
    rig.feed(e.WorkerFinished(generation=1, rank=1), 9.0)
    assert rig.feed(LOST_B, 10.0) == Step([GONE_B], [STOP_A])


def test_a_run_is_not_finished_if_its_last_upload_is_lost_with_an_agent() -> None:
    rig = two_nodes(max_failures=1)
    rig.feed(report(1, 5.0, checkpoint=True, rank=1), 5.0)
    asked = rig.feed(report(1, 5.0), 5.0)
    assert asked.commands == [persist(1, ((1, "b"),), world_size=2)]
    for rank in (0, 1):
        assert rig.feed(e.WorkerFinished(generation=1, rank=rank), 9.0) == NOTHING
    assert rig.feed(LOST_B, 10.0) == Step([GONE_B], [])
    failed = e.CheckpointFailed(ticket=e.Ticket(1, 1), error="agent b was lost")
    given_up = r.CheckpointAbandoned(at=11.0, generation=1, iteration=1, why="agent b was lost")
    assert rig.feed(failed, 11.0) == Step([given_up], [STOP_A])
    closed = rig.feed(e.WorkersStopped(generation=1, agent="a"), 12.0)
    cause = "lost a checkpoint that it had reported with its node"
    assert closed.records[0] == r.GenerationEnded(
        at=12.0,
        generation=1,
        why=f"rank 1 {cause}",
        detected_at=11.0,
        iteration=1,
        counted=True,
        failures=(r.WorkerFailure(rank=1, cause=cause, agent="b"),),
    )


def test_an_agent_lost_while_preparing_counts_as_a_failure() -> None:
    """Otherwise agents that die of the training function itself would be started for ever."""
    rig = Rig(workers_min=1, max_failures=0)
    rig.feed(began(), 0.0)
    rig.feed(joined("a"), 1.0)
    decided = rig.feed(e.AgentLost(agent="a", why="killed by SIGKILL"), 2.0)
    gone = r.AgentRemoved(at=2.0, agent="a", host="host-a", why="killed by SIGKILL", counted=True)
    error = "an agent was lost while it prepared the training function (killed by SIGKILL)"
    assert decided == Step([gone, r.RunFailed(at=2.0, error=error)], [c.EndRun(status=c.RunStatus.FAILED)])


def test_agents_lost_while_preparing_are_replaced_with_back_off() -> None:
    rig = Rig(workers_min=1, max_failures=2, backoff_base_s=1.0)
    rig.feed(began(), 0.0)
    rig.feed(joined("a"), 1.0)
    assert rig.feed(e.AgentLost(agent="a", why="why"), 2.0).commands == [c.RequestAgents(slots=1)]
    rig.feed(joined("b"), 3.0)
    assert rig.feed(e.AgentLost(agent="b", why="why"), 4.0).commands == []
    assert rig.deadline == 5.0
    assert rig.feed(e.TimePassed(), 5.0).commands == [c.RequestAgents(slots=1)]
    rig.feed(joined("c"), 6.0)
    assert rig.feed(e.AgentLost(agent="c", why="why"), 7.0).commands == [c.EndRun(status=c.RunStatus.FAILED)]


def test_the_loss_of_an_agent_that_joined_during_a_run_is_no_failure() -> None:
    rig = running(max_failures=0)
    rig.feed(joined("b"), 10.0)
    decided = rig.feed(e.AgentLost(agent="b", why="why"), 11.0)
    assert decided == Step([r.AgentRemoved(at=11.0, agent="b", host="host-b", why="why")], [])


def test_workers_of_a_draining_agent_move_after_the_next_commit_if_there_is_room() -> None:
    rig = two_nodes()
    drain = e.AgentDraining(agent="b", why="maintenance")
    started = r.DrainStarted(at=10.0, agent="b", host="host-b", why="maintenance")
    assert rig.feed(drain, 10.0).records == [started]
    assert rig.feed(drain, 10.5) == NOTHING
    assert rig.feed(joined("c"), 11.0) == Step([here("c", 11.0)], [])
    planned = r.ChangePlanned(at=12.0, generation=1, why="agent b is being drained: maintenance")
    hold = c.HoldReports(generation=1, number=0, agents=("a", "b"))
    assert rig.feed(e.AgentPrepared(agent="c"), 12.0) == Step([planned], [hold])
    for rank in (0, 1):
        held = Report(number=1, at=13.0, metrics={"loss": 1} if rank == 0 else None, checkpoint=True, held=True)
        rig.feed(e.RankReported(generation=1, rank=rank, reports=(held,)), 13.0)
    moved = rig.feed(checkpoint_of(1, stored(0, 1)), 14.0)
    assert [type(record) for record in moved.records] == [r.CheckpointCommitted]
    assert c.StopWorkers(generation=1, agents=("a", "b")) in moved.commands
    rig.feed(e.WorkersStopped(generation=1, agent="a"), 15.0)
    again = rig.feed(e.WorkersStopped(generation=1, agent="b"), 15.0)
    (ended,) = (one for one in again.records if isinstance(one, r.GenerationEnded))
    assert (ended.counted, ended.failures) == (False, ()) and "agent b is being drained: maintenance" in ended.why
    (start,) = (one for one in again.commands if isinstance(one, c.StartWorkers))
    assert [place.agent for place in start.places] == ["a", "c"]
    assert rig.state.agents_in_use() == {"a", "c"}
    gone = rig.feed(e.AgentLost(agent="b", why="it was drained: maintenance"), 16.0)
    assert [type(record) for record in gone.records] == [r.AgentRemoved] and not gone.commands


def test_of_two_deadlines_of_a_drain_the_earlier_one_counts() -> None:
    rig = two_nodes()

    def drain(why: str, deadline_s: float | None, now: float) -> list[r.Record]:
        step = rig.feed(e.AgentDraining(agent="b", why=why, deadline_s=deadline_s), now)
        assert all(isinstance(one, c.AnnouncePreemption) for one in step.commands)
        return step.records

    (first,) = drain("maintenance", None, 10.0)
    assert isinstance(first, r.DrainStarted) and first.deadline is None
    (second,) = drain("SIGTERM", 25.0, 11.0)
    assert second == r.DrainStarted(at=11.0, agent="b", host="host-b", why="SIGTERM", deadline=36.0)
    assert drain("holdfast drain", 30.0, 12.0) == drain("holdfast drain", None, 13.0) == []
    assert (rig.state.agents["b"].draining, rig.state.agents["b"].drain_deadline) == ("SIGTERM", 36.0)
    (third,) = drain("notice file", 5.0, 14.0)
    assert isinstance(third, r.DrainStarted) and third.deadline == rig.state.agents["b"].drain_deadline == 19.0


def test_without_room_elsewhere_workers_stay_on_a_draining_agent_and_no_generation_starts_there() -> None:
    rig = two_nodes(max_failures=1)
    rig.feed(e.AgentDraining(agent="b", why="maintenance"), 10.0)
    for rank in (0, 1):
        rig.feed(report(1, 13.0, checkpoint=True, rank=rank), 13.0)
    assert not [
        one for one in rig.feed(checkpoint_of(1, stored(0, 1)), 14.0).commands if isinstance(one, c.StopWorkers)
    ]
    rig.feed(e.WorkerExited(generation=1, failure=died(0, "was killed by SIGKILL", agent="a")), 20.0)
    for agent in ("a", "b"):
        ended = rig.feed(e.WorkersStopped(generation=1, agent=agent), 21.0)
    assert ended.commands == [c.RequestAgents(slots=1)]
    rig.feed(joined("c"), 22.0)
    (start,) = rig.feed(e.AgentPrepared(agent="c"), 23.0).commands
    assert isinstance(start, c.StartWorkers) and [place.agent for place in start.places] == ["a", "c"]
