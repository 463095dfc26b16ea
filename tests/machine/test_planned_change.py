"""A planned change of the worker group: all ranks stay in the report that carries its last checkpoint, and the next
generation starts from there."""

from __future__ import annotations

from typing import Any

from tests.machine.rig import NOTHING, Rig, began, checkpoint_of, committed, died, exited, joined, stored, two_nodes

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.checkpoint_types import Report
from holdfast.core.machine import Step

WHY = "agent b is being drained: maintenance"
DRAIN = e.AgentDraining(agent="b", why="maintenance")
PLANNED = r.ChangePlanned(at=10.0, generation=1, why=WHY)


def hold(number: int | None, *agents: str) -> c.HoldReports:
    return c.HoldReports(generation=1, number=number, agents=agents or ("a", "b"))


def report(rank: int, number: int, *, part: bool = False, held: bool = False) -> e.RankReported:
    metrics = {"loss": number} if rank == 0 else None
    one = Report(number=number, at=5.0, metrics=metrics, checkpoint=part, held=held)
    return e.RankReported(generation=1, rank=rank, reports=(one,))


def with_spare(**settings: Any) -> Rig:
    """Ranks 0 and 1 on agents a and b, and agent c is ready."""
    rig = two_nodes(**settings)
    rig.feed(joined("c"), 4.0)
    rig.feed(e.AgentPrepared(agent="c"), 5.0)
    return rig


def draining(**settings: Any) -> Rig:
    """Agent b is drained since time 10, and the ranks were asked for a last checkpoint."""
    rig = with_spare(**settings)
    decided = rig.feed(DRAIN, 10.0)
    assert [type(one) for one in decided.records] == [r.DrainStarted, r.ChangePlanned]
    assert decided.records[1] == PLANNED and hold_commands(decided) == [hold(0)]
    return rig


def hold_commands(decided: Step) -> list[c.HoldReports]:
    return [one for one in decided.commands if isinstance(one, c.HoldReports)]


def stops(decided: Step) -> bool:
    return any(isinstance(one, c.StopWorkers) for one in decided.commands)


def test_a_generation_is_stopped_at_the_commit_of_the_report_in_which_all_ranks_stay() -> None:
    rig = draining()
    rig.feed(report(0, 1, part=True, held=True), 11.0)
    asked = rig.feed(report(1, 1, part=True, held=True), 11.0)
    assert [type(one) for one in asked.commands] == [c.PersistCheckpoint]
    assert rig.feed(e.TimePassed(), 12.0) == NOTHING
    decided = rig.feed(checkpoint_of(1, stored(0, 1)), 13.0)
    assert decided.records == [committed(stored(0, 1), 13.0)]
    assert c.StopWorkers(generation=1, agents=("a", "b")) in decided.commands
    rig.feed(e.WorkersStopped(generation=1, agent="a"), 14.0)
    again = rig.feed(e.WorkersStopped(generation=1, agent="b"), 14.0)
    ended = r.GenerationEnded(at=14.0, generation=1, why=WHY, detected_at=13.0, iteration=1, planned=True)
    started = r.GenerationStarted(
        at=14.0, generation=2, world_size=2, agents=("a", "c"), iteration=1, checkpoint="checkpoint_000000"
    )
    assert again.records == [ended, started]
    assert rig.state.durable.failures == 0


def test_ranks_that_stay_behind_others_are_sent_on_to_the_report_in_which_those_stay() -> None:
    rig = draining()
    assert rig.feed(report(0, 1, part=True, held=True), 11.0).commands == [hold(1)]
    rig.feed(report(1, 1, part=True), 11.0)  # before it knew
    assert hold_commands(rig.feed(report(1, 2, part=True, held=True), 11.0)) == [hold(2)]
    rig.feed(checkpoint_of(1, stored(0, 1)), 12.0)
    rig.feed(report(0, 2, part=True, held=True), 13.0)
    assert stops(rig.feed(checkpoint_of(2, stored(1, 2)), 14.0))


