"""Holdfast: training that survives.

The public names live in `holdfast.train` and `holdfast.tune`; `holdfast.air` has the older ones. This package resolves
them and the companions of `init` on first use, so importing it costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast import air as air
    from holdfast import train as train
    from holdfast import tune as tune
    from holdfast.train.runtime import init as init
    from holdfast.train.runtime import is_initialized as is_initialized
    from holdfast.train.runtime import shutdown as shutdown

__all__ = ["__version__", "air", "init", "is_initialized", "shutdown", "train", "tune"]

__version__ = "0.1.0"

_NOT_HERE = {
    "Holdfast runs training functions, not tasks and actors; call the function yourself, or use Ray for that part.": (
        *("remote", "get", "put", "wait", "cancel", "kill", "method", "get_actor", "actor", "ObjectRef", "util"),
        *("get_runtime_context", "runtime_context", "nodes", "cluster_resources", "available_resources", "timeline"),
    ),
    "give datasets=... a list, a torch, Hugging Face or pyarrow data set instead of one of Ray Data.": ("data",),
    "Holdfast trains and does not serve or simulate.": ("serve", "rllib", "workflow", "llm"),
}
"""Names of Ray that Holdfast does not have, by what to do instead."""


def __getattr__(name: str) -> Any:
    if name in ("air", "train", "tune"):
        return importlib.import_module(f"holdfast.{name}")
    if name in ("init", "is_initialized", "shutdown"):
        return getattr(importlib.import_module("holdfast.train.runtime"), name)
    for way_out, names in _NOT_HERE.items():
        if name in names:
            raise AttributeError(f"holdfast has no `{name}`: {way_out}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
