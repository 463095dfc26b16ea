"""What `Tuner.fit()` asks for, and how much of it is kept with the experiment: everything that JSON can say, so that
`Tuner.restore` finds it again. Nothing is pickled."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import ConfigError
from holdfast.train import config as train_config
from holdfast.tune.config import CheckpointConfig, FailureConfig, RunConfig, TuneConfig
from holdfast.tune.search.variant_generator import Space
from holdfast.tune.serialization import SecretFilter, from_json, to_json
from holdfast.tune.trainable import BoundTrainable

__all__ = ["ExperimentRequest", "ExperimentSettings"]

_FAILURE_FIELDS = (
    "max_failures",
    "fail_fast",
    "progress_timeout_s",
    "stop_on_repeated_error",
    "max_preemption_failures",
)
_CHECKPOINT_FIELDS = (
    "num_to_keep",
    "checkpoint_score_attribute",
    "checkpoint_score_order",
    "checkpoint_frequency",
    "checkpoint_at_end",
)
_TUNE_FIELDS = (
    *("mode", "metric", "search_alg", "scheduler", "num_samples", "max_concurrent_trials", "time_budget_s"),
    *("trial_name_creator", "trial_dirname_creator", "budget"),
)
_GIVE_TRAINABLE = "give it as Tuner.restore(path, trainable=...)"


def find_search_path(trainable: Any) -> str:
    """Where a function's or a class's module was found; "" if that is installed, or is not known."""
    module = sys.modules.get(str(getattr(trainable, "__module__", "")).partition(".")[0])
    file = getattr(module, "__file__", None)
    if module is None or module.__name__ == "__main__" or file is None:
        return ""
    path = Path(file).absolute().parent
    path = path.parent if hasattr(module, "__path__") else path  # a package lies in a directory of its own
    installed = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")}
    return "" if installed & {path, *path.parents} else str(path)


def _belongs_to_user(directory: str) -> bool:
    """Whether to import from it: that storage names a directory does not make what lies there the user's code."""
    try:
        found = Path(directory).stat()
    except OSError:
        return False
    return bool(directory) and found.st_uid == os.geteuid() and not found.st_mode & 0o002


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentRequest:
    """One experiment, checked as far as it can be before storage is looked at."""

    trainable: BoundTrainable
    space: dict[str, Any]
    tune_config: TuneConfig
    run_config: train_config.RunConfig
    storage_path: str
    name: str
    errored: Literal["leave", "resume", "restart"] = "leave"
    """What becomes of trials that have failed."""
    resume_unfinished: bool = True
    must_exist: bool = False
    initial_checkpoint: Checkpoint | None = None
    """From which trials start that have none of their own."""
    on_checkpoint: Callable[[], None] | None = None
    """Called for each checkpoint of a trial, in a thread."""
    listen: str | None = None
    """`HOST:PORT` at which agents of other machines are accepted, unless the trainable says another."""
    on_listening: Callable[[str], None] | None = None
    """Called with the join string once agents are accepted."""
    workers: int | None = None
    """How many workers all agents together can hold, where that is known."""

    def settings(self, seed: int) -> ExperimentSettings:
        """What is kept."""
        run = self.run_config
        return ExperimentSettings(
            seed=seed,
            trainable=to_json(self.trainable.trainable),
            search_path=find_search_path(self.trainable.trainable),
            space=SecretFilter(Space(self.space).constants()).hide(to_json(self.space)),
            tune={name: to_json(getattr(self.tune_config, name)) for name in _TUNE_FIELDS},
            failure={name: to_json(getattr(run.failure_config, name)) for name in _FAILURE_FIELDS},
            checkpoint={name: to_json(getattr(run.checkpoint_config, name)) for name in _CHECKPOINT_FIELDS},
            stop=to_json(run.stop),
            log_to_file=to_json(run.log_to_file),
        )


class ExperimentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """As the journal has them (`ExperimentStarted.settings`)."""

    seed: int
    """Searcher and scheduler draw from it, unless they were given one."""
    trainable: Any
    space: Any
    tune: dict[str, Any]
    failure: dict[str, Any]
    checkpoint: dict[str, Any]
    stop: Any = None
    log_to_file: Any = False
    search_path: str = ""
    """The directory from which the trainable's module was imported, if it was not installed."""

    def restored_trainable(self) -> Any:
        """The trainable, if it is a function or a class that can be imported; from its directory as well, if that is
        there and belongs to the user."""
        if not isinstance(self.trainable, Mapping) or self.trainable.get("$tune") not in ("function", "component"):
            raise ConfigError(f"The trainable of this experiment cannot be imported again: {_GIVE_TRAINABLE}.")
        try:
            return from_json(self.trainable, "trainable", _GIVE_TRAINABLE)
        except ConfigError:
            if not _belongs_to_user(self.search_path) or self.search_path in sys.path:
                raise
        sys.path.append(self.search_path)  # and stays there: workers are sent this process's path
        try:
            return from_json(self.trainable, "trainable", _GIVE_TRAINABLE)
        except ConfigError:
            sys.path.remove(self.search_path)
            raise

    def restored_space(self) -> Any:
        return from_json(self.space, "param_space", "give it as Tuner.restore(path, param_space=...)")

    def restored_tune_config(self) -> TuneConfig:
        return TuneConfig(**{name: from_json(value, f"TuneConfig({name})") for name, value in self.tune.items()})

    def restored_run_config(self, storage_path: str, name: str, filesystem: object | None) -> RunConfig:
        return RunConfig(
            name=name,
            storage_path=storage_path,
            storage_filesystem=filesystem,
            failure_config=FailureConfig(**self.failure),
            checkpoint_config=CheckpointConfig(**self.checkpoint),
            stop=from_json(self.stop, "RunConfig(stop)"),
            log_to_file=from_json(self.log_to_file, "RunConfig(log_to_file)"),
        )
