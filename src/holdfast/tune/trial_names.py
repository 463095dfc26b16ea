"""Names of trials and of their directories: the trainable, the trial's id, and the values that were drawn for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.checkpoint.layout import check_name
from holdfast.errors import ConfigError, HoldfastError
from holdfast.tune.config import TuneConfig
from holdfast.tune.experiment.trial import Trial
from holdfast.tune.machine import TrialState
from holdfast.tune.search.variant_generator import Space
from holdfast.tune.user_code import call_user_code

__all__ = ["TrialNames"]

_VALUES_CHARACTERS = 80
"""How much of a directory's name may go to the values."""
_ODD = re.compile(r"[^A-Za-z0-9_.=,+-]+")


class TrialNames:
    """Called for each new trial."""

    def __init__(self, trainable: str, space: Mapping[str, Any], tune_config: TuneConfig) -> None:
        parts = Space(space)
        self._trainable = trainable
        self._paths = [*parts.grids, *parts.domains, *parts.functions]
        self._make_name = tune_config.trial_name_creator
        self._make_directory = tune_config.trial_dirname_creator

    def __call__(self, trial: TrialState) -> tuple[str, str]:
        default = f"{self._trainable}_{trial.trial_id}"
        name = default if self._make_name is None else _called("trial_name_creator", self._make_name, trial)
        trial.name = name
        if self._make_directory is not None:
            return name, self._checked(_called("trial_dirname_creator", self._make_directory, trial))
        values = ",".join(f"{path[-1]}={_text(_find(trial.config, path))}" for path in self._paths)
        tag = _ODD.sub("_", values)[:_VALUES_CHARACTERS]
        return name, f"{default}_{tag}" if tag else default

    def _checked(self, directory: str) -> str:
        try:
            return check_name(directory)
        except HoldfastError as error:
            raise ConfigError(f"TuneConfig(trial_dirname_creator) gave {directory!r}: {error}") from error


def _called(field: str, function: Callable[[Trial], str], trial: TrialState) -> str:
    name = getattr(function, "__qualname__", type(function).__name__)
    return call_user_code(f"TuneConfig({field})", name, lambda: str(function(trial)))


def _find(config: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        try:
            config = config[part]
        except (KeyError, IndexError, TypeError):
            return None
    return config


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
