"""The public API of tuning, with the names that users of Ray Tune know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.train.lazy_attributes import lazy_attributes

if TYPE_CHECKING:
    from holdfast.tune.callback import Callback as Callback
    from holdfast.tune.result_grid import ResultGrid as ResultGrid
    from holdfast.tune.schedulers.create import create_scheduler as create_scheduler
    from holdfast.tune.search.create import create_searcher as create_searcher
    from holdfast.tune.search.sample import choice as choice
    from holdfast.tune.search.sample import lograndint as lograndint
    from holdfast.tune.search.sample import loguniform as loguniform
    from holdfast.tune.search.sample import qlograndint as qlograndint
    from holdfast.tune.search.sample import qloguniform as qloguniform
    from holdfast.tune.search.sample import qrandint as qrandint
    from holdfast.tune.search.sample import qrandn as qrandn
    from holdfast.tune.search.sample import quniform as quniform
    from holdfast.tune.search.sample import randint as randint
    from holdfast.tune.search.sample import randn as randn
    from holdfast.tune.search.sample import sample_from as sample_from
    from holdfast.tune.search.sample import uniform as uniform
    from holdfast.tune.search.variant_generator import grid_search as grid_search
    from holdfast.tune.stopper.stopper import Stopper as Stopper

__all__ = [
    "Callback",
    "ResultGrid",
    "Stopper",
    "choice",
    "create_scheduler",
    "create_searcher",
    "grid_search",
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

_HOMES = {
    "Callback": "callback",
    "ResultGrid": "result_grid",
    "Stopper": "stopper.stopper",
    "create_scheduler": "schedulers.create",
    "create_searcher": "search.create",
    "grid_search": "search.variant_generator",
    **dict.fromkeys(
        (
            *("choice", "lograndint", "loguniform", "qlograndint", "qloguniform", "qrandint", "qrandn"),
            *("quniform", "randint", "randn", "sample_from", "uniform"),
        ),
        "search.sample",
    ),
}

__getattr__, __dir__ = lazy_attributes(__name__, _HOMES)
