"""The distributions of a search space: `uniform`, `loguniform`, `randint`, `choice`, `sample_from` and the others.

Bounds are Ray's: floats lie between `lower` and `upper`; `randint` excludes `upper`; whatever is quantized includes
it, except with `q=1`. Values come from `random.Random`, so numpy is not needed; `variant_generator` seeds it.
"""

from __future__ import annotations

import inspect
import math
import numbers
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.errors import ConfigError
from holdfast.tune.search.random_state import as_random

__all__ = [
    "FACTORIES",
    "Categorical",
    "Domain",
    "Float",
    "Function",
    "Integer",
    "choice",
    "lograndint",
    "loguniform",
    "qlograndint",
    "qloguniform",
    "qrandint",
    "qrandn",
    "quniform",
    "randint",
    "randn",
    "sample_from",
    "uniform",
]


class Domain:
    """Something that values are drawn from."""

    def draw(self, rng: random.Random) -> Any:
        """One value; nothing else than `rng` decides which."""
        raise NotImplementedError

    def sample(self, config: Any = None, size: int = 1, random_state: Any = None) -> Any:
        """One value, or a list of `size`. `config` is what `sample_from` functions are given."""
        rng = as_random(random_state)
        values = [self.draw(rng) for _ in range(size)]
        return values[0] if size == 1 else values

    def is_valid(self, value: Any) -> bool:
        """Whether the value could have been drawn, but for quantization."""
        raise NotImplementedError

    def cast(self, value: Any) -> Any:
        return value

    def is_function(self) -> bool:
        return False

    @property
    def domain_str(self) -> str:
        return str(self)

    def factory(self) -> tuple[str, dict[str, Any]]:
        """The function of this module that makes it, and its arguments: how it is stored."""
        raise NotImplementedError

    def __repr__(self) -> str:
        name, arguments = self.factory()
        return f"{name}({', '.join(f'{value!r}' for value in arguments.values())})"


@dataclass(frozen=True, repr=False)
class Float(Domain):
    """Numbers between two bounds, uniform or log-uniform; or normal ones, which have no bounds."""

    lower: float | None = None
    upper: float | None = None
    scale: str = "uniform"
    q: float | None = None
    mean: float = 0.0
    sd: float = 1.0

    def uniform(self) -> Float:
        return replace(self, scale="uniform")

    def loguniform(self) -> Float:
        return replace(self, scale="log")

    def normal(self, mean: float = 0.0, sd: float = 1.0) -> Float:
        return replace(self, scale="normal", mean=mean, sd=sd)

    def quantized(self, q: float) -> Float:
        return replace(self, q=q)

    def draw(self, rng: random.Random) -> float:
        if self.scale == "normal":
            value = rng.gauss(self.mean, self.sd)
        else:
            assert self.lower is not None and self.upper is not None
            if self.scale == "log":
                value = math.exp(rng.uniform(math.log(self.lower), math.log(self.upper)))
            else:
                value = rng.uniform(self.lower, self.upper)
        return self.cast(value)

    def cast(self, value: Any) -> float:
        """The nearest value that this domain has."""
        nearest = float(value)
        if self.q is not None:
            nearest = round(nearest / self.q) * self.q
        if self.lower is not None and self.upper is not None:
            nearest = min(max(nearest, float(self.lower)), float(self.upper))
        return nearest

    def is_valid(self, value: Any) -> bool:
        if self.lower is None or self.upper is None:
            return True
        return bool(self.lower <= value <= self.upper)

    @property
    def domain_str(self) -> str:
        return f"({self.lower}, {self.upper})"

    def factory(self) -> tuple[str, dict[str, Any]]:
        if self.scale == "normal":
            name, arguments = "randn", {"mean": self.mean, "sd": self.sd}
        else:
            name = "loguniform" if self.scale == "log" else "uniform"
            arguments = {"lower": self.lower, "upper": self.upper}  # type: ignore[dict-item]
        return (f"q{name}", {**arguments, "q": self.q}) if self.q is not None else (name, dict(arguments))


