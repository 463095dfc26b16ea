"""A new controller folds the journal, looks at what storage really holds, and goes on from there."""

from __future__ import annotations

from tests.machine.rig import (
    Rig,
    began,
    checkpoint_of,
    committed,
    died,
    exited,
    joined,
    report,
    running,
    started,
    stored,
)

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.machine import Step
from holdfast.core.state import Durable, fold


def interrupted_run() -> Rig:
    """Two checkpoints, the second not yet known to be committed, one failure, and a dead driver."""
    rig = running(max_failures=2)
    rig.feed(report(1, 5.0, checkpoint=True), 5.0)
    rig.feed(checkpoint_of(1, stored(0, 1)), 6.0)
    rig.feed(exited(died(0)), 7.0)
    rig.feed(e.WorkersStopped(generation=1, agent="a"), 8.0)
    rig.feed(e.WorkersStarted(generation=2, agent="a"), 9.0)
    rig.feed(report(1, 10.0, checkpoint=True, generation=2), 10.0)
    rig.feed(report(2, 11.0, generation=2), 11.0)
    return rig


def test_folding_gives_the_state_back() -> None:
    rig = interrupted_run()
    durable = Durable()
    for record in rig.journal:
        fold(durable, record)
    assert durable == rig.state.durable
    assert (durable.generation, durable.iteration, durable.failures, durable.next_index) == (2, 3, 1, 1)


def test_a_commit_missing_in_the_journal_is_found_in_storage() -> None:
    rig = interrupted_run().next_controller()
    first, second = stored(0, 1), stored(1, 2, generation=2)
    assert rig.feed(began(first, second, epoch=2, next_index=2), 20.0) == Step(
        [started(rig, 20.0, epoch=2), committed(second, 20.0)], [c.RequestAgents(slots=1)]
    )
    rig.feed(joined("b"), 21.0)
    again = r.GenerationStarted(
        at=22.0, generation=3, world_size=1, agents=("b",), iteration=2, checkpoint="checkpoint_000001"
    )
    decided = rig.feed(e.AgentPrepared(agent="b"), 22.0)
    assert decided.records == [again]
    rig.feed(report(1, 23.0, checkpoint=True, generation=3), 23.0)
    assert rig.state.durable.iteration == 3


def test_a_checkpoint_that_is_gone_from_storage_is_not_used() -> None:
    rig = interrupted_run().next_controller()
    gone = r.CheckpointDamaged(at=20.0, name="checkpoint_000000", why="it is gone from storage")
    assert rig.feed(began(epoch=2), 20.0) == Step([started(rig, 20.0, epoch=2), gone], [c.RequestAgents(slots=1)])
    rig.feed(joined("b"), 21.0)
    assert rig.feed(e.AgentPrepared(agent="b"), 22.0).records == [
        r.GenerationStarted(at=22.0, generation=3, world_size=1, agents=("b",), iteration=0)
    ]


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before() -> None:
    rig = interrupted_run().next_controller()
    damaged = (("checkpoint_000001", "model.pt has 3 bytes and not 7"),)
    decided = rig.feed(began(stored(0, 1), epoch=2, damaged=damaged), 20.0)
    recorded = r.CheckpointDamaged(at=20.0, name="checkpoint_000001", why="model.pt has 3 bytes and not 7")
    assert decided.records == [started(rig, 20.0, epoch=2), recorded]
    newest = rig.state.durable.newest()
    assert newest is not None
    assert newest.name == "checkpoint_000000"


def test_a_failed_run_restarts_with_a_new_failure_budget() -> None:
    rig = running(max_failures=0)
    rig.feed(exited(died(0)), 5.0)
    rig.feed(e.WorkersStopped(generation=1, agent="a"), 6.0)
    assert rig.state.durable.failures == 1
    again = rig.next_controller()
    assert again.feed(began(epoch=2), 10.0).commands == [c.RequestAgents(slots=1)]
    assert again.state.durable.failures == 0


def test_a_failure_budget_spent_before_the_driver_died_stays_spent() -> None:
    rig = running(max_failures=0)
    rig.feed(report(1, 4.0, checkpoint=True), 4.0)
    rig.feed(exited(died(0)), 5.0)
    rig.feed(e.WorkersStopped(generation=1, agent="a"), 6.0)
    again = rig.next_controller()
    decided = again.feed(began(stored(0, 1), epoch=2), 10.0)
    failed = r.RunFailed(at=10.0, error="rank 0 was killed by SIGKILL", failures=(died(0),))
    assert decided == Step(
        [started(again, 10.0, epoch=2), committed(stored(0, 1), 10.0), failed], [c.EndRun(status=c.RunStatus.FAILED)]
    )
