"""Names of Ray AIR, as scripts for older versions of Ray import them: `air.RunConfig`, `air.session`, and so on.

Each is what `holdfast.tune` or `holdfast.train` has under the same name, resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.air import checkpoint as checkpoint
    from holdfast.air import config as config
    from holdfast.air import result as result
    from holdfast.air import session as session
    from holdfast.air.checkpoint import Checkpoint as Checkpoint
    from holdfast.air.config import CheckpointConfig as CheckpointConfig
    from holdfast.air.config import FailureConfig as FailureConfig
    from holdfast.air.config import RunConfig as RunConfig
    from holdfast.air.config import ScalingConfig as ScalingConfig
    from holdfast.air.result import Result as Result

__all__ = ["Checkpoint", "CheckpointConfig", "FailureConfig", "Result", "RunConfig", "ScalingConfig", "session"]

_SUBMODULES = ("checkpoint", "config", "result", "session")
_HOMES = {
    "Checkpoint": "checkpoint",
    "Result": "result",
    **dict.fromkeys(("CheckpointConfig", "FailureConfig", "RunConfig", "ScalingConfig"), "config"),
}


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