@dataclass(frozen=True, repr=False)
class Integer(Domain):
    """Whole numbers from `lower`, uniform or log-uniform. Without `q`, or with a `q` of 1, `upper` is excluded;
    otherwise multiples of `q` up to `upper`, that included."""

    lower: int
    upper: int
    scale: str = "uniform"
    q: int | None = None

    def uniform(self) -> Integer:
        return replace(self, scale="uniform")

    def loguniform(self) -> Integer:
        return replace(self, scale="log")

    def quantized(self, q: int) -> Integer:
        return replace(self, q=q)

    @property
    def step(self) -> int:
        return self.q or 1

    @property
    def first(self) -> int:
        """The least value that can be drawn."""
        return -(-self.lower // self.step) * self.step

    @property
    def last(self) -> int:
        """The greatest value that can be drawn."""
        return self.upper - 1 if self.step == 1 else self.upper // self.step * self.step

    def draw(self, rng: random.Random) -> int:
        first, last = self.first // self.step, self.last // self.step
        if self.scale == "log":
            value = math.floor(math.exp(rng.uniform(math.log(first), math.log(last + 1))))
            return min(max(value, first), last) * self.step
        return rng.randint(first, last) * self.step

    def cast(self, value: Any) -> int:
        """The nearest value that this domain has."""
        return min(max(round(float(value) / self.step) * self.step, self.first), self.last)

    def is_valid(self, value: Any) -> bool:
        return bool(self.lower <= value <= self.last)

    @property
    def domain_str(self) -> str:
        return f"({self.lower}, {self.upper})"

    def factory(self) -> tuple[str, dict[str, Any]]:
        name = "lograndint" if self.scale == "log" else "randint"
        arguments = {"lower": self.lower, "upper": self.upper}
        return (f"q{name}", {**arguments, "q": self.q}) if self.q is not None else (name, arguments)


@dataclass(frozen=True, repr=False)
class Categorical(Domain):
    """One of several values, each as likely as the others."""

    categories: tuple[Any, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "categories", tuple(self.categories))

    def uniform(self) -> Categorical:
        return self

    def grid(self) -> dict[str, list[Any]]:
        """All of them in turn, as `grid_search` does."""
        return {"grid_search": list(self.categories)}

    def draw(self, rng: random.Random) -> Any:
        return rng.choice(self.categories)

    def is_valid(self, value: Any) -> bool:
        return value in self.categories

    def __len__(self) -> int:
        return len(self.categories)

    def __getitem__(self, index: int) -> Any:
        return self.categories[index]

    @property
    def domain_str(self) -> str:
        return f"{list(self.categories)}"

    def factory(self) -> tuple[str, dict[str, Any]]:
        return "choice", {"categories": list(self.categories)}


@dataclass(frozen=True, repr=False)
class Function(Domain):
    """What a user's function returns; it is given the values that are drawn already."""

    func: Callable[..., Any]

    def call(self, config: Any) -> Any:
        """A function without parameters is called without the configuration."""
        try:
            takes_config = bool(inspect.signature(self.func).parameters)
        except ValueError:  # made in C
            takes_config = True
        return self.func(config) if takes_config else self.func()

    def draw(self, rng: random.Random) -> Any:
        return self.call({})

    def sample(self, config: Any = None, size: int = 1, random_state: Any = None) -> Any:
        values = [self.call({} if config is None else config) for _ in range(size)]
        return values[0] if size == 1 else values

    def is_function(self) -> bool:
        return True

    def is_valid(self, value: Any) -> bool:
        return True

    @property
    def domain_str(self) -> str:
        return f"{getattr(self.func, '__qualname__', self.func)}()"

    def factory(self) -> tuple[str, dict[str, Any]]:
        return "sample_from", {"func": self.func}

    def __repr__(self) -> str:
        return f"sample_from({getattr(self.func, '__qualname__', self.func)})"


# ------------------------------------------------------------------ what users call


def uniform(lower: float, upper: float) -> Float:
    """A float between `lower` and `upper`, each as likely as any other."""
    _check_bounds("uniform", lower, upper)
    return Float(lower, upper)


def quniform(lower: float, upper: float, q: float) -> Float:
    """A multiple of `q` between `lower` and `upper`, both included."""
    _check_bounds("quniform", lower, upper)
    return Float(lower, upper, q=_checked_step("quniform", lower, upper, q))


def loguniform(lower: float, upper: float, base: object = None) -> Float:
    """A float between `lower` and `upper`, every order of magnitude as likely as any other. `base` has no effect."""
    _check_bounds("loguniform", lower, upper, positive=True)
    return Float(lower, upper, "log")


def qloguniform(lower: float, upper: float, q: float, base: object = None) -> Float:
    """A float as `loguniform` draws it, rounded to a multiple of `q`; `upper` is included."""
    _check_bounds("qloguniform", lower, upper, positive=True)
    return Float(lower, upper, "log", _checked_step("qloguniform", lower, upper, q))


def randn(mean: float = 0.0, sd: float = 1.0) -> Float:
    """A float with a normal distribution."""
    _check_normal("randn", mean, sd)
    return Float(scale="normal", mean=mean, sd=sd)


def qrandn(mean: float, sd: float, q: float) -> Float:
    """A float with a normal distribution, rounded to a multiple of `q`."""
    _check_normal("qrandn", mean, sd)
    if not _is_number(q) or not q > 0:
        raise ConfigError(f"tune.qrandn(q) must be a number above 0, not {q!r}.")
    return Float(scale="normal", mean=mean, sd=sd, q=q)


def randint(lower: int, upper: int) -> Integer:
    """A whole number from `lower` up to `upper`, that excluded."""
    return _checked_integer("randint", Integer(lower, upper))


def qrandint(lower: int, upper: int, q: int = 1) -> Integer:
    """A multiple of `q` from `lower` up to `upper`, that included unless `q` is 1."""
    return _checked_integer("qrandint", Integer(lower, upper, q=q))


def lograndint(lower: int, upper: int, base: object = None) -> Integer:
    """A whole number from `lower` up to `upper`, that excluded, every order of magnitude as likely as any other.
    `base` has no effect."""
    return _checked_integer("lograndint", Integer(lower, upper, "log"))


def qlograndint(lower: int, upper: int, q: int, base: object = None) -> Integer:
    """A multiple of `q` from `lower` up to `upper`, that included unless `q` is 1; small ones are likelier, as
    `lograndint` draws them."""
    return _checked_integer("qlograndint", Integer(lower, upper, "log", q))


def choice(categories: Sequence[Any]) -> Categorical:
    """One of these values."""
    try:
        values = tuple(categories)
    except TypeError:
        raise ConfigError(f"tune.choice(categories) must be a list of values, not {categories!r}.") from None
    if not values:
        raise ConfigError("tune.choice([]) has nothing to choose from: give it at least one value.")
    return Categorical(values)


def sample_from(func: Callable[..., Any]) -> Function:
    """What `func(config)` returns, where `config` holds the values that are drawn already."""
    if not callable(func):
        raise ConfigError(f"tune.sample_from(func) must be a function, not {func!r}.")
    return Function(func)


FACTORIES: dict[str, Callable[..., Domain]] = {
    made.__name__: made
    for made in (
        *(uniform, quniform, loguniform, qloguniform, randn, qrandn),
        *(randint, qrandint, lograndint, qlograndint, choice, sample_from),
    )
}
"""By the name under which a domain is stored."""


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _check_bounds(name: str, lower: Any, upper: Any, *, positive: bool = False) -> None:
    if not _is_number(lower) or not _is_number(upper):
        raise ConfigError(f"tune.{name}(lower, upper) must be two finite numbers, not {lower!r} and {upper!r}.")
    if positive and not lower > 0:
        raise ConfigError(
            f"tune.{name}(lower) must be above 0, not {lower!r}: give the values themselves, not their logarithms."
        )
    if not lower < upper:
        raise ConfigError(
            f"tune.{name}(lower, upper): lower must be below upper, but {lower!r} is not below {upper!r}."
        )


def _checked_step(name: str, lower: float, upper: float, q: Any) -> float:
    if not _is_number(q) or not q > 0:
        raise ConfigError(f"tune.{name}(q) must be a number above 0, not {q!r}.")
    for bound in (lower, upper):
        if abs(bound / q - round(bound / q)) > 1e-6:
            raise ConfigError(f"tune.{name}: the bound {bound!r} must be a multiple of q, which is {q!r}.")
    return float(q)


def _check_normal(name: str, mean: Any, sd: Any) -> None:
    if not _is_number(mean):
        raise ConfigError(f"tune.{name}(mean) must be a finite number, not {mean!r}.")
    if not _is_number(sd) or sd < 0:
        raise ConfigError(f"tune.{name}(sd) must be a number of 0 or more, not {sd!r}.")


def _checked_integer(name: str, domain: Integer) -> Integer:
    for field, value in (("lower", domain.lower), ("upper", domain.upper), ("q", domain.q)):
        whole = _is_number(value) and value == int(value)  # type: ignore[arg-type]
        if not whole and not (field == "q" and value is None):
            raise ConfigError(f"tune.{name}({field}) must be a whole number, not {value!r}.")
    if domain.q is not None and domain.q < 1:
        raise ConfigError(f"tune.{name}(q) must be 1 or more, not {domain.q!r}.")
    if domain.scale == "log" and domain.lower < 1:
        raise ConfigError(
            f"tune.{name}(lower) must be 1 or more, not {domain.lower!r}: give the values themselves, not their "
            "logarithms."
        )
    q = None if domain.q is None else int(domain.q)
    domain = replace(domain, lower=int(domain.lower), upper=int(domain.upper), q=q)
    if domain.first > domain.last:
        values = f"multiple of {q} from" if domain.step > 1 else "whole number from"
        raise ConfigError(
            f"tune.{name}(lower, upper): there is no {values} {domain.lower} to {domain.upper}"
            f"{' (which is excluded)' if domain.step == 1 else ''}: widen the bounds."
        )
    return domain
