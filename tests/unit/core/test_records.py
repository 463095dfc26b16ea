"""The names of records in journals: a class may be renamed, its name on disk may not."""

from __future__ import annotations

import typing

import msgspec
import pytest

from holdfast.core import records as r

KINDS = {
    "ControllerStarted": r.ControllerStarted,
    "RunRestarted": r.RunRestarted,
    "AgentHere": r.AgentAdded,
    "AgentRefused": r.AgentRefused,
    "AgentGone": r.AgentRemoved,
    "BoundsChanged": r.BoundsChanged,
    "DrainStarted": r.DrainStarted,
    "ChangePlanned": r.ChangePlanned,
    "GenerationStarted": r.GenerationStarted,
    "GenerationRunning": r.GenerationRunning,
    "Reported": r.Reported,
    "RanksReported": r.RanksReported,
    "CheckpointCommitted": r.CheckpointCommitted,
    "ValidationRequested": r.ValidationRequested,
    "CheckpointValidated": r.CheckpointValidated,
    "CheckpointAbandoned": r.CheckpointAbandoned,
    "CheckpointDamaged": r.CheckpointDamaged,
    "CheckpointDeleted": r.CheckpointDeleted,
    "RemovalFailed": r.RemovalFailed,
    "RanksLagging": r.RanksLagging,
    "GenerationEnded": r.GenerationEnded,
    "RunFinished": r.RunFinished,
    "RunFailed": r.RunFailed,
    "RunInterrupted": r.RunInterrupted,
    "ExperimentStarted": r.ExperimentStarted,
    "TrialCreated": r.TrialCreated,
    "TrialStopped": r.TrialStopped,
    "TrialReset": r.TrialReset,
    "TrialCloned": r.TrialCloned,
    "ExperimentEnded": r.ExperimentEnded,
}


def test_every_record_keeps_its_name_on_disk() -> None:
    found = {kind.__struct_config__.tag: kind for kind in typing.get_args(r.Record)}
    assert found == KINDS


@pytest.mark.parametrize(
    ("line", "record"),
    [
        (
            b'{"kind":"AgentHere","at":1.0,"agent":"a","host":"h","slots":2}',
            r.AgentAdded(at=1.0, agent="a", host="h", slots=2),
        ),
        (
            b'{"kind":"AgentGone","at":1.0,"agent":"a","host":"h","why":"killed"}',
            r.AgentRemoved(at=1.0, agent="a", host="h", why="killed"),
        ),
    ],
)
def test_records_of_renamed_classes_are_read(line: bytes, record: r.Record) -> None:
    assert msgspec.json.decode(line, type=r.Record) == record
