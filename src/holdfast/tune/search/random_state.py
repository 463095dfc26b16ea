"""Seeded randomness: each draw has a generator of its own, made from a seed and the number of what is drawn.

So a value depends on nothing but those two, and an experiment that goes on draws what it would have drawn.
"""

from __future__ import annotations

import random
from typing import Any

from holdfast.errors import ConfigError

__all__ = ["as_random", "as_seed", "seeded"]

_SEEDS = 2**31 - 1


def seeded(*parts: int | str) -> random.Random:
    """A generator that depends on these alone; the same on every machine and version of Python."""
    return random.Random(":".join(map(str, parts)))


def as_seed(what: str, random_state: Any) -> int | None:
    """The seed that a user gave: a number, or a generator of Python or numpy, of which one number is drawn."""
    if random_state is None:
        return None
    if hasattr(random_state, "integers"):  # numpy's Generator
        return int(random_state.integers(_SEEDS))
    if hasattr(random_state, "get_state") and hasattr(random_state, "randint"):  # numpy's RandomState
        return int(random_state.randint(_SEEDS))
    if isinstance(random_state, random.Random):
        return random_state.randrange(_SEEDS)
    if isinstance(random_state, bool) or not hasattr(random_state, "__index__"):
        raise ConfigError(f"{what} must be a whole number or a random generator, not {random_state!r}.")
    return int(random_state)


def as_random(random_state: Any) -> random.Random:
    """A generator for direct calls of `sample`; None is one that nobody can repeat."""
    if isinstance(random_state, random.Random):
        return random_state
    seed = as_seed("random_state", random_state)
    return random.Random(seed)
