"""The samples of a run: what each rank's elastic loader gives it, and which of them count in the end.

A `Loader` is what `prepare_data_loader(..., elastic=True)` makes of the arithmetic that ships
(`holdfast.train.elastic`): its state travels with the worker's reports, and the next generation begins from the file
that the checkpoint's manifest names. The `SampleLedger` knows what every worker was ever given, and from the journal
alone which of it counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from holdfast.checkpoint.worker_states import WorkerStates
from holdfast.core import records as r
from holdfast.train.elastic import Order, Pass, Progress

__all__ = ["DataSet", "Loader", "SampleLedger"]

_NAME = "loader"
Sample = tuple[int, int]
"""The training epoch, and the position in its order."""
Step = tuple[int, int, int]
"""The controller's epoch, the generation and the iteration."""


@dataclass(frozen=True, slots=True)
class DataSet:
    """What a run trains on, and how it asks for it."""

    size: int
    batch_size: int = 0
    """Of each rank; 0: `global_batch_size` counts."""
    global_batch_size: int = 0
    uneven: bool = False
    """Some ranks take two rounds for a report where others take one, as loops without collectives may."""

    def rounds(self, iteration: int, rank: int) -> int:
        return 1 + (iteration + rank) % 2 if self.uneven else 1


class Loader:
    """One rank's way through the samples."""

    def __init__(self, data: DataSet, rank: int, world_size: int, saved: WorkerStates | None) -> None:
        self._data, self._rank = data, rank
        self._order = Order(size=data.size)
        self._round_size = data.batch_size * world_size or data.global_batch_size
        self._progress = Progress(_NAME, rank, world_size)
        self._pass: Pass | None = None
        if saved is not None:
            self._progress.restore({n: one[_NAME] for n, one in saved.ranks.items()}, saved.world_size)

    def take(self, iteration: int) -> list[Sample]:
        """The samples of this rank that it trains on until it reports the iteration."""
        return [one for _ in range(self._data.rounds(iteration, self._rank)) for one in self._next()]

    def _next(self) -> list[Sample]:
        over = self._pass
        while over is None or over.rounds * self._round_size >= over.left:
            over = self._pass = self._progress.begin(self._order, self._round_size)  # of the next epoch
        found = over.positions(over.rounds)
        over.give(over.share(number=over.rounds))
        return [(over.epoch, position) for position in found]

    def save(self) -> bytes:
        """What goes with a report."""
        return msgspec.json.encode({_NAME: self._progress.save()})


class SampleLedger:
    """What every rank of every generation was given, by the iteration that it reported afterwards."""

    def __init__(self, data: DataSet) -> None:
        self._data = data
        self._given: dict[Step, dict[int, list[Sample]]] = {}

    def add(self, step: Step, rank: int, samples: list[Sample]) -> None:
        self._given.setdefault(step, {})[rank] = samples

    def problem(self, records: Iterable[r.Record], last: int) -> str | None:
        """What is wrong with the samples of the iterations up to `last` that count by these records, if something is:
        each sample once an epoch, and where all ranks take as many rounds, in the one order."""
        steps = _steps_that_count(records)[:last]
        missing = [step for step in steps if step not in self._given]
        if len(steps) < last or missing:
            return f"the samples of {missing or 'some iterations'} are not known"
        seen: dict[int, list[int]] = {}
        for step in steps:
            ranks = self._given[step]
            for epoch, position in sorted(one for samples in ranks.values() for one in samples):
                if not self._data.uneven and len(seen) and epoch < max(seen):
                    return f"iteration {step[2]} goes back to epoch {epoch}"
                seen.setdefault(epoch, []).append(position)
        at = min((max(one, default=(0, 0))[0] for one in self._given[steps[-1]].values()), default=0) if steps else 0
        for epoch in sorted(seen):
            positions = seen[epoch]
            wanted = list(range(self._data.size if epoch < at else len(positions)))
            if len(set(positions)) < len(positions):
                return (
                    f"samples {sorted({one for one in positions if positions.count(one) > 1})} of epoch {epoch} twice"
                )
            if epoch < at and sorted(positions) != wanted:
                return f"of epoch {epoch} only {sorted(positions)}"
            if not self._data.uneven and positions != wanted:
                return f"those of epoch {epoch} in another order: {positions}"
        return None


def _steps_that_count(records: Iterable[r.Record]) -> list[Step]:
    """By iteration, whose report of it counts: a new generation takes back what lies beyond its start."""
    epoch = generation = 0
    steps: list[Step] = []
    for record in records:
        if isinstance(record, r.ControllerStarted):
            epoch = record.epoch
        elif isinstance(record, r.GenerationStarted):
            generation = record.generation
            del steps[record.iteration :]
        elif isinstance(record, r.Reported):
            steps.append((epoch, generation, record.iteration))
    return steps
