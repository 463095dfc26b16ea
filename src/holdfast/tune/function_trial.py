"""What a trial's worker calls: the user's function, with the habits of tuning. A dict or a number that it returns, or
dicts that it yields, are reports."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

from holdfast.tune.context import set_trial_resources

__all__ = ["DEFAULT_METRIC", "TrialFunction"]

DEFAULT_METRIC = "_metric"
"""The name of what a function returns or yields as a bare number."""


class TrialFunction:
    """Travels with the function by value; the configuration comes with each trial."""

    def __init__(self, function: Callable[..., Any], resources: Mapping[str, float]) -> None:
        self._function = function
        self._resources = dict(resources)

    def __call__(self, config: dict[str, Any]) -> None:
        set_trial_resources(self._resources)
        returned = self._function(config)
        if returned is None:
            return  # as most do: to look up whether it is a mapping takes longer than to run a small function
        for result in returned if inspect.isgenerator(returned) else [returned]:
            _report(result)


def _report(result: Any) -> None:
    from holdfast.worker.session import current

    if isinstance(result, Mapping):
        current("tune.report()").report(result)
    elif isinstance(result, Number) and not isinstance(result, bool):
        current("tune.report()").report({DEFAULT_METRIC: result})
