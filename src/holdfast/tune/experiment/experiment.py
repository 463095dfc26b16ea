"""`Experiment`: the arguments of `tune.run` as an object, for `tune.run(Experiment(...))` and `run_experiments`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import ConfigError

__all__ = ["Experiment"]


class Experiment:
    """`run` is a trainable, or the name of a registered one; the rest is what `tune.run` takes."""

    def __init__(self, name: str, run: Any, **settings: Any) -> None:
        self.name = name
        self.run = run
        self.settings = settings

    @classmethod
    def from_json(cls, name: str, spec: Mapping[str, Any]) -> Experiment:
        """From a dict of settings, in which `run` is the trainable."""
        if not isinstance(spec, Mapping) or "run" not in spec:
            raise ConfigError(f'The experiment {name!r} has no trainable: give it as "run".')
        return cls(name, **spec)
