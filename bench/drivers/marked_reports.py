"""A training function that logs its first step and each report, and kills rank 1 once: for workers of every system."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.workload import Log

__all__ = ["marking", "on_optimizer_step"]

KILL_AT = 3
_SETTLING_S = 8.0
"""How long the group has been there when rank 1 is killed: nobody should be caught while still starting."""


def marking(function: Callable[..., Any], system: str, directory: str) -> Callable[..., Any]:
    """`function`, whose first step and calls of `train.report` are logged to `directory`; rank 1 is killed after some,
    once. A step is one of a torch optimizer; where there is none, the first report stands for it."""

    @functools.wraps(function)
    def marked(config: dict[str, Any]) -> Any:
        train: Any = importlib.import_module(f"{system}.train")
        report, log, rank = train.report, Log(f"{directory}/log"), train.get_context().get_world_rank()
        log.say("function", rank=rank)
        count, stepped = 0, False

        def step() -> None:
            nonlocal stepped
            if not stepped:
                log.say("step", rank=rank)
            stepped = True

        def logged(*args: Any, **kwargs: Any) -> None:
            nonlocal count
            step()
            report(*args, **kwargs)
            count += 1
            if rank == 1 and count == KILL_AT and _is_first(directory):
                time.sleep(_SETTLING_S)
                log.say("kill", rank=rank)
                os.kill(os.getpid(), signal.SIGKILL)

        train.report = logged
        on_optimizer_step(step)
        return function(config)

    return marked


def on_optimizer_step(call: Callable[[], None]) -> None:
    """Call it after each step of a torch optimizer, except those with gradients of zero, by which FSDP makes the
    optimizer's state."""
    if "torch" not in sys.modules:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def hook(optimizer: Any, *_: Any) -> None:
        gradients = [value.grad for group in optimizer.param_groups for value in group["params"]]
        local = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients if gradient is not None]
        if any(bool(gradient.any()) for gradient in local):
            call()

    register_optimizer_step_post_hook(hook)


def _is_first(directory: str) -> bool:
    try:
        Path(directory, "killed").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
