"""`Stopper`: says when a trial, or the whole experiment, has run for long enough. Subclass it, or give a function.

It is asked for each result, in the order in which they come. As searchers and schedulers, it is constructed again after
a restart, and told again what happened, or given its state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from holdfast.errors import ConfigError
from holdfast.tune.serialization import Stateful

__all__ = ["CombinedStopper", "FunctionStopper", "NoopStopper", "Stopper"]


class Stopper(Stateful):
    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether the trial that has reported this stops."""
        raise NotImplementedError

    def stop_all(self) -> bool:
        """Whether the experiment stops: no new trials, and those that run end."""
        raise NotImplementedError

    def resume_after(self, elapsed_s: float) -> None:
        """An experiment that has run for so long goes on, with a stopper that was told its results again."""

    def get_state(self) -> dict[str, Any]:
        """The base has none."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """The base has none."""


class NoopStopper(Stopper):
    """Stops nothing."""

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return False


class FunctionStopper(Stopper):
    """Stops a trial when `function(trial_id, result)` is true."""

    def __init__(self, function: Callable[[str, dict[str, Any]], bool]) -> None:
        if not self.is_valid_function(function):
            raise ConfigError(f"FunctionStopper(function) must be a function of trial_id and result, not {function!r}.")
        self._function = function

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return bool(self._function(trial_id, result))

    def stop_all(self) -> bool:
        return False

    @classmethod
    def is_valid_function(cls, fn: Any) -> bool:
        """Whether it can be called with two arguments."""
        if not callable(fn) or isinstance(fn, Stopper | type):
            return False
        try:
            inspect.signature(fn).bind("trial_id", {})
        except TypeError:
            return False
        except ValueError:  # made in C
            return True
        return True


class CombinedStopper(Stopper):
    """Stops what any of these stops. Each of them is asked about every result."""

    def __init__(self, *stoppers: Stopper) -> None:
        for stopper in stoppers:
            if not isinstance(stopper, Stopper):
                raise ConfigError(f"CombinedStopper(*stoppers) takes stoppers, not {stopper!r}.")
        self._stoppers = stoppers

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return any([stopper(trial_id, result) for stopper in self._stoppers])  # noqa: C419  each hears of it

    def stop_all(self) -> bool:
        return any(stopper.stop_all() for stopper in self._stoppers)

    def resume_after(self, elapsed_s: float) -> None:
        for stopper in self._stoppers:
            stopper.resume_after(elapsed_s)

    def get_state(self) -> dict[str, Any]:
        return {"stoppers": [stopper.get_state() for stopper in self._stoppers]}

    def set_state(self, state: dict[str, Any]) -> None:
        for stopper, one in zip(self._stoppers, state["stoppers"], strict=True):
            stopper.set_state(one)
