"""Removing the checkpoints that the retention rule lets go: when to ask for it, and what became of it.

`retention` chooses. Before anything is chosen during a run, storage is asked for the pins (`FindPins`), since users set
and lift them at any time. A checkpoint counts as deleted when it is gone, not when that was decided: a removal that
failed is told once, and tried again after a while.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.retention import to_delete
from holdfast.core.state import Removal, State
from holdfast.core.validation import due_names

if TYPE_CHECKING:
    from holdfast.core.machine import Output

__all__ = [
    "apply_retention",
    "deadlines",
    "finish_removal",
    "forget",
    "holds_name",
    "is_under_way",
    "to_remove",
    "remove_now",
    "removes_resume_point",
    "checkpoint_kept",
    "pins_found",
    "checkpoint_removed",
]

_PATIENCE = 9
"""So many failures of a removal a new checkpoint of the same name waits for: with the usual pauses some minutes, as
for other storage trouble."""


def apply_retention(state: State, now: float, out: Output) -> None:
    """If the rule may let something go, ask for the pins; finish what was half removed and may be tried again."""
    if state.journal_lost:
        return
    idle = [(name, one) for name, one in state.removals.items() if not one.under_way and one.not_before <= now]
    for name, removal in idle:
        if removal.invisible:
            _start(name, removal, out)
        else:
            state.retention_due = True
    if state.retention_due and not state.finding_pins and state.find_pins_at <= now:
        state.retention_due = False
        if to_remove(state, pins=set()):
            state.finding_pins = True
            out.do(c.FindPins(names=tuple(state.durable.checkpoints)))
        else:
            _drop_idle(state, keep=set())


def remove_now(state: State, now: float, out: Output) -> None:
    """Remove what the rule lets go, with the pins as they were found a moment ago."""
    doomed = _removable(state)
    _drop_idle(state, keep=set(doomed))
    for name in doomed:
        removal = state.removals.setdefault(name, Removal(token=state.durable.checkpoints[name].token))
        if not removal.under_way and removal.not_before <= now:
            _start(name, removal, out)


def finish_removal(state: State, name: str) -> None:
    """An earlier controller had begun to remove this checkpoint: have what may be left of it removed as well."""
    if token := state.durable.checkpoints[name].token:
        state.removals[name] = Removal(token=token, invisible=True)


def pins_found(state: State, event: e.PinsFound, now: float, out: Output) -> None:
    """The pins were looked up; if that failed, nothing is removed, and it is tried again later."""
    state.finding_pins = False
    if event.error is not None:
        state.retention_due = True
        state.pin_failures += 1
        state.find_pins_at = now + state.spec.backoff_s(state.pin_failures)
        return
    state.pin_failures = 0
    state.pins = set(event.pinned)
    remove_now(state, now, out)


def checkpoint_removed(state: State, event: e.CheckpointRemoved, now: float, out: Output) -> None:
    """A checkpoint was removed, by this controller or by somebody else."""
    if _answered(state, event.name, event.token) is not None:
        del state.removals[event.name]
        why = "somebody else removed it" if event.by_others else ""
        _record_deleted(state, event.name, event.token, why, now, out)


def checkpoint_kept(state: State, event: e.CheckpointKept, now: float, out: Output) -> None:
    """A removal did not take place, or not wholly."""
    removal = _answered(state, event.name, event.token)
    if removal is None:
        return
    if event.pinned:
        state.pins.add(event.name)
        del state.removals[event.name]
        return
    removal.under_way = False
    removal.failures += 1
    removal.not_before = now + state.spec.backoff_s(removal.failures)
    if removal.failures == 1:
        out.record(r.RemovalFailed(at=now, name=event.name, why=event.error))
    if event.invisible:
        removal.invisible = True
        _record_deleted(state, event.name, event.token, "", now, out)


def is_under_way(state: State) -> bool:
    """Whether storage has been asked for something that it has not answered."""
    return state.finding_pins or any(removal.under_way for removal in state.removals.values())


def removes_resume_point(state: State) -> bool:
    """Whether the checkpoint that the next generation would load may vanish: the ones after it turned out damaged."""
    found = state.durable.resume_point()
    removal = None if found is None else state.removals.get(found.name)
    return removal is not None and removal.under_way


def holds_name(state: State, name: str | None) -> bool:
    """Whether a new checkpoint of this name has to wait, since the old one of that name is about to go."""
    if name is None:
        return False
    removal = state.removals.get(name)
    if removal is not None:
        return removal.under_way or removal.failures < _PATIENCE
    undecided = state.finding_pins or (state.retention_due and 0 < state.pin_failures < _PATIENCE)
    return undecided and name in to_remove(state, pins=set())


def forget(state: State) -> None:
    """Nothing can be written down any more, so that no answer is waited for."""
    state.finding_pins = state.retention_due = False
    state.removals.clear()


def deadlines(state: State) -> list[float]:
    """When what failed is tried again."""
    if state.journal_lost:
        return []
    idle = [removal for removal in state.removals.values() if not removal.under_way]
    rest = [removal.not_before for removal in idle if removal.invisible]
    if state.finding_pins:
        return rest  # what is still visible is decided about when the pins are known
    if state.retention_due:
        return [*rest, state.find_pins_at]
    return [removal.not_before for removal in idle]


def to_remove(state: State, pins: set[str]) -> list[str]:
    """What the rule lets go of the checkpoints that the run knows, oldest first; nothing that is to be validated."""
    found = to_delete(state.durable.checkpoints.values(), state.spec.retention, pins)
    due = due_names(state) if found else ()
    return [name for name in found if name not in due]


def _removable(state: State) -> list[str]:
    """The checkpoint that workers may still be loading from stays until each has reported."""
    generation = state.generation
    loading = generation.checkpoint if generation is not None and generation.unreported else None
    return [name for name in to_remove(state, state.pins) if name != loading]


def _start(name: str, removal: Removal, out: Output) -> None:
    removal.under_way = True
    out.do(c.DeleteCheckpoint(name=name, token=removal.token))


def _answered(state: State, name: str, token: str) -> Removal | None:
    removal = state.removals.get(name)
    return removal if removal is not None and removal.under_way and removal.token == token else None


def _drop_idle(state: State, keep: set[str]) -> None:
    """Forget removals that failed and that the rule no longer asks for."""
    for name, removal in list(state.removals.items()):
        if not removal.under_way and not removal.invisible and name not in keep:
            del state.removals[name]


def _record_deleted(state: State, name: str, token: str, why: str, now: float, out: Output) -> None:
    known = state.durable.checkpoints.get(name)
    if known is not None and known.token == token:
        out.record(r.CheckpointDeleted(at=now, name=name, why=why))
