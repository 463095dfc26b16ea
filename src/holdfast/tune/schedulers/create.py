"""`create_scheduler`: a scheduler by its short name, for scripts that take one from the command line."""

from __future__ import annotations

from typing import Any

from holdfast.tune.schedulers.trial_scheduler import TrialScheduler
from holdfast.tune.short_names import create

__all__ = ["create_scheduler"]

_ASHA, _MEDIAN = (
    "holdfast.tune.schedulers.async_hyperband:AsyncHyperBandScheduler",
    "holdfast.tune.schedulers.median_stopping_rule:MedianStoppingRule",
)
_CLASSES = {
    "fifo": "holdfast.tune.schedulers.trial_scheduler:FIFOScheduler",
    "asha": _ASHA,
    "async_hyperband": _ASHA,
    "asynchyperband": _ASHA,
    "hyperband": "holdfast.tune.schedulers.hyperband:HyperBandScheduler",
    "median_stopping_rule": _MEDIAN,
    "medianstopping": _MEDIAN,
    "pbt": "holdfast.tune.schedulers.pbt:PopulationBasedTraining",
}


def create_scheduler(scheduler: str, **kwargs: Any) -> TrialScheduler:
    return create("create_scheduler(scheduler)", scheduler, _CLASSES, TrialScheduler, kwargs)
