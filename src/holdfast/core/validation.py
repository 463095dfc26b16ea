"""Validation of committed checkpoints: which are due, one at a time, and what joins a checkpoint's metrics.

A validation that a report asks for is recorded before its checkpoint is persisted, so that a controller that finds the
commit after a crash knows of it. It is run beside training, and its failure never fails the run; the run finishes when
none is due any more. A run that ends otherwise leaves them due, for the controller that continues it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.checkpoint_types import ValidationStatus
from holdfast.core.state import Pending, State

if TYPE_CHECKING:
    from holdfast.core.machine import Output

__all__ = ["are_due", "due_names", "finish_validation", "record_request", "validate_next"]


def record_request(state: State, pending: Pending, now: float, out: Output) -> None:
    """A checkpoint is about to be persisted: record that it is to be validated. Of the ranks that gave a part, the
    lowest says whether."""
    if pending.validation is not None and state.spec.has_validation:
        out.record(
            r.ValidationRequested(
                at=now,
                generation=pending.ticket.generation,
                iteration=pending.iteration,
                task=pending.validation,
            )
        )


def validate_next(state: State, out: Output) -> None:
    """Have the oldest checkpoint validated that is due, unless one is being validated already."""
    if state.validating is not None or state.stop is not None or state.fatal is not None or state.journal_lost:
        return
    due = due_names(state)
    if not due:
        return
    name = min(due, key=lambda one: state.durable.checkpoints[one].order)
    validation = state.durable.validations[name]
    state.validating = name, validation.token
    out.do(c.RunValidation(name=name, token=validation.token, task=validation.task))


def finish_validation(state: State, event: e.ValidationFinished, now: float, out: Output) -> None:
    """A validation has ended, in whatever way. The checkpoint may be gone since."""
    if state.validating != (event.name, event.token):
        return
    state.validating = None
    validation = state.durable.validations.get(event.name)
    if validation is not None and validation.token == event.token:
        out.record(
            r.CheckpointValidated(
                at=now,
                name=event.name,
                token=event.token,
                status=event.status,
                metrics=event.metrics,
                error=event.error,
            )
        )
        state.retention_due = True


def due_names(state: State) -> set[str]:
    """The checkpoints that wait for their validation; none where this controller has no function for it."""
    if not state.spec.has_validation:
        return set()
    found = state.durable.validations.items()
    return {name for name, one in found if one.status is ValidationStatus.PENDING and name in state.durable.checkpoints}


def are_due(state: State) -> bool:
    return state.validating is not None or bool(due_names(state))
