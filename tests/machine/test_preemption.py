"""Nodes that are taken away: what workers are told, and which budget their loss is spent from."""

from __future__ import annotations

import msgspec
from tests.machine.rig import Rig, checkpoint_of, died, exited, item, report, stored, two_nodes

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.commands import RunStatus

DRAIN_B = e.AgentDraining(agent="b", why="SIGTERM", deadline_s=20.0)
LOST_B = e.AgentLost(agent="b", why="it ended")
TAKEN_AWAY = r.Preemption(ranks={"b": (1,)}, deadline=30.0)


def _told(rig: Rig, event: e.Event, now: float) -> list[c.AnnouncePreemption]:
    return [one for one in rig.feed(event, now).commands if isinstance(one, c.AnnouncePreemption)]


def _stopped(rig: Rig, now: float) -> tuple[r.GenerationEnded, list[c.Command]]:
    """The last agent has stopped its workers."""
    decided = rig.feed(e.WorkersStopped(generation=1, agent="a"), now)
    (ended,) = (one for one in decided.records if isinstance(one, r.GenerationEnded))
    return ended, decided.commands


def test_every_worker_is_told_of_a_drain_and_of_an_earlier_deadline() -> None:
    rig = two_nodes()
    told = c.AnnouncePreemption(generation=1, preemption=TAKEN_AWAY, agents=("a", "b"))
    assert _told(rig, DRAIN_B, 10.0) == [told]
    assert _told(rig, DRAIN_B, 11.0) == []
    (again,) = _told(rig, e.AgentDraining(agent="b", why="SIGTERM", deadline_s=5.0), 12.0)
    assert again.preemption == r.Preemption(ranks={"b": (1,)}, deadline=17.0)
    (both,) = _told(rig, e.AgentDraining(agent="a", why="holdfast drain"), 13.0)
    assert both.preemption == r.Preemption(ranks={"b": (1,), "a": (0,)}, deadline=17.0)


def test_workers_that_start_are_told_when_they_run() -> None:
    rig = Rig()
    rig.feed(e.ControllerBegan(epoch=1, host="head", pid=1), 0.0)
    rig.feed(e.AgentJoined(agent="b", host="host-b", slots=1), 1.0)
    rig.feed(e.AgentPrepared(agent="b"), 2.0)
    assert _told(rig, DRAIN_B, 3.0) == []
    (told,) = _told(rig, e.WorkersStarted(generation=1, agent="b"), 4.0)
    assert told.preemption.ranks == {"b": (0,)}


def test_the_drain_of_an_agent_without_workers_is_told_nobody() -> None:
    rig = two_nodes()
    rig.feed(e.AgentJoined(agent="c", host="host-c", slots=1), 9.0)
    assert _told(rig, e.AgentDraining(agent="c", why="SIGTERM"), 10.0) == []


def test_the_loss_of_a_draining_node_is_a_preemption_and_no_failure() -> None:
    rig = two_nodes(max_failures=0, backoff_base_s=5.0)
    rig.feed(DRAIN_B, 10.0)
    rig.feed(LOST_B, 30.0)
    ended, commands = _stopped(rig, 31.0)
    assert (ended.counted, ended.preemption) == (False, TAKEN_AWAY)
    assert commands == [c.RequestAgents(slots=1)], "without a pause"
    assert (rig.state.durable.failures, rig.state.durable.preemptions) == (0, 1)


def test_a_checkpoint_that_a_finished_rank_loses_with_a_draining_node_is_a_preemption() -> None:
    rig = two_nodes(max_failures=0)
    for rank in (0, 1):
        rig.feed(report(1, 5.0, checkpoint=True, rank=rank), 5.0)
    rig.feed(DRAIN_B, 10.0)
    rig.feed(e.WorkerFinished(generation=1, rank=1), 11.0)
    rig.feed(LOST_B, 30.0)
    rig.feed(e.CheckpointFailed(ticket=e.Ticket(1, 1), error="agent b was lost"), 30.5)
    ended, _ = _stopped(rig, 31.0)
    assert (ended.counted, ended.preemption) == (False, TAKEN_AWAY)


