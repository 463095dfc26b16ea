"""What can be tuned: a function of the configuration, a subclass of `Trainable`, or a trainer; and what is bound to it.

`with_parameters` gives a function large objects, which travel to each node once; `with_resources` says what one trial
takes of its machine.
"""

from __future__ import annotations

import copy
import functools
import inspect
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.train import checks
from holdfast.train.config import PlacementGroupFactory
from holdfast.train.trainer import DataParallelTrainer

__all__ = [
    "BoundTrainable",
    "ClassTrial",
    "Trainable",
    "check_trainable",
    "trainable_name",
    "with_parameters",
    "with_resources",
]


class Trainable:
    """A trial as an object. `step` does one iteration and returns its metrics; a true `done` among them ends the trial.

    Override `setup`, `step`, and, to survive anything, `save_checkpoint` and `load_checkpoint`.
    """

    def __init__(self, config: dict[str, Any] | None = None, storage: Any = None) -> None:
        self.config = config or {}
        self.iteration = 0

    @property
    def training_iteration(self) -> int:
        """How many steps were made."""
        return self.iteration

    @property
    def trial_id(self) -> str:
        from holdfast.worker.session import current

        return current("Trainable.trial_id").assignment.trial_id

    @property
    def trial_name(self) -> str:
        from holdfast.tune.context import get_context

        return get_context().get_trial_name()

    @property
    def trial_resources(self) -> PlacementGroupFactory:
        """What the trial takes of its machine."""
        from holdfast.tune.context import get_context

        return get_context().get_trial_resources()

    def get_config(self) -> dict[str, Any]:
        """What the trial was configured with."""
        return self.config

    @property
    def logdir(self) -> str:
        """The directory in which the trial runs."""
        return str(Path.cwd())

    def setup(self, config: dict[str, Any]) -> None:
        """Called once, before the first step."""

    def step(self) -> dict[str, Any]:
        """One iteration; its metrics."""
        raise NotImplementedError(f"{type(self).__name__} has no step(): that is what a trial does.")

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any] | None:
        """Write files into this directory, or return a dict of plain values."""
        raise NotImplementedError

    def load_checkpoint(self, checkpoint: Any) -> None:
        """What `save_checkpoint` made: the directory, or the dict."""
        raise NotImplementedError

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Never called: each trial is a process of its own."""
        return False

    def cleanup(self) -> None:
        """Called at the end of the trial, unless it was killed."""


_STATE = ".trainable.json"


class ClassTrial:
    """Drives a `Trainable` in a worker."""

    def __init__(self, cls: type[Trainable], frequency: int, at_end: bool, parameters: Mapping[str, Any]) -> None:
        self._cls = cls
        self._frequency = frequency
        self._at_end = at_end
        self._parameters = dict(parameters)

    def __call__(self, config: dict[str, Any]) -> None:
        from holdfast.worker.session import current

        session = current("tune.report()")
        trial = self._cls.__new__(self._cls)
        Trainable.__init__(trial, config)
        trial.setup(config, **self._parameters)
        try:
            if (checkpoint := session.get_checkpoint()) is not None:
                with checkpoint.as_directory() as directory:
                    _load(trial, Path(directory))
            while True:
                metrics = dict(trial.step())
                trial.iteration += 1
                done = bool(metrics.get("done"))
                if self._is_due(trial.iteration, done):
                    with tempfile.TemporaryDirectory() as directory:
                        session.report(metrics, _save(trial, Path(directory)))
                else:
                    session.report(metrics)
                if done:
                    return
        finally:
            trial.cleanup()

    def _is_due(self, iteration: int, done: bool) -> bool:
        return (self._frequency > 0 and iteration % self._frequency == 0) or (done and self._at_end)


def _save(trial: Trainable, directory: Path) -> Any:
    import json

    from holdfast.checkpoint.handle import Checkpoint

    returned = trial.save_checkpoint(str(directory))
    state = {"iteration": trial.iteration, "returned": returned if isinstance(returned, dict) else None}
    try:
        (directory / _STATE).write_text(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{type(trial).__name__}.save_checkpoint() returned what JSON cannot say ({error}): write files into "
            "checkpoint_dir instead."
        ) from None
    return Checkpoint.from_directory(directory)


def _load(trial: Trainable, directory: Path) -> None:
    import json

    state = json.loads((directory / _STATE).read_text())
    trial.iteration = int(state["iteration"])
    trial.load_checkpoint(state["returned"] if state["returned"] is not None else str(directory))


@dataclass(frozen=True)
class BoundTrainable:
    """A trainable with what `with_parameters` and `with_resources` gave it."""

    trainable: Any
    parameters: Mapping[str, Any] = field(default_factory=dict)
    resources: Mapping[str, float] | None = None

    @property
    def __name__(self) -> str:
        return trainable_name(self.trainable)

    def function(self) -> Callable[..., Any]:
        """The function with its parameters."""
        return functools.partial(self.trainable, **self.parameters) if self.parameters else self.trainable


def with_parameters(trainable: Any, **kwargs: Any) -> BoundTrainable:
    """The trainable, called with these arguments besides the configuration (`setup` of a class). They may be large:
    each node gets them once."""
    bound = check_trainable(trainable)
    if isinstance(bound.trainable, DataParallelTrainer):
        raise ConfigError("tune.with_parameters takes a function or a Trainable, not a trainer: use its own arguments.")
    called = bound.trainable.setup if _is_class(bound.trainable) else bound.trainable
    names = inspect.signature(called).parameters
    for name in kwargs:
        if name not in names and not any(one.kind is one.VAR_KEYWORD for one in names.values()):
            raise ConfigError(f"tune.with_parameters({name}=...): {bound.__name__} has no parameter {name!r}.")
    return BoundTrainable(bound.trainable, {**bound.parameters, **kwargs}, bound.resources)


def with_resources(trainable: Any, resources: Any) -> BoundTrainable:
    """The trainable, each trial of which takes these resources: `{"cpu": 2, "gpu": 0.5}`, or a `PlacementGroupFactory`
    with one bundle."""
    bound = check_trainable(trainable)
    if isinstance(bound.trainable, DataParallelTrainer):
        raise ConfigError("tune.with_resources takes a function or a Trainable: a trainer has its ScalingConfig.")
    bundles = getattr(resources, "bundles", None)
    if bundles is not None:
        if len(bundles) != 1:
            raise ConfigError("tune.with_resources: a trial is one worker, so give one bundle; use a trainer for more.")
        resources = bundles[0]
    if not isinstance(resources, Mapping):
        raise ConfigError(f'tune.with_resources(resources) must be a dict such as {{"cpu": 1}}, not {resources!r}.')
    checks.resources("tune.with_resources(resources)", resources)
    named = {_RESOURCE_NAMES.get(str(name), str(name)): float(amount) for name, amount in resources.items()}
    return BoundTrainable(bound.trainable, bound.parameters, named)


def _is_class(trainable: Any) -> bool:
    return inspect.isclass(trainable) and issubclass(trainable, Trainable)


_RESOURCE_NAMES = {"cpu": "CPU", "gpu": "GPU"}


def check_trainable(trainable: Any) -> BoundTrainable:
    """What was given as one thing; `ConfigError` if it cannot be tuned."""
    if isinstance(trainable, BoundTrainable):
        return trainable
    if isinstance(trainable, DataParallelTrainer):
        return BoundTrainable(copy.copy(trainable))
    if inspect.isclass(trainable):
        if issubclass(trainable, Trainable):
            return BoundTrainable(trainable)
        raise ConfigError(f"Tuner(trainable): {trainable.__name__} is no subclass of tune.Trainable.")
    if callable(trainable):
        _check_takes_config(trainable)
        return BoundTrainable(trainable)
    raise ConfigError(
        f"Tuner(trainable) must be a function of the configuration, a subclass of tune.Trainable, or a trainer, not "
        f"{trainable!r}."
    )


def _check_takes_config(function: Callable[..., Any]) -> None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # made in C
        return
    if not any(one.kind is not one.KEYWORD_ONLY and one.kind is not one.VAR_KEYWORD for one in parameters):
        raise ConfigError(
            f"Tuner(trainable): {trainable_name(function)} takes no argument, but is called with a trial's "
            "configuration: write it as a function of config."
        )


def trainable_name(trainable: Any) -> str:
    """For people, and in the names of trials' directories."""
    if isinstance(trainable, BoundTrainable):
        return trainable.__name__
    if isinstance(trainable, functools.partial):
        return trainable_name(trainable.func)
    if isinstance(trainable, DataParallelTrainer):
        return type(trainable).__name__
    name = str(getattr(trainable, "__name__", type(trainable).__name__))
    return name if name.isidentifier() else "trainable"
