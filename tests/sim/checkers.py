"""The promises, checked from outside: nothing in here shares code with the core or with the model that it watches.

Each hook is called by the model at the moment something takes effect. `Violation` carries the sentence that is printed
with the command that replays the seed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tests.sim.clock import Violation
from tests.sim.disk import Manifest
from tests.sim.scenario import gain

from holdfast.core import records as r
from holdfast.core.commands import StartWorkers
from holdfast.core.state import Durable

if TYPE_CHECKING:
    from tests.sim.driver import Driver
    from tests.sim.simulation import Simulation

__all__ = ["Checkers", "counted_failures", "reports_that_count"]


def reports_that_count(records: Iterable[r.Record]) -> list[r.Reported]:
    """Reports in the order in which they stand, each new generation taking back what lies beyond its start."""
    counting: list[r.Reported] = []
    for record in records:
        if isinstance(record, r.GenerationStarted):
            counting = [one for one in counting if one.iteration <= record.iteration]
        elif isinstance(record, r.Reported):
            counting.append(record)
    return counting


def counted_failures(records: Iterable[r.Record]) -> int:
    """Failures that count against the budget: a run that had failed for good starts afresh."""
    failures, failed = 0, False
    for record in records:
        if isinstance(record, r.GenerationEnded | r.AgentRemoved) and record.counted:
            failures += 1
        elif isinstance(record, r.RunFailed):
            failed = True
        elif isinstance(record, r.ControllerStarted) and failed:
            failures, failed = 0, False
    return failures


def _until(records: list[r.Record], generation: int) -> list[r.Record]:
    """What was known when the generation was decided on."""
    starts = [
        n for n, one in enumerate(records) if isinstance(one, r.GenerationStarted) and one.generation == generation
    ]
    return records[: starts[0]]


class Checkers:
    """One simulation's watchmen."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        sums = [0]
        for iteration in range(1, sim.scenario.iterations + 1):
            sums.append(sums[-1] + gain(iteration))
        self.sums = sums
        self.acknowledged: set[str] = set()
        """Checkpoints that a controller was told, or saw, to be committed, and that were not let go since."""

    def fail(self, sentence: str) -> None:
        raise Violation(sentence)

    # ------------------------------------------------------------ the core's own state

    def stepped(self, driver: Driver, folded: Durable) -> None:
        """What the core believes is what the records say, but for what only storage can tell."""
        durable = driver.state.durable
        kept = durable.next_index
        durable.next_index = folded.next_index = max(kept, folded.next_index)
        if durable != folded:
            self.fail(f"the durable state {durable} is not the fold of its records {folded}")
        durable.next_index = kept

    # ------------------------------------------------------------ checkpoints

    def committed(self, manifest: Manifest) -> None:
        """A manifest was created: if it counts, it is whole, and no report before it can be lost any more."""
        if manifest not in self.sim.disk.visible():
            return
        wanted = {
            rank: (manifest.iteration, self.sums[manifest.iteration])
            for rank in range(manifest.world_size)
            if self.sim.scenario.gives_part(rank, manifest.world_size)
        }
        if manifest.parts != wanted:
            self.fail(f"{manifest.name} was committed with {manifest.parts} and not {wanted}")
        self._reports_up_to(manifest)

    def _reports_up_to(self, manifest: Manifest) -> None:
        reports = [one for one in reports_that_count(self.sim.disk.records()) if one.iteration <= manifest.iteration]
        self._exactly(reports, manifest.iteration, f"{manifest.name} is committed")

    def _exactly(self, reports: list[r.Reported], last: int, when: str) -> None:
        found = [one.iteration for one in reports]
        if found != list(range(1, last + 1)):
            self.fail(f"{when} and the reports that count are {found}, not 1 to {last}")
        wrong = [one for one in reports if one.metrics.get("sum") != self.sums[one.iteration]]
        if wrong:
            self.fail(f"{when} with metrics of another run: {wrong[0]}")

    def deleting(self, name: str) -> None:
        """Retention may take any but the newest and the pinned, and only what is too much."""
        visible = [one.name for one in self.sim.disk.visible()]
        if name not in visible:
            return
        if name == visible[-1]:
            self.fail(f"{name}, the newest committed checkpoint, is deleted")
        if name in self.sim.disk.pinned:
            self.fail(f"{name} is deleted although it is pinned")
        keep = self.sim.scenario.spec.retention.num_to_keep
        if keep is None or len(visible) <= keep:
            self.fail(f"{name} is deleted although only {len(visible)} checkpoints are there")
        self.acknowledged.discard(name)

    def recorded(self, driver: Driver, records: list[r.Record]) -> None:
        """Nothing is written down as deleted that is still there."""
        visible = {one.name for one in self.sim.disk.visible()}
        for record in records:
            if isinstance(record, r.CheckpointDeleted) and record.name in visible:
                self.fail(f"{record.name} is written down as deleted, and is there")

    def _retention_holds(self, driver: Driver) -> None:
        """At the end nothing is left that the rule lets go, unless storage failed on the way."""
        scenario, disk = self.sim.scenario, self.sim.disk
        keep = scenario.spec.retention.num_to_keep
        troubled = scenario.storage_trouble or any(fault.kind == "outage" for fault in scenario.faults)
        if keep is None or troubled or scenario.pins:
            return
        left = [one.name for one in disk.visible()]
        if len(left) > keep + 1:
            self.fail(f"the run has finished, {keep} checkpoints are to be kept, and {left} are there")

    def nothing_lost(self) -> None:
        """Whatever counted as committed is there, unless retention took it."""
        if lost := self.acknowledged - {one.name for one in self.sim.disk.visible()}:
            self.fail(f"{sorted(lost)} were committed and are not any more")

    def began(self, driver: Driver) -> None:
        """A controller has read the journal: it tells all that led to the newest checkpoint."""
        self.nothing_lost()
        visible = self.sim.disk.visible()
        if visible and driver.epoch == max(self.sim.disk.epochs):
            self.acknowledged |= {one.name for one in visible}
            self._reports_up_to(visible[-1])

    def loaded(self, driver: Driver, name: str, iteration: int) -> tuple[int, int] | None:
        """A worker reads its checkpoint: (iteration, sum); only a fenced driver's may find that it is gone."""
        manifest = self.sim.disk.manifests.get(name)
        if manifest is None or manifest.void:
            if driver.epoch == max(self.sim.disk.epochs):
                self.fail(f"a worker resumes from {name}, which is not there")
            return None
        state = next(iter(manifest.parts.values()))
        if state != (iteration, self.sums[iteration]):
            self.fail(f"a worker that should resume at {iteration} found {state} in {name}")
        return state

    # ------------------------------------------------------------ generations

    def starting(self, driver: Driver, command: StartWorkers) -> None:
        """One live generation, from the newest commit, within the budget, and written down first."""
        for node in driver.nodes.values():
            if alive := [worker.rank for worker in node.workers if worker.alive]:
                self.fail(f"generation {command.generation} starts while {node.name} runs ranks {alive} of an old one")
        records = list(self.sim.disk.records())
        newest_epoch = driver.epoch == max(self.sim.disk.epochs)
        if not newest_epoch:
            return  # its decisions no longer count
        generations = [one.generation for one in records if isinstance(one, r.GenerationStarted)]
        if command.generation not in generations:
            self.fail(f"generation {command.generation} starts before the journal says so")
        if generations != sorted(set(generations)):
            self.fail(f"generations do not increase: {generations}")
        visible = self.sim.disk.visible()
        newest = visible[-1].name if visible else None
        if command.checkpoint != newest:
            self.fail(f"generation {command.generation} starts from {command.checkpoint} and not from {newest}")
        budget, spent = self.sim.scenario.spec.max_failures, counted_failures(_until(records, command.generation))
        if budget >= 0 and spent > budget:
            self.fail(f"generation {command.generation} starts after {spent} failures with a budget of {budget}")

    # ------------------------------------------------------------ the end

    def ended(self, driver: Driver) -> None:
        """The last word of a run that is over."""
        self.nothing_lost()
        records = list(self.sim.disk.records())
        if driver.status == "failed":
            self._justly_failed(driver, records)
        if driver.status == "finished":
            outcomes = [one for one in records if isinstance(one, r.RunFinished)]
            if not outcomes:
                self.fail("the run has finished and its journal does not say so")
            last = self.sim.scenario.iterations
            if outcomes[-1].return_value != self.sums[last]:
                self.fail(f"the run returned {outcomes[-1].return_value}, not {self.sums[last]}")
            self._exactly(reports_that_count(records), last, "the run has finished")
            self._retention_holds(driver)

    def _justly_failed(self, driver: Driver, records: list[r.Record]) -> None:
        outcome = driver.state.durable.outcome
        if not isinstance(outcome, r.RunFailed):
            self.fail("the run failed without a reason")
        assert isinstance(outcome, r.RunFailed)
        budget, spent = self.sim.scenario.spec.max_failures, counted_failures(records)
        if outcome.error_type == "TrainingFailedError":
            if budget < 0 or spent != budget + 1:
                self.fail(f"the run failed after {spent} failures with a budget of {budget}")
        elif not self.sim.excuses or outcome.error.startswith("Only "):
            self.fail(f"the run failed without a cause: {outcome.error}")
