"""Callbacks for `Trainer(callbacks=[...])` in a trial: they report when it is said, with a checkpoint or without.

Needs Lightning, under whichever of its two names, which `holdfast.train.lightning` imports.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast import train
from holdfast.errors import ConfigError
from holdfast.train.lightning import ReportCallback  # noqa: F401  says how to install Lightning where it is not
from holdfast.train.lightning.report_callback import report_checkpoint
from holdfast.train.lightning.strategies import pl

__all__ = ["TuneCallback", "TuneReportCallback", "TuneReportCheckpointCallback"]

_log = logging.getLogger(__name__)
_HOOKS = frozenset(name for name in dir(pl.callbacks.Callback) if name.startswith("on_"))


def _make_hook(name: str) -> Any:
    def hook(self: Any, trainer: pl.Trainer, *others: Any, **named: Any) -> None:
        if name in self._on:
            self._handle(trainer)

    hook.__name__ = name
    return hook


_Hooked = type("_Hooked", (pl.callbacks.Callback,), {name: _make_hook(name) for name in _HOOKS})


class TuneCallback(_Hooked):  # type: ignore[misc, valid-type]
    """Calls `_handle` at these hooks of Lightning's, named without `on_`: "validation_end", "train_batch_end", ..."""

    def __init__(self, on: str | list[str] = "validation_end") -> None:
        super().__init__()
        names = [on] if isinstance(on, str) else on
        if unknown := [name for name in names if f"on_{name}" not in _HOOKS]:
            known = ", ".join(sorted(name.removeprefix("on_") for name in _HOOKS))
            raise ConfigError(f"{type(self).__name__}(on) names {unknown[0]!r}: choose from {known}.")
        self._on = frozenset(f"on_{name}" for name in names)

    def _handle(self, trainer: pl.Trainer) -> None:
        raise NotImplementedError


class TuneReportCheckpointCallback(TuneCallback):
    """Reports logged metrics, with a checkpoint that holds `filename` unless `save_checkpoints` is false.

    `metrics` are the names of what is reported, or a mapping from a name of your own to Lightning's; None: all. One
    that was not logged is left out, with a warning; where none was, nothing is reported, and neither is anything during
    the sanity check.
    """

    def __init__(
        self,
        metrics: str | Sequence[str] | Mapping[str, str] | None = None,
        filename: str = "checkpoint",
        save_checkpoints: bool = True,
        on: str | list[str] = "validation_end",
    ) -> None:
        super().__init__(on)
        names = [metrics] if isinstance(metrics, str) else metrics
        self._names = dict(names) if isinstance(names, Mapping) else {name: name for name in names or ()}
        self._filename = filename
        self._save_checkpoints = save_checkpoints

    def _handle(self, trainer: pl.Trainer) -> None:
        if trainer.sanity_checking or not (metrics := self._select(trainer.callback_metrics)):
            return
        if self._save_checkpoints:
            report_checkpoint(trainer, metrics, self._filename)
        else:
            train.report(metrics)

    def _select(self, logged: Mapping[str, Any]) -> dict[str, Any]:
        for name in self._names.values():
            if name not in logged:
                _log.warning(
                    "%s(metrics) names %r, which was not logged: there is %s.",
                    type(self).__name__,
                    name,
                    ", ".join(sorted(logged)) or "nothing",
                )
        names = self._names or {name: name for name in logged}
        return {mine: logged[theirs].item() for mine, theirs in names.items() if theirs in logged}


class TuneReportCallback(TuneReportCheckpointCallback):
    """An older name of `TuneReportCheckpointCallback(save_checkpoints=False)`."""

    def __init__(
        self,
        metrics: str | Sequence[str] | Mapping[str, str] | None = None,
        on: str | list[str] = "validation_end",
    ) -> None:
        warnings.warn(
            "pytorch_lightning.TuneReportCallback is TuneReportCheckpointCallback(save_checkpoints=False) by an older "
            "name.",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(metrics, save_checkpoints=False, on=on)
