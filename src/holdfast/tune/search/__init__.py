"""Search spaces and searchers. One idea a file: `sample` has the distributions, `variant_generator` makes
configurations of them, `searcher` is the base of what proposes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.train.lazy_attributes import lazy_attributes

if TYPE_CHECKING:
    from holdfast.tune.search.basic_variant import BasicVariantGenerator as BasicVariantGenerator
    from holdfast.tune.search.concurrency_limiter import ConcurrencyLimiter as ConcurrencyLimiter
    from holdfast.tune.search.create import create_searcher as create_searcher
    from holdfast.tune.search.repeater import Repeater as Repeater
    from holdfast.tune.search.searcher import Searcher as Searcher
    from holdfast.tune.search.variant_generator import grid_search as grid_search

__all__ = ["BasicVariantGenerator", "ConcurrencyLimiter", "Repeater", "Searcher", "create_searcher", "grid_search"]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "BasicVariantGenerator": "basic_variant",
        "ConcurrencyLimiter": "concurrency_limiter",
        "Repeater": "repeater",
        "Searcher": "searcher",
        "create_searcher": "create",
        "grid_search": "variant_generator",
    },
)
