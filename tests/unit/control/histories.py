"""Random, but possible, histories of runs: what controllers could have written, with failures and rollbacks."""

from __future__ import annotations

import math
import random
from typing import Any

from holdfast.core import records as r

__all__ = ["history"]


class _Run:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.at = 1_000_000.0
        self.records: list[list[r.Record]] = []
        self.generation = self.iteration = self.index = 0
        self.stored: dict[str, tuple[int, int]] = {}
        self.keep = self.random.choice([None, 1, 2, 3])

    def add(self, kind: Any, **fields: Any) -> None:
        self.at += self.random.random()
        self.records[-1].append(kind(at=self.at, **fields))

    def controller(self, epoch: int, reports: int) -> None:
        self.records.append([])
        self.add(r.ControllerStarted, epoch=epoch, host="here", pid=7, workers=2, fingerprint={"a": epoch})
        if epoch > 1 and self.random.random() < 0.1:
            self.add(r.RunRestarted, first_index=self.index)
            self.stored.clear()
        while reports > 0:
            reports -= self.run_generation(self.random.randint(0, min(reports, 12)))
        if self.random.random() < 0.5:
            kind = self.random.choice([r.RunFailed, r.RunInterrupted])
            self.add(kind, **({"error": "bad"} if kind is r.RunFailed else {"why": "Ctrl+C"}))

    def run_generation(self, reports: int) -> int:
        self.generation += 1
        newest = max(self.stored, key=lambda name: self.stored[name], default=None)
        self.iteration = self.stored[newest][1] if newest is not None else 0
        self.add(
            r.GenerationStarted,
            generation=self.generation,
            world_size=2,
            agents=("a",),
            iteration=self.iteration,
            checkpoint=newest,
        )
        if self.random.random() < 0.9:
            self.add(r.GenerationRunning, generation=self.generation)
        for _ in range(reports):
            self.report()
        failures = (r.WorkerFailure(rank=0, cause="raised", error_type="E", traceback="long"),)
        counted = self.random.random() < 0.7
        self.add(
            r.GenerationEnded,
            generation=self.generation,
            why="rank 0 raised",
            detected_at=self.at,
            iteration=self.iteration,
            counted=counted,
            failures=failures if counted else (),
        )
        return max(1, reports)

    def report(self) -> None:
        self.iteration += 1
        checkpoint = self.random.random() < 0.4
        loss = self.random.choice([self.random.random(), math.inf, -math.inf])
        metrics = {"loss": loss, "n": self.iteration, "g": {"x": self.generation}}
        self.add(
            r.Reported, generation=self.generation, iteration=self.iteration, metrics=metrics, checkpoint=checkpoint
        )
        if not checkpoint:
            return
        if self.random.random() < 0.2:
            self.add(r.CheckpointAbandoned, generation=self.generation, iteration=self.iteration, why="no room")
            return
        name = f"checkpoint_{self.index:06d}"
        self.add(
            r.CheckpointCommitted,
            name=name,
            index=self.index,
            iteration=self.iteration,
            generation=self.generation,
            metrics=metrics,
        )
        self.stored[name] = (self.index, self.iteration)
        self.index += 1
        if self.random.random() < 0.1:
            self.forget(name, r.CheckpointDamaged, why="a flipped bit")
        while self.keep is not None and len(self.stored) > self.keep:
            self.forget(min(self.stored), r.CheckpointDeleted)

    def forget(self, name: str, kind: Any, **fields: Any) -> None:
        del self.stored[name]
        self.add(kind, name=name, **fields)


def history(seed: int, controllers: int = 3, reports: int = 40) -> list[list[r.Record]]:
    """The records of each controller."""
    run = _Run(seed)
    for epoch in range(1, controllers + 1):
        run.controller(epoch, reports)
    return run.records