def test_ranks_are_sent_beyond_one_that_passed_them_without_staying() -> None:
    rig = draining()
    rig.feed(report(0, 1, part=True, held=True), 11.0)
    rig.feed(report(1, 1), 11.0)  # gives no part, and does not know
    passed = rig.feed(report(1, 2), 11.0)
    assert hold_commands(passed) == [hold(3)]
    rig.feed(report(1, 3), 11.5)
    assert hold_commands(rig.feed(report(1, 4, held=True), 11.5)) == [hold(4)]
    assert hold_commands(rig.feed(report(0, 3, held=True), 12.0)) == [], "what lets it go on is on its way"
    assert not stops(rig.feed(checkpoint_of(1, stored(0, 1)), 12.5))
    decided = rig.feed(report(0, 4, held=True), 13.0)
    assert hold_commands(decided) == [hold(5)], "report 4 carries no checkpoint"
    rig.feed(report(1, 5, held=True), 14.0)
    rig.feed(report(0, 5, part=True, held=True), 14.0)
    assert stops(rig.feed(checkpoint_of(5, stored(1, 5)), 15.0))


def test_a_rank_without_a_part_need_not_stay_where_it_has_reported_no_more_than_the_others() -> None:
    """In lockstep it waits for the others in a collective, and never comes to another report."""
    rig = draining()
    rig.feed(report(1, 1), 11.0)
    rig.feed(report(0, 1, part=True, held=True), 11.0)
    assert stops(rig.feed(checkpoint_of(1, stored(0, 1)), 12.0))


def test_ranks_that_have_not_come_to_the_report_are_told_to_stay_in_it() -> None:
    rig = draining()
    assert rig.feed(report(0, 1, part=True, held=True), 11.0).commands == [hold(1)]
    rig.feed(report(1, 1, held=True), 11.0)
    assert stops(rig.feed(checkpoint_of(1, stored(0, 1)), 12.0))


def test_ranks_go_on_when_the_last_checkpoint_is_not_committed() -> None:
    rig = draining()
    for rank in (0, 1):
        rig.feed(report(rank, 1, part=True, held=True), 11.0)
    failed = e.CheckpointFailed(ticket=e.Ticket(1, 1), error="storage is full")
    decided = rig.feed(failed, 12.0)
    assert hold_commands(decided) == [hold(2)] and not stops(decided)


def test_ranks_go_on_when_the_reason_is_gone() -> None:
    rig = draining()
    rig.feed(report(0, 1, part=True, held=True), 11.0)
    decided = rig.feed(e.AgentLost(agent="c", why="its connection closed"), 12.0)
    assert decided.commands == [hold(None)]
    assert rig.state.generation is not None and not rig.state.generation.held


def test_a_failure_meanwhile_ends_the_generation_as_always() -> None:
    rig = draining(max_failures=1)
    rig.feed(report(0, 1, part=True, held=True), 11.0)
    rig.feed(exited(died(1, agent="b")), 12.0)
    for agent in ("a", "b"):
        decided = rig.feed(e.WorkersStopped(generation=1, agent=agent), 13.0)
    (ended,) = (one for one in decided.records if isinstance(one, r.GenerationEnded))
    assert ended.counted and not ended.planned


def test_a_rank_that_stays_is_not_taken_for_hung_and_one_that_does_not_come_is() -> None:
    rig = draining(progress_timeout_s=8.0, max_failures=1)
    for rank in (0, 1):
        rig.feed(report(rank, 1), 11.0)
    rig.feed(report(0, 2, part=True, held=True), 12.0)
    assert rig.state.generation is not None and rig.state.generation.silence.longest == [1]
    assert rig.deadline == 20.0  # since rank 0 began to wait
    hung = rig.feed(e.TimePassed(), 20.0)
    assert c.StopWorkers(generation=1, agents=("a", "b"), dump_stacks=True) in hung.commands


def test_workers_that_start_are_asked_once_they_run() -> None:
    rig = Rig(workers_min=1)
    rig.feed(began(), 0.0)
    rig.feed(joined("a"), 1.0)
    rig.feed(e.AgentPrepared(agent="a"), 2.0)
    rig.feed(joined("b"), 2.0)
    rig.feed(e.AgentPrepared(agent="b"), 2.0)
    assert rig.feed(e.AgentDraining(agent="a", why="w"), 3.0).commands == []
    decided = rig.feed(e.WorkersStarted(generation=1, agent="a"), 4.0)
    assert hold_commands(decided) == [hold(0, "a")]


# ---------------------------------------------------------------- deadlines


def drained_by(deadline_s: float, *, spare: bool = True, **settings: Any) -> Rig:
    rig = with_spare(**settings) if spare else two_nodes(**settings)
    rig.feed(e.AgentDraining(agent="b", why="spot", deadline_s=deadline_s), 10.0)
    return rig


