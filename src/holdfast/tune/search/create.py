"""`create_searcher`: a searcher by its short name, for scripts that take one from the command line."""

from __future__ import annotations

from typing import Any

from holdfast.tune.search.searcher import Searcher
from holdfast.tune.short_names import create

__all__ = ["create_searcher"]

_CLASSES = {
    "random": "holdfast.tune.search.basic_variant:BasicVariantGenerator",
    "variant_generator": "holdfast.tune.search.basic_variant:BasicVariantGenerator",
    "optuna": "holdfast.tune.search.optuna:OptunaSearch",
}


def create_searcher(search_alg: str, **kwargs: Any) -> Searcher:
    return create("create_searcher(search_alg)", search_alg, _CLASSES, Searcher, kwargs)
