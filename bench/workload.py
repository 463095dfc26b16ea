"""The training that `bench.train` runs on every contender: a small data-parallel model that logs each step.

The log is a file of JSON lines, appended to by all workers; times are wall-clock, so the bench can compare a kill with
the first step after it across processes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Log", "train_steps"]


class Log:
    """Appends whole lines; many processes may share the file."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def say(self, event: str, **details: Any) -> None:
        line = json.dumps({"event": event, "at": time.time(), "pid": os.getpid(), **details})
        os.write(self._fd, line.encode() + b"\n")


def train_steps(
    log: Log,
    rank: int,
    stop: int,
    load: Callable[[], Path | None],
    save: Callable[[int, Callable[[Path], None]], None],
    pause_s: float = 0.01,
) -> None:
    """Train to step `stop`, resuming from the directory that `load` gives; `save(step, write)` every fifth step."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = 0
    if (directory := load()) is not None:
        state = torch.load(directory / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    for step in range(first, stop):
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.say("step", rank=rank, step=step)

        def write(target: Path, step: int = step) -> None:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, target / "state.pt")

        if step % 5 == 0:
            save(step, write)
        time.sleep(pause_s)
