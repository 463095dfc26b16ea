"""Every rank has returned and every checkpoint is settled: then, and only then, the run has finished."""

from __future__ import annotations

from tests.machine.rig import NOTHING, began, checkpoint_of, committed, died, exited, report, running, stored, two_nodes

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.machine import Step


def finished(rank: int, value: object = None, error: str | None = None) -> e.WorkerFinished:
    return e.WorkerFinished(generation=1, rank=rank, value=value, value_error=error)


def test_the_return_value_of_rank_0_is_the_runs() -> None:
    rig = two_nodes()
    assert rig.feed(finished(0, {"loss": 1}), 5.0) == NOTHING
    done = r.RunFinished(at=6.0, return_value={"loss": 1})
    assert rig.feed(finished(1, "ignored"), 6.0) == Step([done], [c.EndRun(status=c.RunStatus.FINISHED)])
    assert rig.feed(finished(1), 7.0) == NOTHING


def test_a_return_value_that_cannot_be_sent_is_reported() -> None:
    rig = running()
    done = r.RunFinished(at=5.0, return_value_error="a lock is no plain value")
    assert rig.feed(finished(0, error="a lock is no plain value"), 5.0).records == [done]


def test_a_run_waits_for_its_last_checkpoint() -> None:
    rig = running()
    rig.feed(report(1, 5.0, checkpoint=True), 5.0)
    assert rig.feed(finished(0), 6.0) == NOTHING
    assert rig.deadline is None
    found = stored(0, 1)
    announced = c.AnnounceCheckpoint(ticket=e.Ticket(1, 1), name=found.name, token=found.token, agents=("a",))
    assert rig.feed(checkpoint_of(1, found), 9.0) == Step(
        [committed(found, 9.0), r.RunFinished(at=9.0)], [announced, c.EndRun(status=c.RunStatus.FINISHED)]
    )


def test_a_rank_that_fails_after_others_finished_restarts_all() -> None:
    rig = two_nodes(max_failures=1)
    rig.feed(finished(0), 5.0)
    decided = rig.feed(exited(died(1, agent="b")), 6.0)
    assert decided == Step([], [c.StopWorkers(generation=1, agents=("a", "b"))])


def test_a_complete_run_ends_at_once_without_commands() -> None:
    rig = running()
    rig.feed(finished(0, 7), 5.0)
    again = rig.next_controller()
    assert again.feed(began(epoch=2), 10.0) == Step([], [c.EndRun(status=c.RunStatus.FINISHED)])
    assert again.state.durable.outcome == r.RunFinished(at=5.0, return_value=7)
