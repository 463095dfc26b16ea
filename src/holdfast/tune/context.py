"""`TuneContext`: the answers of `tune.get_context()`, which are those of training and a trial's resources."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.train.config import PlacementGroupFactory
from holdfast.train.worker_inputs import current_inputs
from holdfast.worker.context import TrainContext
from holdfast.worker.session import current

__all__ = ["TuneContext", "get_context", "set_trial_resources"]

_trial_resources: dict[str, float] = {}
"""What the trial of this process takes of its machine."""


class TuneContext(TrainContext):
    """The names of the trial, and of its experiment."""

    def get_trial_resources(self) -> PlacementGroupFactory:
        """What the trial takes of its machine, as `tune.with_resources` said it."""
        return PlacementGroupFactory([dict(_trial_resources)])


def get_context() -> TuneContext:
    """This trial's names, directory and resources."""
    session = current("tune.get_context()")
    return TuneContext(session.assignment, session.filesystem, current_inputs().metadata)


def set_trial_resources(resources: Mapping[str, float]) -> None:
    """Called once in the worker, before the trainable is."""
    _trial_resources.clear()
    _trial_resources.update(resources)
