"""Our domains asked of an Optuna trial, parameter by parameter (define-by-run).

Each has a name, its path in the space written `a/b`. A choice is asked for by the number of its value, so that values
may be anything; domains inside the value that was chosen are asked for too, so conditional spaces are searched and not
only drawn. What Optuna lacks is a function of what it has: a normal value of a uniform one, a quantized logarithmic one
of one that is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from holdfast.tune.search.sample import Categorical, Domain, Float, Integer
from holdfast.tune.search.variant_generator import Space, spell_path

if TYPE_CHECKING:
    import optuna

__all__ = ["is_invertible", "parameter_of", "suggest_value"]

_EDGE = 1e-9
"""How close to 0 and 1 the quantile of a normal value may be."""


def suggest_value(trial: optuna.Trial, name: str, domain: Domain) -> Any:
    """The value that the sampler proposes."""
    if isinstance(domain, Categorical):
        index = trial.suggest_categorical(name, tuple(range(len(domain))))
        return _suggest_inside(trial, f"{name}/{index}", domain[index])
    if isinstance(domain, Integer):
        first, last, step = domain.first, domain.last, domain.step
        if domain.scale == "log":
            return trial.suggest_int(name, first // step, last // step, log=True) * step
        return trial.suggest_int(name, first, last, step=step)
    assert isinstance(domain, Float)
    if domain.scale == "normal":
        quantile = trial.suggest_float(name, _EDGE, 1 - _EDGE)
        return domain.cast(domain.mean if domain.sd == 0 else NormalDist(domain.mean, domain.sd).inv_cdf(quantile))
    assert domain.lower is not None and domain.upper is not None
    if domain.scale == "log":
        return domain.cast(trial.suggest_float(name, domain.lower, domain.upper, log=True))
    return trial.suggest_float(name, domain.lower, domain.upper, step=domain.q)


def parameter_of(domain: Domain, value: Any) -> Any:
    """The parameter that stands for this value; for a value that a user gives, the nearest."""
    if isinstance(domain, Categorical):
        return domain.categories.index(value)
    if isinstance(domain, Integer) and domain.scale == "log":
        return value // domain.step
    if isinstance(domain, Float) and domain.scale == "normal":
        quantile = 0.5 if domain.sd == 0 else NormalDist(domain.mean, domain.sd).cdf(value)
        return min(max(quantile, _EDGE), 1 - _EDGE)
    return value


def is_invertible(domain: Domain) -> bool:
    """Whether `parameter_of` gives exactly what was asked for, whatever the value."""
    if isinstance(domain, Categorical):
        plain = all(isinstance(value, bool | int | float | str | None) for value in domain.categories)
        return plain and len(set(domain.categories)) == len(domain)
    return not (isinstance(domain, Float) and (domain.scale == "normal" or (domain.scale == "log" and domain.q)))


def _suggest_inside(trial: optuna.Trial, name: str, value: Any) -> Any:
    """The chosen value, with what is to be searched in it."""
    if not isinstance(value, Mapping | list | tuple | Domain):
        return value
    inner = Space({"value": value})
    if inner.is_constant:
        return value
    found = {
        path: suggest_value(trial, f"{name}/{spell_path(path[1:])}", domain) for path, domain in inner.domains.items()
    }
    return inner.with_values(found)["value"]
