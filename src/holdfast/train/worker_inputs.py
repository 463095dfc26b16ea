"""What a trainer hands to each worker besides the configuration: data sets, metadata, a checkpoint to begin with.

`request` wraps the training function in `WithInputs` where there is any of it; `functions` reads `current_inputs()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from holdfast.train.data import DataConfig, Datasets

if TYPE_CHECKING:
    from holdfast.checkpoint.handle import Checkpoint

__all__ = ["WithInputs", "WorkerInputs", "current_inputs"]


@dataclass(frozen=True)
class WorkerInputs:
    """Of one run; travels with the function."""

    datasets: Datasets = field(default_factory=lambda: Datasets({}, DataConfig()))
    metadata: Mapping[str, Any] = field(default_factory=dict)
    initial_checkpoint: Checkpoint | None = None
    """What `get_checkpoint` gives while the run has no checkpoint of its own."""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """`BackendConfig.train_func_context`."""

    def __bool__(self) -> bool:
        given = self.datasets or self.metadata or self.initial_checkpoint is not None
        return bool(given) or self.context is not nullcontext


class WithInputs:
    """The user's function, called with these inputs in place."""

    def __init__(self, function: Callable[..., Any], inputs: WorkerInputs) -> None:
        self._function = function
        self._inputs = inputs

    def __call__(self, *arguments: Any) -> Any:
        from holdfast.worker.session import current

        session = current()
        # In local mode these are the trainer's own, and the next generation opens its data sets again.
        session.inputs = replace(self._inputs, datasets=self._inputs.datasets.unopened())
        try:
            if self._inputs.initial_checkpoint is not None:
                session.initial_checkpoint = self._inputs.initial_checkpoint
            with self._inputs.context():
                return self._function(*arguments)
        finally:
            session.inputs = None


_NONE = WorkerInputs()


def current_inputs() -> WorkerInputs:
    """The inputs of the run whose training function this process is in; empty ones outside of it. They belong to the
    session: a run that a worker starts has its own, in that very process too."""
    from holdfast.worker.session import installed

    session = installed()
    return _NONE if session is None or session.inputs is None else session.inputs