def test_a_worker_that_is_killed_on_a_draining_node_is_a_preemption_and_its_peers_errors_are_echoes() -> None:
    rig = two_nodes(max_failures=0)
    rig.feed(DRAIN_B, 10.0)
    echo = died(0, "raised", error_type="RuntimeError", error="Connection reset by peer")
    rig.feed(exited(echo), 29.0)
    rig.feed(exited(died(1, "was killed by SIGTERM", agent="b", signal=15)), 29.1)
    rig.feed(e.WorkersStopped(generation=1, agent="b"), 30.0)
    ended, _ = _stopped(rig, 30.0)
    assert (ended.counted, ended.preemption) == (False, TAKEN_AWAY)


def test_a_node_that_is_left_without_a_last_checkpoint_is_a_preemption() -> None:
    rig = two_nodes(max_failures=0)
    rig.feed(DRAIN_B, 10.0)
    at = rig.deadline
    while at is not None and at < 30.0 and not (rig.state.generation and rig.state.generation.stop_sent):
        rig.feed(e.TimePassed(), at)
        at = rig.deadline
    rig.feed(e.WorkersStopped(generation=1, agent="b"), 29.5)
    ended, _ = _stopped(rig, 29.5)
    assert (ended.counted, ended.planned, ended.failures) == (False, True, ())
    assert ended.preemption == r.Preemption(ranks={"b": (1,)}, deadline=30.0, timed_out=True)
    assert rig.state.durable.preemptions == 1


def test_a_node_that_is_lost_after_the_last_checkpoint_was_committed_is_no_preemption() -> None:
    rig = two_nodes(max_failures=0)
    rig.feed(e.AgentJoined(agent="c", host="host-c", slots=1), 8.0)
    rig.feed(e.AgentPrepared(agent="c"), 9.0)
    rig.feed(DRAIN_B, 10.0)
    for rank in (0, 1):
        held = msgspec.structs.replace(item(1, 11.0, checkpoint=True), held=True)
        rig.feed(e.RankReported(generation=1, rank=rank, reports=(held,)), 11.0)
    stop = rig.feed(checkpoint_of(1, stored(0, 1)), 12.0).commands
    assert [one.agents for one in stop if isinstance(one, c.StopWorkers)] == [("a", "b")]
    rig.feed(LOST_B, 13.0)
    ended, _ = _stopped(rig, 14.0)
    assert (ended.counted, ended.planned, ended.preemption) == (False, True, None)


def test_what_else_happens_on_a_draining_node_and_deaths_elsewhere_are_failures() -> None:
    for failure in (
        died(1, "raised ValueError: x", agent="b", error_type="ValueError", error="x"),
        died(1, "was killed by SIGKILL (out of memory)", agent="b", signal=9),
        died(1, "called sys.exit(1)", agent="b"),
        died(0, "was killed by SIGTERM", agent="a", signal=15),
    ):
        rig = two_nodes(max_failures=1)
        rig.feed(DRAIN_B, 10.0)
        rig.feed(exited(failure), 11.0)
        rig.feed(e.WorkersStopped(generation=1, agent="b"), 20.0)
        ended, _ = _stopped(rig, 20.0)
        assert (ended.counted, ended.preemption) == (True, None)


def test_one_preemption_too_many_ends_the_run_and_who_starts_it_again_begins_to_count_anew() -> None:
    rig = two_nodes(max_preemption_failures=0, max_failures=-1)
    rig.feed(DRAIN_B, 10.0)
    rig.feed(LOST_B, 30.0)
    _, commands = _stopped(rig, 31.0)
    assert commands == [c.EndRun(status=RunStatus.FAILED)]
    failed = rig.journal[-1]
    assert isinstance(failed, r.RunFailed) and failed.preemption == TAKEN_AWAY and "at last b" in failed.error
    again = rig.next_controller()
    again.feed(e.ControllerBegan(epoch=2, host="head", pid=2), 40.0)
    assert again.state.durable.preemptions == 0 and not again.state.ended


def test_preemptions_are_counted_across_controllers() -> None:
    rig = two_nodes(max_preemption_failures=1)
    rig.feed(DRAIN_B, 10.0)
    rig.feed(LOST_B, 30.0)
    _stopped(rig, 31.0)
    again = rig.next_controller()
    again.feed(e.ControllerBegan(epoch=2, host="head", pid=2), 40.0)
    assert again.state.durable.preemptions == 1
