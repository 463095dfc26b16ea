"""What the summary at the end counts, gathered record by record. `terminal` feeds it, `blocks` shows it."""

from __future__ import annotations

from holdfast.control.outputs.curve import Curve, Row
from holdfast.core import records as r

__all__ = ["Tally"]


class Tally:
    """The run so far, over all of its controllers."""

    def __init__(self) -> None:
        self.iteration = 0
        self.recoveries = 0
        self.recovery_s = 0.0
        self.stall_s = 0.0
        self._curve = Curve()
        self._checkpoints: dict[str, int] = {}
        self._wall_s = 0.0
        self._began: float | None = None
        self._last_at = 0.0
        self._detected_at: float | None = None

    @property
    def newest(self) -> str | None:
        """Name of the newest committed checkpoint."""
        return max(self._checkpoints, key=lambda name: (self._checkpoints[name], name), default=None)

    @property
    def began(self) -> float:
        """When the present controller started."""
        return self._began if self._began is not None else self._last_at

    @property
    def wall_s(self) -> float:
        """Time during which a controller was at work."""
        return self._wall_s + self._last_at - self.began

    @property
    def goodput(self) -> float | None:
        """Share of the wall time spent on training that was kept."""
        return min(1.0, self._curve.total_s / self.wall_s) if self.wall_s > 0 else None

    def take(self, record: r.Record) -> Row | None:
        """Count one record; the row if it is a report."""
        row = self._curve.take(record)
        if isinstance(record, r.ControllerStarted):
            self._wall_s = self.wall_s
            self._began = self._last_at = record.at
            self._detected_at = None
            return None
        self._last_at = max(self._last_at, record.at)
        if isinstance(record, r.Reported):
            self.iteration = record.iteration
            self.stall_s += record.stall_s
        else:
            self._take_event(record)
        return row

    def _take_event(self, record: r.Record) -> None:
        match record:
            case r.GenerationStarted():
                self.iteration = record.iteration
            case r.GenerationEnded():
                if record.counted and self._detected_at is None:
                    self._detected_at = record.detected_at
            case r.GenerationRunning():
                if self._detected_at is not None:
                    self.recoveries += 1
                    self.recovery_s += max(0.0, record.at - self._detected_at)
                    self._detected_at = None
            case r.CheckpointCommitted():
                self._checkpoints[record.name] = record.index
            case r.CheckpointDeleted() | r.CheckpointDamaged():
                self._checkpoints.pop(record.name, None)
