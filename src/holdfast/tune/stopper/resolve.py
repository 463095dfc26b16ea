"""`make_stopper`: what a user may write as `RunConfig(stop=...)`, as one stopper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import ConfigError
from holdfast.tune.stopper.limits import DictStopper
from holdfast.tune.stopper.stopper import CombinedStopper, FunctionStopper, NoopStopper, Stopper

__all__ = ["make_stopper"]


def make_stopper(stop: Any) -> Stopper:
    """From None, a dict, a function, a stopper, or a list of those."""
    if stop is None:
        return NoopStopper()
    if isinstance(stop, Stopper):
        return stop
    if isinstance(stop, Mapping):
        return DictStopper(stop)
    if isinstance(stop, list | tuple):
        return CombinedStopper(*map(make_stopper, stop))
    if FunctionStopper.is_valid_function(stop):
        return FunctionStopper(stop)
    raise ConfigError(
        f"RunConfig(stop) must be a dict of metrics, a function of trial_id and result, or a Stopper, not {stop!r}."
    )