def test_workers_are_stopped_shortly_before_the_deadline_if_no_checkpoint_was_made_and_nothing_is_counted() -> None:
    rig = drained_by(25.0)
    assert rig.deadline == 34.0
    decided = rig.feed(e.TimePassed(), 34.0)
    assert c.StopWorkers(generation=1, agents=("a", "b")) in decided.commands
    for agent in ("a", "b"):
        decided = rig.feed(e.WorkersStopped(generation=1, agent=agent), 34.5)
    (ended,) = (one for one in decided.records if isinstance(one, r.GenerationEnded))
    assert ended.planned and not ended.counted and ended.why.endswith("its time is up")


def test_without_room_elsewhere_the_last_checkpoint_is_asked_for_when_half_of_the_time_is_over() -> None:
    rig = drained_by(25.0, spare=False)
    assert rig.deadline == 22.0
    decided = rig.feed(e.TimePassed(), 22.0)
    assert decided.commands == [hold(0)]
    for rank in (0, 1):
        rig.feed(report(rank, 1, part=True, held=True), 23.0)
    assert stops(rig.feed(checkpoint_of(1, stored(0, 1)), 24.0))
    for agent in ("a", "b"):
        decided = rig.feed(e.WorkersStopped(generation=1, agent=agent), 24.0)
    assert decided.commands == [c.RequestAgents(slots=1)]


def test_a_deadline_that_has_all_but_passed_stops_the_workers_at_once() -> None:
    rig = with_spare()
    assert stops(rig.feed(e.AgentDraining(agent="b", why="spot", deadline_s=0.5), 10.0))


def test_ranks_that_have_all_finished_are_left_alone() -> None:
    rig = drained_by(25.0, spare=False)
    rig.feed(report(0, 1, part=True), 11.0)
    rig.feed(report(1, 1), 11.0)
    for rank in (0, 1):
        rig.feed(e.WorkerFinished(generation=1, rank=rank), 12.0)
    assert rig.feed(e.TimePassed(), 30.0) == NOTHING  # the last checkpoint is on its way


# ---------------------------------------------------------------- another size


def elastic(*agents: str, most: int = 3, **settings: Any) -> Rig:
    """One worker on each of these agents, of 1 to `most` that the run may have."""
    rig = Rig(workers_min=1, workers_max=most, resize_settle_s=30.0, **settings)
    rig.feed(began(), 0.0)
    for agent in agents:
        rig.feed(joined(agent), 1.0)
    for agent in agents[:-1]:
        rig.state.agent_prepared(agent, 0)
    rig.feed(e.AgentPrepared(agent=agents[-1]), 1.0)
    for agent in agents:
        rig.feed(e.WorkersStarted(generation=1, agent=agent), 2.0)
    return rig


def test_all_agents_that_join_within_the_settling_time_make_one_change() -> None:
    rig = elastic("a")
    rig.feed(joined("b"), 10.0)
    rig.feed(e.AgentPrepared(agent="b"), 12.0)
    assert rig.deadline == 40.0
    rig.feed(joined("c"), 20.0)
    rig.feed(e.AgentPrepared(agent="c"), 30.0)
    assert rig.deadline == 42.0
    decided = rig.feed(e.TimePassed(), 42.0)
    assert decided == Step([r.ChangePlanned(at=42.0, generation=1, why="there is room for 3 workers")], [hold(0, "a")])
    rig.feed(report(0, 1, part=True, held=True), 43.0)
    rig.feed(checkpoint_of(1, stored(0, 1)), 44.0)
    decided = rig.feed(e.WorkersStopped(generation=1, agent="a"), 45.0)
    (start,) = (one for one in decided.commands if isinstance(one, c.StartWorkers))
    assert (start.world_size, start.iteration) == (3, 1)
    assert rig.state.durable.failures == 0


def test_an_agent_that_takes_long_to_be_prepared_has_settled_by_then() -> None:
    rig = elastic("a")
    rig.feed(joined("b"), 10.0)
    rig.feed(joined("c"), 20.0)
    rig.feed(e.AgentPrepared(agent="b"), 55.0)
    assert rig.deadline == 85.0, "another is on its way"
    decided = rig.feed(e.AgentPrepared(agent="c"), 58.0)
    assert decided == Step([r.ChangePlanned(at=58.0, generation=1, why="there is room for 3 workers")], [hold(0, "a")])


