"""Asynchronous validation: a function of the user's scores committed checkpoints while training goes on.

`ValidationConfig` goes to the trainer, `report(validation=...)` asks for it; the controller (`control.validation`) has
`ValidationFunction` called in a worker of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.core.checkpoint_types import ValidationTask
from holdfast.errors import ConfigError
from holdfast.train.checks import warn_of_no_effect
from holdfast.worker.job import Job
from holdfast.worker.plain_data import plain_metrics

if TYPE_CHECKING:
    from holdfast.checkpoint.handle import Checkpoint

__all__ = ["ValidationConfig", "ValidationFn", "ValidationFunction", "ValidationTaskConfig", "task_of"]


class ValidationFn(Protocol):
    """A function that scores a checkpoint: metrics, as `report` takes them."""

    def __call__(self, checkpoint: Checkpoint, **kwargs: Any) -> dict[str, Any]: ...


@dataclass
class ValidationTaskConfig:
    """How one checkpoint is validated: further arguments of the function (plain data), and how long it may take."""

    fn_kwargs: dict[str, Any] | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.fn_kwargs is not None and not isinstance(self.fn_kwargs, Mapping):
            kind = type(self.fn_kwargs).__name__
            raise ConfigError(f"ValidationTaskConfig(fn_kwargs) must be a dict of arguments, not {kind}.")
        self.fn_kwargs = dict(self.fn_kwargs or {})
        timeout_s = self.timeout_s
        is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
        if timeout_s is not None and not (is_number and timeout_s > 0):
            raise ConfigError(f"ValidationTaskConfig(timeout_s) must be above 0, or None, not {timeout_s!r}.")


class ValidationConfig:
    """The function that validates checkpoints, and what it is called with where `report` says nothing else.

    `fn(checkpoint, **fn_kwargs)` returns a dict of metrics, which join the checkpoint's and count for retention. What
    it raises is recorded and never fails the run.
    """

    def __init__(
        self,
        fn: Callable[..., dict[str, Any]],
        task_config: ValidationTaskConfig | None = None,
        ray_remote_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if not callable(fn):
            raise ConfigError(f"ValidationConfig(fn) must be a function, not {fn!r}.")
        if task_config is not None and not isinstance(task_config, ValidationTaskConfig):
            kind = type(task_config).__name__
            raise ConfigError(f"ValidationConfig(task_config) must be a ValidationTaskConfig, not {kind}.")
        if ray_remote_kwargs:
            reason = "validation runs in one worker of its own"
            warn_of_no_effect("ValidationConfig(ray_remote_kwargs)", reason, stacklevel=3)
        self.fn = fn
        self.task_config = task_config or ValidationTaskConfig()
        self.ray_remote_kwargs = ray_remote_kwargs or {}

    @property
    def job(self) -> Job:
        """What the worker that validates is to do; its configuration is the `fn_kwargs` of the report."""
        function = ValidationFunction(self.fn, self.task_config.fn_kwargs or {})
        return Job(function=function, config={}, takes_config=True, framework=None)

    def timeout_s(self, task: ValidationTask) -> float | None:
        return self.task_config.timeout_s if task.is_default else task.timeout_s


class ValidationFunction:
    """The user's function, called with the checkpoint that this worker was started from."""

    def __init__(self, fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        self._fn = fn
        self._kwargs = kwargs

    def __call__(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        from holdfast.worker.session import current

        metrics = self._fn(current().get_checkpoint(), **{**self._kwargs, **kwargs})
        if not isinstance(metrics, dict):
            raise TypeError(f"The validation function must return a dict of metrics, not {type(metrics).__name__}.")
        return plain_metrics(metrics)


def task_of(validation: bool | ValidationTaskConfig) -> ValidationTask | None:
    """What `report(validation=...)` asks for."""
    if isinstance(validation, ValidationTaskConfig):
        kwargs = plain_metrics(validation.fn_kwargs or {})
        return ValidationTask(fn_kwargs=kwargs, timeout_s=validation.timeout_s)
    if not isinstance(validation, bool):
        raise ConfigError(f"train.report(validation) must be True or a ValidationTaskConfig, not {validation!r}.")
    return ValidationTask(is_default=True) if validation else None
