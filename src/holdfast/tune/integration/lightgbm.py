"""The callback for `lightgbm.train(callbacks=[...])` in a trial. Needs LightGBM, which `holdfast.train.lightgbm`
imports."""

from __future__ import annotations

from holdfast.train.lightgbm import ReportCallback

__all__ = ["TuneReportCheckpointCallback"]


class TuneReportCheckpointCallback(ReportCallback):
    """Reports the evaluation of each round as `data-metric` to the trial, and the model every so many rounds and at
    the end; `get_model` reads it back. A trial is one worker, so this is what training has."""