def test_agents_that_are_prepared_one_after_the_other_make_no_two_changes_within_the_settling_time() -> None:
    rig = elastic("a")
    rig.feed(joined("b"), 10.0)
    decided = rig.feed(e.AgentPrepared(agent="b"), 50.0)
    assert [type(one) for one in decided.records] == [r.ChangePlanned]
    rig.feed(joined("c"), 50.5)
    rig.feed(report(0, 1, part=True, held=True), 51.0)
    rig.feed(checkpoint_of(1, stored(0, 1)), 51.0)
    rig.feed(e.WorkersStopped(generation=1, agent="a"), 52.0)
    for agent in ("a", "b"):
        rig.feed(e.WorkersStarted(generation=2, agent=agent), 53.0)
    rig.feed(e.AgentPrepared(agent="c"), 60.0)
    assert rig.deadline == 82.0


def test_the_settling_time_begins_anew_with_each_generation() -> None:
    rig = elastic("a")
    rig.feed(joined("b"), 10.0)
    rig.feed(e.AgentPrepared(agent="b"), 10.0)
    rig.feed(joined("c"), 39.0)
    rig.feed(e.TimePassed(), 40.0)
    rig.feed(report(0, 1, part=True, held=True), 41.0)
    rig.feed(checkpoint_of(1, stored(0, 1)), 41.0)
    rig.feed(e.WorkersStopped(generation=1, agent="a"), 42.0)
    rig.feed(e.AgentPrepared(agent="c"), 43.0)
    for agent in ("a", "b"):
        rig.feed(e.WorkersStarted(generation=2, agent=agent), 44.0)
    assert rig.deadline == 72.0


def test_an_agent_that_leaves_within_the_settling_time_makes_no_change() -> None:
    rig = elastic("a")
    for at in (10.0, 30.0):
        rig.feed(joined("b"), at)
        rig.feed(e.AgentPrepared(agent="b"), at)
        rig.feed(e.AgentLost(agent="b", why="why"), at + 15.0)
    assert rig.deadline is None
    rig.feed(joined("b"), 50.0)
    rig.feed(e.AgentPrepared(agent="b"), 50.0)
    assert rig.deadline == 80.0


def test_a_run_whose_ranks_finish_does_not_grow() -> None:
    rig = elastic("a", "b")
    rig.feed(e.WorkerFinished(generation=1, rank=1), 5.0)
    rig.feed(joined("c"), 10.0)
    rig.feed(e.AgentPrepared(agent="c"), 10.0)
    assert rig.deadline is None
    assert rig.feed(e.TimePassed(), 50.0) == NOTHING


def test_an_elastic_run_that_lost_a_node_goes_on_at_once_and_asks_for_another() -> None:
    rig = elastic("a", "b", most=2, max_failures=1)
    rig.feed(e.AgentLost(agent="b", why="its connection closed"), 10.0)
    decided = rig.feed(e.WorkersStopped(generation=1, agent="a"), 11.0)
    assert [type(one) for one in decided.commands] == [c.RequestAgents, c.StartWorkers]
    assert decided.commands[0] == c.RequestAgents(slots=1)
    assert isinstance(decided.commands[1], c.StartWorkers) and decided.commands[1].world_size == 1


# ---------------------------------------------------------------- the last call


def test_a_run_that_has_enough_agents_waits_for_more_until_the_last_call_is_over() -> None:
    rig = Rig(workers_min=1, workers_max=3, last_call_s=5.0)
    rig.feed(began(), 0.0)
    for agent in ("a", "b"):
        rig.feed(joined(agent), 1.0)
    assert rig.feed(e.AgentPrepared(agent="a"), 2.0) == NOTHING
    assert rig.deadline == 7.0
    assert rig.feed(e.AgentPrepared(agent="b"), 4.0) == NOTHING
    decided = rig.feed(e.TimePassed(), 7.0)
    (start,) = (one for one in decided.commands if isinstance(one, c.StartWorkers))
    assert start.world_size == 2


def test_the_last_call_ends_when_there_are_as_many_as_are_wanted_and_begins_anew_when_there_are_too_few() -> None:
    rig = Rig(workers_min=2, workers_max=3, last_call_s=5.0, max_failures=2)
    rig.feed(began(), 0.0)
    for agent in ("a", "b", "c"):
        rig.feed(joined(agent), 1.0)
    for agent in ("a", "b"):
        rig.feed(e.AgentPrepared(agent=agent), 2.0)
    rig.feed(e.AgentLost(agent="b", why="why"), 3.0)
    assert rig.deadline == 600.0
    rig.feed(joined("b"), 4.0)
    rig.feed(e.AgentPrepared(agent="b"), 4.0)
    assert rig.deadline == 9.0
    decided = rig.feed(e.AgentPrepared(agent="c"), 5.0)
    (start,) = (one for one in decided.commands if isinstance(one, c.StartWorkers))
    assert start.world_size == 3
