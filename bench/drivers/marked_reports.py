"""A training function that logs each report, and kills rank 1 once: used by workers of Holdfast and of Ray alike."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.workload import Log

__all__ = ["marking"]

KILL_AT = 3
_SETTLING_S = 8.0
"""How long the group has been there when rank 1 is killed: nobody should be caught while still starting."""


def marking(function: Callable[..., Any], system: str, directory: str) -> Callable[..., Any]:
    """`function`, whose calls of `train.report` are logged to `directory`; rank 1 is killed after some, once."""

    @functools.wraps(function)
    def marked(config: dict[str, Any]) -> Any:
        train: Any = importlib.import_module(f"{system}.train")
        report, log, rank = train.report, Log(f"{directory}/log"), train.get_context().get_world_rank()
        count = 0

        def logged(*args: Any, **kwargs: Any) -> None:
            nonlocal count
            report(*args, **kwargs)
            count += 1
            log.say("report", rank=rank, count=count)
            if rank == 1 and count == KILL_AT and _is_first(directory):
                time.sleep(_SETTLING_S)
                log.say("kill", rank=rank, count=count)
                os.kill(os.getpid(), signal.SIGKILL)

        train.report = logged
        return function(config)

    return marked


def _is_first(directory: str) -> bool:
    try:
        Path(directory, "killed").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
