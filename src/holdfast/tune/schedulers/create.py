"""`create_scheduler`: a scheduler by its short name, for scripts that take one from the command line."""

from __future__ import annotations

import importlib
from typing import Any

from holdfast.errors import ConfigError
from holdfast.tune.schedulers.trial_scheduler import TrialScheduler

__all__ = ["create_scheduler"]

_ASHA, _MEDIAN = "async_hyperband:AsyncHyperBandScheduler", "median_stopping_rule:MedianStoppingRule"
_HOMES = {
    "fifo": "trial_scheduler:FIFOScheduler",
    "asha": _ASHA,
    "async_hyperband": _ASHA,
    "asynchyperband": _ASHA,
    "hyperband": "hyperband:HyperBandScheduler",
    "median_stopping_rule": _MEDIAN,
    "medianstopping": _MEDIAN,
    "pbt": "pbt:PopulationBasedTraining",
}


def create_scheduler(scheduler: str, **kwargs: Any) -> TrialScheduler:
    home = _HOMES.get(scheduler.lower()) if isinstance(scheduler, str) else None
    if home is None:
        names = ", ".join(f'"{name}"' for name in _HOMES)
        raise ConfigError(f"create_scheduler(scheduler) must be one of {names}, not {scheduler!r}.")
    module, _, name = home.partition(":")
    made = getattr(importlib.import_module(f"holdfast.tune.schedulers.{module}"), name)(**kwargs)
    assert isinstance(made, TrialScheduler)
    return made
