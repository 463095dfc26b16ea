"""Ties loaders to the run: what a rank has been given is saved with its reports, and restored in the next generation.

Outside of a run (a plain script, a notebook) nothing is saved, and loaders work all the same.
"""

from __future__ import annotations

from typing import Any

from holdfast.train import random_states
from holdfast.train.elastic import Progress
from holdfast.worker import session

__all__ = ["keep_progress", "next_loader_name", "restore_random_states", "save_random_states"]

_RNG = "rng"


def keep_progress(name: str, progress: Progress) -> None:
    """Restore what ranks saved under this name, and save this rank's with each of its reports from now on."""
    if not session.is_installed():
        return
    here = session.current()
    states, world_size = here.saved_states(name)
    progress.restore(states, world_size)
    here.save_with_reports(name, progress.save)


def next_loader_name() -> str:
    """A name for one more loader. Loaders are told apart by the order in which the training function prepares them."""
    if not session.is_installed():
        return ""
    here = session.current()
    return f"loader {sum(name.startswith('loader ') for name in here.saved_names)}"


def save_random_states() -> None:
    """Save the states of this rank's random generators with each of its reports from now on."""
    if session.is_installed():
        session.current().save_with_reports(_RNG, _random_states)


def _random_states() -> dict[str, Any]:
    """What the next generation is to restore: what this one has not restored yet counts, and not what it has drawn
    since."""
    here = session.current()
    states, _ = here.saved_states(_RNG)
    pending: dict[str, Any] | None = states.get(here.assignment.rank)
    return random_states.capture() if pending is None else pending


def restore_random_states() -> None:
    """Make the random generators what they were at the checkpoint, if this rank saved them with it: once, by whichever
    of its loaders is iterated over first."""
    if session.is_installed():
        here = session.current()
        states, _ = here.saved_states(_RNG)
        if here.assignment.rank in states:
            random_states.restore(states[here.assignment.rank])
            here.drop_saved_states(_RNG)
