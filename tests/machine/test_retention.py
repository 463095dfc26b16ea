"""Retention at work: the record before the deletion, never the newest, never what workers may still be loading."""

from __future__ import annotations

import msgspec
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
from holdfast.core.retention import RetentionRule


def commit(rig: Rig, number: int, found: e.Stored, now: float) -> Step:
    rig.feed(report(number, now, checkpoint=True, generation=found.generation), now)
    return rig.feed(checkpoint_of(number, found), now)


def test_the_oldest_goes_when_a_newer_one_is_committed() -> None:
    rig = running(retention=RetentionRule(1))
    commit(rig, 1, stored(0, 1), 5.0)
    told = c.SettleCheckpoint(ticket=e.Ticket(1, 2), name="checkpoint_000001", agents=("a",))
    assert commit(rig, 2, stored(1, 2), 6.0) == Step(
        [committed(stored(1, 2), 6.0), r.CheckpointDeleted(at=6.0, name="checkpoint_000000")],
        [told, c.DeleteCheckpoint(name="checkpoint_000000")],
    )


def test_the_best_stays_and_the_newest_besides() -> None:
    rig = running(retention=RetentionRule(1, "loss", "min"))
    for number, loss in ((1, 5), (2, 3), (3, 9)):
        commit(rig, number, stored(number - 1, number, loss=loss), 5.0 + number)
    assert sorted(rig.state.durable.checkpoints) == ["checkpoint_000001", "checkpoint_000002"]


def test_what_workers_may_be_loading_stays_until_each_has_reported() -> None:
    rig = running(workers=2, max_failures=1, retention=RetentionRule(1))
    rig.feed(report(1, 5.0, checkpoint=True), 5.0)
    rig.feed(report(1, 5.0, rank=1), 5.0)
    rig.feed(checkpoint_of(1, stored(0, 1)), 6.0)
    rig.feed(exited(died(0)), 7.0)
    rig.feed(e.WorkersStopped(generation=1, agent="a"), 8.0)
    rig.feed(e.WorkersStarted(generation=2, agent="a"), 9.0)
    rig.feed(e.WorkerFinished(generation=2, rank=1), 10.0)
    rig.feed(report(1, 11.0, checkpoint=True, generation=2), 11.0)
    told = c.SettleCheckpoint(ticket=e.Ticket(2, 1), name="checkpoint_000001", agents=("a",))
    second = stored(1, 2, generation=2)
    assert rig.feed(checkpoint_of(1, second), 12.0) == Step([committed(second, 12.0)], [told])


def test_a_new_controller_applies_the_rule_to_what_it_finds() -> None:
    rig = Rig(workers_min=1, retention=RetentionRule(1))
    found = [stored(0, 1), msgspec.structs.replace(stored(1, 2), pinned=True), stored(2, 3)]
    assert rig.feed(began(*found, next_index=3), 0.0) == Step(
        [
            started(rig, 0.0),
            *(committed(one, 0.0) for one in found),
            r.CheckpointDeleted(at=0.0, name="checkpoint_000000"),
        ],
        [c.DeleteCheckpoint(name="checkpoint_000000"), c.RequestAgents(slots=1)],
    )
    rig.feed(joined("a"), 1.0)
    assert sorted(rig.state.durable.checkpoints) == ["checkpoint_000001", "checkpoint_000002"]
