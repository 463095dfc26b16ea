"""Bounds of the number of workers that are changed while a run goes on (`holdfast scale`). Pure.

Growing and shrinking is a planned change like any other (`planned_change`), so it loses no step. A group that is below
a new minimum goes on as it is until there is room for that many. Bounds that were set hold for later controllers, too,
until the run is complete or its script asks for another number of workers. Only a run that was started as an elastic
one can have them changed: the function of another may count on its number of workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import placement
from holdfast.core import records as r
from holdfast.core.state import State

if TYPE_CHECKING:
    from holdfast.core.machine import Output

__all__ = ["change", "find_problem", "restore"]


def find_problem(state: State, workers_min: int, workers_max: int) -> str | None:
    """Why a run cannot have these bounds, if it cannot: one sentence for who asked."""
    spec = state.spec
    if spec.workers_min == spec.workers_max:
        return (
            f"The run has a fixed number of workers, {spec.workers_max}: set ScalingConfig(num_workers=(fewest, most)) "
            "and start it again to be able to change it."
        )
    if not 1 <= workers_min <= workers_max:
        return f"The bounds {workers_min}:{workers_max} must be 1 or more, and the first not above the second."
    if state.stop is not None or state.fatal is not None or state.ended:
        return "The run is about to end: its number of workers cannot change any more."
    return None


def change(state: State, event: e.BoundsRequested, now: float, out: Output) -> None:
    """Somebody asked for other bounds."""
    before = state.workers_min, state.workers_max
    asked = event.workers_min, event.workers_max
    if asked == before or find_problem(state, *asked) is not None:
        return
    _record(state, *asked, event.why, now, out)
    state.bounds_changed = True
    state.gives_back = state.gives_back or event.workers_max < before[1]
    state.requested_slots = min(state.requested_slots, max(0, event.workers_max + state.spec.spares - state.slots))
    if state.generation is not None:
        placement.want_more_agents(state, out)


def restore(state: State, now: float, out: Output) -> None:
    """A controller begins: bounds that were set under an earlier one hold."""
    if (set_before := state.durable.bounds) is not None:
        why = "as was set before this driver started"
        _record(state, set_before.workers_min, set_before.workers_max, why, now, out)


def _record(state: State, workers_min: int, workers_max: int, why: str, now: float, out: Output) -> None:
    out.record(r.BoundsChanged(at=now, workers_min=workers_min, workers_max=workers_max, why=why))
    out.do(c.ChangeBounds(workers_min=workers_min, workers_max=workers_max))
