"""Schedulers, one a file; `trial_scheduler` is the base and says when each method is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.train.lazy_attributes import lazy_attributes

if TYPE_CHECKING:
    from holdfast.tune.schedulers.async_hyperband import ASHAScheduler as ASHAScheduler
    from holdfast.tune.schedulers.async_hyperband import AsyncHyperBandScheduler as AsyncHyperBandScheduler
    from holdfast.tune.schedulers.create import create_scheduler as create_scheduler
    from holdfast.tune.schedulers.hyperband import HyperBandScheduler as HyperBandScheduler
    from holdfast.tune.schedulers.median_stopping_rule import MedianStoppingRule as MedianStoppingRule
    from holdfast.tune.schedulers.pbt import PopulationBasedTraining as PopulationBasedTraining
    from holdfast.tune.schedulers.trial_scheduler import FIFOScheduler as FIFOScheduler
    from holdfast.tune.schedulers.trial_scheduler import TrialScheduler as TrialScheduler

__all__ = [
    "ASHAScheduler",
    "AsyncHyperBandScheduler",
    "FIFOScheduler",
    "HyperBandScheduler",
    "MedianStoppingRule",
    "PopulationBasedTraining",
    "TrialScheduler",
    "create_scheduler",
]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "ASHAScheduler": "async_hyperband",
        "AsyncHyperBandScheduler": "async_hyperband",
        "FIFOScheduler": "trial_scheduler",
        "HyperBandScheduler": "hyperband",
        "MedianStoppingRule": "median_stopping_rule",
        "PopulationBasedTraining": "pbt",
        "TrialScheduler": "trial_scheduler",
        "create_scheduler": "create",
    },
)
