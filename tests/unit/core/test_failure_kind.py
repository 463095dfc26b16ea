"""Kinds of failures: every error of ours has one, and it survives the journal and the wire."""

from __future__ import annotations

import msgspec

from holdfast import errors
from holdfast.core.failure_kind import FailureKind
from holdfast.core.records import RunFailed


class _Own(errors.Damaged):
    """A subclass that is not in `holdfast.errors`."""


def test_error_classes_round_trip_through_their_kind() -> None:
    subclasses = {"ControllerError", "HungUp", "PreemptionError", "TuneError", "Unreachable", "WorkerGroupError"}
    for name in set(errors.__all__) - subclasses:
        error = getattr(errors, name)("what happened")
        kind = FailureKind.of(error)
        assert kind is not FailureKind.OTHER
        again = kind.as_error("what happened", otherwise=errors.RunError)
        assert (type(again), str(again)) == (type(error), "what happened")


def test_the_nearest_base_class_decides_the_kind() -> None:
    assert FailureKind.of(_Own("x")) is FailureKind.DAMAGED
    assert FailureKind.of(ValueError("x")) is FailureKind.OTHER
    for error in (
        errors.ControllerError(ValueError("x")),
        errors.WorkerGroupError("x", {}),
        errors.PreemptionError(None),
    ):
        assert FailureKind.of(error) is FailureKind.TRAINING_FAILED
    assert type(FailureKind.OTHER.as_error("x", otherwise=errors.StorageError)) is errors.StorageError


def test_a_kind_that_a_newer_version_wrote_is_read_as_other() -> None:
    line = msgspec.json.encode(RunFailed(at=1.0, error="full", error_type=FailureKind.OUT_OF_SPACE))
    assert b'"error_type":"OutOfSpace"' in line
    assert msgspec.json.decode(line, type=RunFailed).error_type is FailureKind.OUT_OF_SPACE
    newer = line.replace(b"OutOfSpace", b"OutOfPatience")
    assert msgspec.json.decode(newer, type=RunFailed).error_type is FailureKind.OTHER
