"""The journal of a small experiment, line by line, for tests of what shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.core import records as r
from holdfast.journal.format import Line
from holdfast.tune.config_codec import ConfigCodec
from holdfast.tune.experiment_observer import ExperimentObserver, ExperimentView, replaying_machine
from holdfast.tune.machine import ExperimentMachine

__all__ = ["ExperimentLines"]


class ExperimentLines:
    """Feeds views with the records of an experiment "e"; `machine` has those of earlier drivers."""

    def __init__(self, *views: ExperimentView, machine: ExperimentMachine | None = None) -> None:
        self.observer = ExperimentObserver(machine or replaying_machine("e", ConfigCodec()), "/place", views)
        self.at = 0.0
        self._numbers = 0

    def add(self, run: str, make: Callable[..., r.Record], **fields: Any) -> None:
        self._numbers += 1
        self.at += 1
        self.observer.record(Line(self._numbers, run, 0, make(at=self.at, **fields)))

    def create(self, trial: str, **config: Any) -> None:
        self.add("e", r.TrialCreated, trial=trial, config=config, directory=f"dir_{trial}", name=f"name_{trial}")

    def start(self, trial: str, iteration: int = 0, checkpoint: str | None = None) -> None:
        self.add(trial, r.ControllerStarted, epoch=1, host="h", pid=1, workers=1)
        self.generation(trial, 1, iteration, checkpoint)

    def generation(self, trial: str, number: int, iteration: int = 0, checkpoint: str | None = None) -> None:
        fields = {"world_size": 1, "agents": ("a",), "iteration": iteration, "checkpoint": checkpoint}
        self.add(trial, r.GenerationStarted, generation=number, **fields)

    def report(self, trial: str, iteration: int, generation: int = 1, **metrics: Any) -> None:
        self.add(trial, r.Reported, generation=generation, iteration=iteration, metrics=metrics)

    def commit(self, trial: str, name: str, iteration: int) -> None:
        fields: dict[str, Any] = {"index": 0, "generation": 1, "metrics": {}}
        self.add(trial, r.CheckpointCommitted, name=name, iteration=iteration, **fields)

    def fail_generation(self, trial: str, iteration: int) -> None:
        fields = {"why": "x", "detected_at": self.at, "iteration": iteration, "counted": True}
        self.add(trial, r.GenerationEnded, generation=1, **fields)

    def fail(self, trial: str) -> None:
        self.add(trial, r.RunFailed, error="broken", error_type="")

    def finish(self, trial: str) -> None:
        self.add(trial, r.RunFinished)

    def end(self, why: str = "") -> None:
        self.add("e", r.ExperimentEnded, why=why)
        self.observer.flush(True)
        self.observer.close()
