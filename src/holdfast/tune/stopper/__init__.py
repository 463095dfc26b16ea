"""Stoppers: when trials and experiments have run for long enough. `stopper` is the base, `resolve` takes what users
write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.train.lazy_attributes import lazy_attributes

if TYPE_CHECKING:
    from holdfast.tune.stopper.limits import DictStopper as DictStopper
    from holdfast.tune.stopper.limits import MaximumIterationStopper as MaximumIterationStopper
    from holdfast.tune.stopper.limits import TimeoutStopper as TimeoutStopper
    from holdfast.tune.stopper.plateau import ExperimentPlateauStopper as ExperimentPlateauStopper
    from holdfast.tune.stopper.plateau import TrialPlateauStopper as TrialPlateauStopper
    from holdfast.tune.stopper.stopper import CombinedStopper as CombinedStopper
    from holdfast.tune.stopper.stopper import FunctionStopper as FunctionStopper
    from holdfast.tune.stopper.stopper import NoopStopper as NoopStopper
    from holdfast.tune.stopper.stopper import Stopper as Stopper

__all__ = [
    "CombinedStopper",
    "DictStopper",
    "ExperimentPlateauStopper",
    "FunctionStopper",
    "MaximumIterationStopper",
    "NoopStopper",
    "Stopper",
    "TimeoutStopper",
    "TrialPlateauStopper",
]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        **dict.fromkeys(("DictStopper", "MaximumIterationStopper", "TimeoutStopper"), "limits"),
        **dict.fromkeys(("ExperimentPlateauStopper", "TrialPlateauStopper"), "plateau"),
        **dict.fromkeys(("CombinedStopper", "FunctionStopper", "NoopStopper", "Stopper"), "stopper"),
    },
)
