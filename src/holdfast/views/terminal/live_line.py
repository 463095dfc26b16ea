"""The line that a terminal shows below everything else while a run goes on: how far, how fast, how long still.

Pure text: `terminal` feeds it and `nonblocking_stream` draws it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from holdfast.core.curve import Row
from holdfast.core.metrics import flatten_metrics
from holdfast.printable import printable
from holdfast.views.formatting import count_text, metric_text, rough_duration, running_time, trim
from holdfast.views.terminal.box import columns_of

__all__ = ["LiveLine"]

_SAMPLE_S = 0.5
_SAMPLES = 40
_TOTALS = {
    "step": ("steps", "num_steps", "max_steps", "total_steps"),
    "global_step": ("steps", "num_steps", "max_steps", "total_steps"),
    "epoch": ("epochs", "num_epochs", "max_epochs", "n_epochs"),
}
"""Metrics that count up, and what their end is called in configurations."""


class LiveLine:
    """`config` is the training function's: the end of training can be known from it where it uses common names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._totals = {
            metric: float(config[name])
            for metric, names in _TOTALS.items()
            for name in names
            if isinstance(config.get(name), int | float)
        }
        self._phase, self._phase_since = "", 0.0
        self._world_size = 0
        self._row: Row | None = None
        self._row_seen = 0.0
        self._counter: str | None = None
        self._samples: deque[tuple[float, int, float]] = deque(maxlen=_SAMPLES)
        """Time, iteration and counting metric of some reports of this generation, the last one included. The time is
        the report's own: records arrive in batches."""
        self._committed_at: float | None = None

    def wait(self, phase: str, now: float) -> None:
        """No worker runs; `phase` says what happens instead."""
        self._phase, self._phase_since = phase, now
        self._samples.clear()

    def start(self, world_size: int, now: float) -> None:
        self._world_size = world_size
        self.wait(f"starting {count_text(world_size, 'worker')}", now)

    def run(self, now: float) -> None:
        self._phase, self._phase_since = f"{count_text(self._world_size, 'worker')} running", now

    def end(self) -> None:
        self._phase, self._row = "", None

    def commit(self, now: float) -> None:
        self._committed_at = now

    def report(self, row: Row, now: float) -> None:
        before, self._row, self._row_seen, self._phase = self._row, row, now, ""
        counting = [name for name in self._totals if _number(row.metrics, name) is not None]
        if before is not None and counting:  # one that did not change with this report tells nothing about the next
            counting = [name for name in counting if row.metrics[name] != before.metrics.get(name)]
        self._counter = counting[0] if counting else None
        sample = (row.at, row.iteration, _number(row.metrics, self._counter or "") or 0.0)
        if len(self._samples) > 1 and row.at - self._samples[-2][0] < _SAMPLE_S:
            self._samples[-1] = sample
        else:
            self._samples.append(sample)

    def text(self, now: float, width: int) -> str:
        """The line, at most `width` columns wide; "" before anything is known."""
        if self._phase:
            return _cut(f"{self._phase}, {running_time(now - self._phase_since)}", width)
        if self._row is None:
            return ""
        tail = [f"it {self._row.iteration}", self._rate(), self._eta(now)]
        tail.append(count_text(self._world_size, "worker"))
        if self._committed_at is not None:
            tail.append(f"saved {running_time(now - self._committed_at)} ago")
        tail = [part for part in tail if part]
        numbers = {
            name: value for name, value in flatten_metrics(self._row.metrics).items() if isinstance(value, int | float)
        }
        counters = [name for name in numbers if name in _TOTALS]  # last: the iteration says much the same
        metrics = [
            f"{trim(printable(name), 40)}={metric_text(numbers[name])}"
            for name in [*(name for name in numbers if name not in _TOTALS), *counters]
        ]
        while True:
            text = " | ".join([" ".join(metrics), *tail] if metrics else tail)
            if columns_of(text) <= width or len(metrics) <= 1:
                return _cut(text, width)
            metrics.pop()

    def _rate(self) -> str:
        first, last = self._samples[0], self._samples[-1]
        if last[0] <= first[0] or last[1] <= first[1]:
            return ""
        per_s = (last[1] - first[1]) / (last[0] - first[0])
        return f"{per_s:.3g} it/s" if per_s >= 1 else f"{rough_duration(1 / per_s)}/it"

    def _eta(self, now: float) -> str:
        first, last = self._samples[0], self._samples[-1]
        if self._counter is None or self._row is None or last[0] <= first[0] or last[2] <= first[2]:
            return ""
        done = last[2] + (last[2] < self._row.iteration)  # counted from 0: the step of that number is done
        left_s = (self._totals[self._counter] - done) * (last[0] - first[0]) / (last[2] - first[2])
        return f"ETA {running_time(left_s - (now - self._row_seen))}" if left_s >= 0 else ""


def _number(metrics: Mapping[str, Any], name: str) -> float | None:
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) else None


def _cut(text: str, width: int) -> str:
    while columns_of(text) > width:
        text = text[:-1]
    return text
