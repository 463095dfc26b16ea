"""A host on which workers fail again and again is set aside; the training function's own errors are no host's fault."""

from __future__ import annotations

from tests.machine.rig import Rig, died, exited, report, two_nodes

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.quarantine import WITHIN_S


def _fail(rig: Rig, failure: r.WorkerFailure, at: float) -> list[c.SetHostAside]:
    """The generation fails so, and the next one starts."""
    assert rig.state.generation is not None
    number = rig.state.generation.number
    commands = list(rig.feed(exited(failure, number), at).commands)
    for agent in ("a", "b"):
        commands += rig.stopped(number, agent, at).commands
    while rig.state.generation is None:
        assert rig.deadline is not None
        at = rig.deadline
        rig.feed(e.TimePassed(), at)
    for agent in ("a", "b"):
        rig.feed(e.WorkersStarted(generation=number + 1, agent=agent), at)
    return [one for one in commands if isinstance(one, c.SetHostAside)]


def _rig() -> Rig:
    return two_nodes(max_failures=-1, backoff_base_s=0.1, backoff_max_s=0.1)


def test_a_host_is_set_aside_after_three_failures_and_then_counted_anew() -> None:
    rig, killed = _rig(), died(1, agent="b", signal=9)
    assert [_fail(rig, killed, at) for at in (10.0, 20.0)] == [[], []]
    (aside,) = _fail(rig, killed, 30.0)
    assert (aside.host, aside.duration_s) == ("host-b", 1800.0)
    assert aside.why == "3 failures on its host within 10 min; set aside for 30 min"
    assert _fail(rig, killed, 40.0) == []


def test_nothing_is_started_before_the_host_is_set_aside() -> None:
    rig, killed = _rig(), died(1, agent="b", signal=9)
    for at in (10.0, 20.0):
        _fail(rig, killed, at)
    rig.feed(exited(killed, 3), 30.0)
    for agent in ("a", "b"):
        rig.feed(e.WorkersStopped(generation=3, agent=agent), 30.0)
    rig.feed(e.TimePassed(), 60.0)
    assert (rig.state.generation, rig.deadline) == (None, None)
    rig.feed(e.AgentJoined(agent="c", host="host-c", slots=1, address="c"), 61.0)
    rig.feed(e.AgentPrepared(agent="c"), 61.0)
    rig.feed(e.AgentDraining(agent="b", why="set aside"), 61.0)
    assert rig.state.generation is None
    out = rig.feed(e.SetAsideAnswered(host="host-b"), 61.0)
    (started,) = [one for one in out.commands if isinstance(one, c.StartWorkers)]
    assert [place.agent for place in started.places] == ["a", "c"]


def test_an_elastic_run_goes_on_without_the_host() -> None:
    rig = two_nodes(workers_min=1, last_call_s=1.0, max_failures=-1, backoff_base_s=0.1, backoff_max_s=0.1)
    killed = died(1, agent="b", signal=9)
    for at in (10.0, 20.0):
        _fail(rig, killed, at)
    rig.feed(exited(killed, 3), 30.0)
    for agent in ("a", "b"):
        rig.feed(e.WorkersStopped(generation=3, agent=agent), 30.0)
    rig.feed(e.AgentDraining(agent="b", why="set aside"), 30.0)
    rig.feed(e.AgentLost(agent="b", why="it was drained: set aside"), 31.0)
    answered = rig.feed(e.SetAsideAnswered(host="host-b"), 31.0)
    (started,) = [one for one in answered.commands if isinstance(one, c.StartWorkers)]
    assert ([place.agent for place in started.places], started.world_size) == (["a"], 1)


def test_failures_long_ago_and_on_other_hosts_do_not_count() -> None:
    rig, killed = _rig(), died(1, agent="b", signal=9)
    assert _fail(rig, killed, 10.0) == []
    assert _fail(rig, died(0, agent="a", signal=9), 20.0) == []
    assert _fail(rig, killed, 30.0) == []
    assert _fail(rig, killed, 10.0 + WITHIN_S) == []
    assert len(_fail(rig, killed, 20.0 + WITHIN_S)) == 1


def test_a_worker_that_hung_counts_for_its_host_though_that_is_lost_meanwhile() -> None:
    rig = two_nodes(max_failures=-1, progress_timeout_s=5.0)
    rig.feed(report(1, 6.0), 6.0)
    rig.feed(e.TimePassed(), 10.0)
    rig.feed(e.AgentLost(agent="b", why="silent"), 20.0)
    rig.feed(e.WorkersStopped(generation=1, agent="a"), 20.0)
    assert list(rig.state.host_failures) == ["host-b"]


def test_exceptions_of_the_function_are_no_hosts_fault() -> None:
    rig = _rig()
    for n in range(5):
        raised = died(1, "raised", agent="b", error_type="ValueError", error=f"bad batch {n}")
        assert _fail(rig, raised, 10.0 * (n + 1)) == []
