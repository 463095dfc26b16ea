"""What a trial's function calls: `tune.report` and its companions, which are those of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.checkpoint.handle import Checkpoint
from holdfast.train.functions import get_checkpoint
from holdfast.train.result import Result
from holdfast.tune.context import get_context
from holdfast.worker.session import current

__all__ = ["Checkpoint", "Result", "get_checkpoint", "get_context", "report"]


def report(metrics: Mapping[str, Any], *, checkpoint: Checkpoint | None = None, **others: Any) -> None:
    """Tell the experiment how the trial goes, and give it a checkpoint; the other arguments are those of
    `train.report`.

    Where a scheduler or `RunConfig(stop)` may end the trial, this waits for the decision. If the trial does not go on,
    this does not return: the function is left as by an exception that only `finally` and `except BaseException` see.
    """
    current("tune.report()").report(metrics, checkpoint, **others)
