"""`create_searcher`: a searcher by its short name, for scripts that take one from the command line."""

from __future__ import annotations

import importlib
from typing import Any

from holdfast.errors import ConfigError
from holdfast.tune.search.searcher import Searcher

__all__ = ["create_searcher"]

_HOMES = {
    "random": "basic_variant:BasicVariantGenerator",
    "variant_generator": "basic_variant:BasicVariantGenerator",
    "optuna": "optuna:OptunaSearch",
}


def create_searcher(search_alg: str, **kwargs: Any) -> Searcher:
    home = _HOMES.get(search_alg.lower()) if isinstance(search_alg, str) else None
    if home is None:
        names = ", ".join(f'"{name}"' for name in _HOMES)
        raise ConfigError(f"create_searcher(search_alg) must be one of {names}, not {search_alg!r}.")
    module, _, name = home.partition(":")
    made = getattr(importlib.import_module(f"holdfast.tune.search.{module}"), name)(**kwargs)
    assert isinstance(made, Searcher)
    return made
