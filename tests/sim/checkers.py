"""The promises, checked from outside: nothing in here shares code with what it watches.

Each hook is called at the moment something takes effect: a write to storage, a step of a machine, a command. What
counts as committed or recorded is read from storage (`stored_run`). `Violation` carries the sentence that is printed
with the command that replays the seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

from tests.sim.process import Process
from tests.sim.scenario import gain
from tests.sim.stored_run import StoredManifest, StoredRun

from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.commands import StartWorkers
from holdfast.core.machine import Step
from holdfast.core.state import Durable, fold
from holdfast.wire.messages import AgentMessage, UploadFailed
from holdfast.worker.job import Assignment

if TYPE_CHECKING:
    from tests.sim.driver import Guest
    from tests.sim.node import Node
    from tests.sim.run import Run
    from tests.sim.simulation import Simulation

__all__ = ["Checkers", "Violation", "counted_failures", "reports_that_count"]


class Violation(AssertionError):
    """A promise was broken."""


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


def _id(manifest: StoredManifest) -> tuple[str, str]:
    return manifest.name, manifest.token


class Checkers:
    """One run's watchmen."""

    def __init__(self, sim: Simulation, run: Run) -> None:
        self.sim, self._owner, self.scenario = sim, run, run.scenario
        self.run = StoredRun(sim.bucket, run.name)
        sums = [0]
        for iteration in range(1, run.scenario.iterations + 1):
            sums.append(sums[-1] + gain(iteration, run.number))
        self.sums = sums
        self.acknowledged: set[tuple[str, str]] = set()
        """(name, token) of checkpoints that a controller was told, or saw, to be committed, and that were not let go
        since."""
        self._let_go: set[tuple[str, str]] = set()
        """Those that retention has removed."""
        self._visible: list[StoredManifest] = []
        """What counted as committed after the last write."""
        self._bounds: dict[Guest, tuple[int, int]] = {}
        """How many workers each controller's generations may have, as its records say."""
        self._grown_at: dict[Guest, float] = {}
        """When each controller last ended a generation in order to grow, by its own clock."""
        self._commanded: set[tuple[str, int, int, str]] = set()
        """(driver's address, generation, rank, agent) of the workers that controllers of this run asked for."""

    def fail(self, sentence: str) -> NoReturn:
        self.sim.fail(f"{self._owner.name}: {sentence}" if self.sim.scenario.others else sentence)

    def is_newest(self, guest: Guest) -> bool:
        """Whether the decisions of this driver count."""
        return guest.lease is not None and guest.epoch == max(self.run.epochs())

    # ------------------------------------------------------------ writes

    def wrote(self, process: Process, verb: str) -> None:
        """Something was written that may change what counts as committed."""
        before, now = self._visible, self.run.visible()
        self._visible = now
        remaining = {_id(one) for one in now}
        known = {_id(one) for one in before}
        if verb == "delete":
            for one in before:
                if _id(one) not in remaining:
                    self._deleted(process, one, before)
        for one in now:
            if _id(one) not in known:
                self._committed(one)

    def _committed(self, manifest: StoredManifest) -> None:
        """A manifest was created and counts: it is whole, and no report before it can be lost any more."""
        if problem := self.run.problem_with(manifest):
            self.fail(f"{manifest.name} was committed and {problem}")
        wanted = {
            rank: (manifest.iteration, self.sums[manifest.iteration])
            for rank in range(manifest.world_size)
            if self.scenario.gives_part(rank, manifest.world_size)
        }
        found = self.run.states(manifest)
        if self.scenario.whole_parts and found:  # one of them would do
            wanted = {rank: state for rank, state in wanted.items() if rank in found}
        if found != wanted:
            self.fail(f"{manifest.name} was committed with {found} and not {wanted}")
        self._reports_up_to(manifest)

    def _reports_up_to(self, manifest: StoredManifest) -> None:
        reports = [one for one in reports_that_count(self.run.records()) if one.iteration <= manifest.iteration]
        self._exactly(reports, manifest.iteration, f"{manifest.name} is committed")

    def _exactly(self, reports: list[r.Reported], last: int, when: str) -> None:
        found = [one.iteration for one in reports]
        if found != list(range(1, last + 1)):
            self.fail(f"{when} and the reports that count are {found}, not 1 to {last}")
        wrong = [one for one in reports if one.metrics.get("sum") != self.sums[one.iteration]]
        if wrong:
            self.fail(f"{when} with metrics of another run: {wrong[0]}")

    def _deleted(self, process: Process, manifest: StoredManifest, visible: list[StoredManifest]) -> None:
        """Retention may take any but the newest and the pinned, and only what is too much; and only a controller that
        counts may take anything.

        Between the last look and the deletion nothing can be noticed: a pin or a takeover that came after that look is
        excused."""
        name = manifest.name
        keys = self.sim.bucket.versions
        epochs = f"{self._owner.name}/epochs"
        newest_epoch = max(self.run.epochs())
        guest = self.sim.guest_of(process, self._owner)
        if guest is None:
            self.fail(f"{name} was deleted by {process.name}, which is no controller")
        if guest.epoch < newest_epoch:
            if not 0 < process.looked_at(epochs) < keys[f"{epochs}/{newest_epoch:06d}.json"]:
                self.fail(f"{name} is deleted by {process.name}, which could know that it is fenced")
            self._let(manifest)
            return
        if name == visible[-1].name:
            self.fail(f"{name}, the newest committed checkpoint, is deleted")
        pin = f"{self._owner.name}/{name}/.pinned.json"
        if self.run.is_pinned(name) and not 0 < process.looked_at(pin) < keys[pin]:
            self.fail(f"{name} is deleted although it is pinned")
        keep = self.scenario.spec.retention.num_to_keep
        if keep is None or len(visible) <= keep:
            self.fail(f"{name} is deleted although only {len(visible)} checkpoints are there")
        self._let(manifest)

    def _let(self, manifest: StoredManifest) -> None:
        self.acknowledged.discard(_id(manifest))
        self._let_go.add(_id(manifest))

    def nothing_lost(self) -> None:
        """Whatever counted as committed is there, unless retention took it."""
        if lost := self.acknowledged - {_id(one) for one in self.run.visible()}:
            self.fail(f"{sorted(lost)} were committed and are not any more")

    # ------------------------------------------------------------ a controller begins

    def read_history(self, guest: Guest, durable: Durable) -> None:
        """A controller has read the journal, with the lease held: it has what the records say."""
        folded = Durable()
        for record in self.run.records():
            fold(folded, record)
        if self.is_newest(guest) and durable != folded:
            self.fail(f"the history that was read gives {durable} and not {folded}")

    def began(self, guest: Guest) -> None:
        """A controller has the run now: its journal tells all that led to the newest checkpoint."""
        self.nothing_lost()
        visible = self.run.visible()
        if visible and self.is_newest(guest):
            self.acknowledged |= {_id(one) for one in visible}
            self._reports_up_to(visible[-1])

    # ------------------------------------------------------------ steps

    def stepped(self, guest: Guest, event: e.Event, decided: Step, folded: Durable) -> None:
        """What the core believes is what the records say, but for what only storage can tell."""
        assert guest.controller is not None
        durable = guest.controller.durable
        kept = durable.next_index
        durable.next_index = folded.next_index = max(kept, folded.next_index)
        if durable != folded:
            self.fail(f"the durable state {durable} is not the fold of its records {folded}")
        durable.next_index = kept
        if isinstance(event, e.StorageLost) and event.error.startswith("internal error"):
            self.fail(event.error)
        if isinstance(event, e.CheckpointStored):
            told = (event.stored.name, event.stored.token)
            if told not in self._let_go:  # by a successor, while this controller stood still
                self.acknowledged.add(told)
            self.nothing_lost()
        if isinstance(event, e.AgentLost):
            self.sim.moment("lost")
        for record in decided.records:
            if isinstance(record, r.CheckpointDeleted) and record.name in {one.name for one in self.run.visible()}:
                self.fail(f"{record.name} is written down as deleted, and is there")
        for record in decided.records:
            if isinstance(record, r.GenerationEnded) and record.planned:
                self._changed(guest, record, folded)
            elif isinstance(record, r.BoundsChanged):
                self._bounds[guest] = record.workers_min, record.workers_max
                self._grown_at.pop(guest, None)  # who asks for more need not wait
            elif isinstance(record, r.GenerationStarted):
                spec = self.scenario.spec
                fewest, most = self._bounds.get(guest, (spec.workers_min, spec.workers_max))
                if not fewest <= record.world_size <= most:
                    self.fail(f"a world of {record.world_size} is not within {fewest} to {most}")
        if isinstance(event, e.ControllerBegan) and self.is_newest(guest):
            self._keeps_bounds(guest)
        self._gave_up(decided)

    def _keeps_bounds(self, guest: Guest) -> None:
        """A controller has begun: the bounds that were set last hold."""
        found = [one for one in self.run.records() if isinstance(one, r.BoundsChanged)]
        wanted = (found[-1].workers_min, found[-1].workers_max) if found else None
        if self._bounds.get(guest) != wanted:
            self.fail(f"the bounds are {self._bounds.get(guest)} and were set to {wanted}")

    def _changed(self, guest: Guest, ended: r.GenerationEnded, folded: Durable) -> None:
        """A planned change loses no step, but at a deadline, and does not follow another that made the world larger."""
        if ended.counted:
            self.fail(f"a planned change was counted as a failure: {ended.why}")
        if not ended.why.endswith("its time is up") and self.scenario.never_loses_planned:
            newest = folded.resume_point()
            kept = newest.iteration if newest is not None else 0
            if kept != ended.iteration:
                self.fail(f"a planned change at iteration {ended.iteration} goes on from {kept}: {ended.why}")
        if ended.why.startswith("there is room"):
            settle_s = self.scenario.spec.resize_settle_s
            before = self._grown_at.get(guest, ended.at - settle_s)
            if ended.at < before + settle_s:
                self.fail(f"the run grew twice within {settle_s} s, at {before} and {ended.at}")
            self._grown_at[guest] = ended.at

    def _gave_up(self, decided: Step) -> None:
        """Only what a rank did not hold in full is given up with its generation, or what lacks reports of rank 0."""
        reached = [one.iteration for one in decided.records if isinstance(one, r.GenerationEnded)]
        given_up = [one for one in decided.records if isinstance(one, r.CheckpointAbandoned)]
        for record in given_up:
            held = "before every rank" in record.why
            if held and self.scenario.whole_parts and reached and record.iteration <= reached[0] + 1:
                self.fail(f"iteration {record.iteration} was given up although a rank held all of it")

    # ------------------------------------------------------------ generations

    def starting(self, guest: Guest, command: StartWorkers) -> None:
        """One live generation, from the newest commit, within the budget, and written down first."""
        for place in command.places:
            self._commanded |= {(guest.address, command.generation, rank, place.agent) for rank in place.ranks}
            node = self.sim.nodes[place.agent]
            if alive := [worker.rank for worker in node.workers if worker.alive and worker.run is self._owner]:
                self.fail(f"generation {command.generation} starts while {node.name} runs ranks {alive} of an old one")
        if not self.is_newest(guest):
            return  # its decisions no longer count
        records = self.run.records()
        generations = [one.generation for one in records if isinstance(one, r.GenerationStarted)]
        if command.generation not in generations:
            self.fail(f"generation {command.generation} starts before the journal says so")
        if generations != sorted(set(generations)):
            self.fail(f"generations do not increase: {generations}")
        visible = self.run.visible()
        newest = visible[-1].name if visible else None
        if command.checkpoint != newest:
            self.fail(f"generation {command.generation} starts from {command.checkpoint} and not from {newest}")
        budget, spent = self.scenario.spec.max_failures, counted_failures(_until(records, command.generation))
        if budget >= 0 and spent > budget:
            self.fail(f"generation {command.generation} starts after {spent} failures with a budget of {budget}")

    def loaded(self, order: StartWorkers, state: tuple[int, int]) -> None:
        """A worker has read its checkpoint."""
        if state != (order.iteration, self.sums[order.iteration]):
            self.fail(f"a worker that should resume at {order.iteration} found {state} in {order.checkpoint}")

    def not_loaded(self, node: Node, order: StartWorkers, error: Exception) -> None:
        """Only a fenced controller's workers may find that their checkpoint is gone."""
        guest = self.sim.guest_at(node.endpoint.address, self._owner)
        if guest.driver.process.is_alive and self.is_newest(guest):
            self.fail(f"a worker cannot resume from {order.checkpoint}: {error}")

    # ------------------------------------------------------------ agents

    def spawned(self, node: Node, assignment: Assignment) -> None:
        """A worker is started: nothing of another generation lives there, and its own was not stopped."""
        mine = (assignment.generation, assignment.rank)
        address = node.endpoint.address
        if (assignment.run, *mine) in node.spawned:
            self.fail(f"{node.name} starts {mine} twice")
        node.spawned.add((assignment.run, *mine))
        for worker in node.workers:
            if worker.run is self._owner and (worker.generation != mine[0] or worker.rank == mine[1]):
                self.fail(f"{node.name} starts {mine} while {worker.generation, worker.rank} lives")
        if (assignment.run, assignment.generation) in node.stopped:
            self.fail(f"{node.name} starts a worker of generation {mine[0]}, which it has told is stopped")
        if (address, *mine, node.name) not in self._commanded:
            self.fail(f"{node.name} starts {mine}, which no controller of the run has asked for")
        if node.slots and len(node.workers) >= node.slots:
            self.fail(f"{node.name} starts a worker beside {len(node.workers)} on {node.slots} slots")
        for other in self.sim.nodes.values():
            if other.endpoint.address == address and other.is_connected:
                twins = [one for one in other.workers if one.run is self._owner and one.rank == mine[1] and one.alive]
                if twins:
                    self.fail(f"{node.name} starts {mine} while {other.name} runs {twins[0].generation, mine[1]}")

    def sent(self, node: Node, message: AgentMessage) -> None:
        """An agent sends this to its controller."""
        guest = self.sim.guest_at(node.endpoint.address, self._owner)
        awaited = (
            isinstance(message, UploadFailed) and guest.controller is not None and guest.controller.awaits(message)
        )
        if isinstance(message, UploadFailed) and awaited and "gave this agent no checkpoint" in message.error:
            self.fail(f"{node.name} does not hold a part that a worker gave it: {message.error}")
        if isinstance(message, e.WorkersStopped):
            own = [worker for worker in node.workers if worker.run is self._owner]
            left = [worker.rank for worker in own if worker.generation <= message.generation]
            if left:
                self.fail(f"{node.name} tells that generation {message.generation} is stopped, and ranks {left} live")

    def agent_ended(self, node: Node) -> None:
        """An agent whose controller died ends by itself: of each upload that was ordered there is a part record, or its
        draft is not open any more; unless storage failed, or time was up."""
        scenario, lost_at = self.sim.scenario, node.lost_controller_at
        troubled = scenario.storage_trouble or scenario.storage_fatal or self.sim.excuses & {"outage", "storage"}
        if lost_at is None or troubled or self.sim.loop.time() - lost_at > node.linger_s:
            return
        for one in node.ordered(self._owner):
            order = one.order
            if self.run.is_open(order.draft.name, order.draft.token) and not self.run.has_part(
                order.draft.name, order.draft.token, order.rank
            ):
                self.fail(f"{node.name} ends, and has left no record of rank {order.rank} of {order.draft.name}")

    # ------------------------------------------------------------ the end

    def ended(self, guest: Guest) -> None:
        """The last word of a run that is over."""
        self.nothing_lost()
        self._only_own_files()
        records = self.run.records()
        if guest.status == "failed":
            self._justly_failed(guest, records)
        if guest.status == "finished":
            outcomes = [one for one in records if isinstance(one, r.RunFinished)]
            if not outcomes:
                self.fail("the run has finished and its journal does not say so")
            last = self.scenario.iterations
            if outcomes[-1].return_value != self.sums[last]:
                self.fail(f"the run returned {outcomes[-1].return_value}, not {self.sums[last]}")
            self._exactly(reports_that_count(records), last, "the run has finished")
            self._retention_holds()
            self._undisturbed(records)

    def _only_own_files(self) -> None:
        """Whatever workers stored in the run's directory, committed or not, is of this run."""
        bucket = self.sim.bucket
        for key in bucket.below(self._owner.name):
            data = bucket.objects[key]
            if not key.rpartition("/")[2].startswith("rank_") or not data.endswith(b"}"):
                continue  # no state, or torn
            if (found := json.loads(data)["run"]) != self._owner.name:
                self.fail(f"{key} was written for {found}")

    def _undisturbed(self, records: list[r.Record]) -> None:
        """A run that no fault struck was trained by one generation, whatever became of others."""
        scenario = self.sim.scenario
        troubled = scenario.storage_trouble or scenario.repeats or self.sim.excuses
        starts = [one for one in records if isinstance(one, r.GenerationStarted)]
        if self.scenario.poison or self.scenario.spec.progress_timeout_s is not None:
            return  # it may have failed by itself, or was slow
        if self.scenario.spec.workers_min < self.scenario.spec.workers_max:
            return  # it may have grown
        if not self._owner.disturbed and not troubled and len(starts) != 1:
            self.fail(f"no fault struck the run, and it needed {len(starts)} generations")

    def _retention_holds(self) -> None:
        """At the end nothing is left that the rule lets go, unless storage failed on the way."""
        scenario = self.sim.scenario
        keep = self.scenario.spec.retention.num_to_keep
        troubled = scenario.storage_trouble or any(fault.kind == "outage" for fault in scenario.faults)
        if keep is None or troubled or self.scenario.pins:
            return
        left = [one.name for one in self.run.visible()]
        if len(left) > keep + 1:
            self.fail(f"the run has finished, {keep} checkpoints are to be kept, and {left} are there")

    def _justly_failed(self, guest: Guest, records: list[r.Record]) -> None:
        assert guest.controller is not None
        outcome = guest.controller.durable.outcome
        if not isinstance(outcome, r.RunFailed):
            self.fail("the run failed without a reason")
        budget, spent = self.scenario.spec.max_failures, counted_failures(records)
        if outcome.error_type == "TrainingFailedError":
            if self.is_newest(guest) and (budget < 0 or spent != budget + 1):
                self.fail(f"the run failed after {spent} failures with a budget of {budget}")
        elif not self.sim.excuses or outcome.error.startswith("Only "):
            self.fail(f"the run failed without a cause: {outcome.error}")
