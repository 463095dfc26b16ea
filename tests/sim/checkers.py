"""The promises, checked from outside: nothing in here shares code with what it watches.

Each hook is called at the moment something takes effect: a write to storage, a step of a machine, a command. What
counts as committed or recorded is read from storage (`stored_run`). `Violation` carries the sentence that is printed
with the command that replays the seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

from blake3 import blake3
from tests.sim.data import SampleLedger
from tests.sim.process import Process
from tests.sim.scenario import gain
from tests.sim.stored_run import StoredManifest, StoredRun

from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.checkpoint_types import ValidationStatus
from holdfast.core.commands import SetHostAside, StartWorkers, StopWorkers
from holdfast.core.machine import Step
from holdfast.core.state import Durable, fold
from holdfast.wire.messages import AgentMessage, UploadFailed
from holdfast.worker.job import Assignment

if TYPE_CHECKING:
    from tests.sim.driver import Guest
    from tests.sim.node import Node
    from tests.sim.run import Run
    from tests.sim.simulation import Simulation
    from tests.sim.worker import Worker

__all__ = ["Checkers", "Violation", "counted_failures", "reports_that_count"]


_ROUNDING_S = 1e-6
_TURN_S = 2.0
"""So long a controller may take for what else it does: it writes records before it looks at the clock again."""
_SLOWING = ("pause_driver", "overtake", "outage")
_FAILURES = 3
"""So many failures of a host within ten minutes are too many; no simulation takes that long."""


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
        self._generations: dict[Guest, r.GenerationStarted] = {}
        """The one that each controller started last."""
        self._room_since: dict[Guest, float] = {}
        """Since when its agents have had room for a larger one, by its own clock."""
        self._joined_at: dict[Guest, float] = {}
        """When an agent joined last, by its own clock."""
        self._stopping: set[Guest] = set()
        """Those that have ended it, and wait for its workers."""
        self._need_not_wait: set[Guest] = set()
        """Those of which somebody has asked for other bounds since they started it."""
        self._stops: dict[Guest, tuple[float, float, bool]] = {}
        """Of each controller that was asked to stop: when, how long it may take, and whether its function asks."""
        self._blamed: dict[Guest, list[tuple[float, str]]] = {}
        """When a generation of a controller failed because of a machine, and on which host."""
        self._aside: dict[tuple[Guest, str], float] = {}
        """Until when a controller may use a host no more."""
        self._leading = 0
        """The newest epoch whose controller has begun."""
        self._commanded: set[tuple[str, int, int, str]] = set()
        """(driver's address, generation, rank, agent) of the workers that controllers of this run asked for."""

        self._samples = SampleLedger(run.scenario.data) if run.scenario.data is not None else None

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
                self._by_the_leader(process, one)

    def _by_the_leader(self, process: Process, manifest: StoredManifest) -> None:
        """Once a controller has begun, nobody before it adds a checkpoint that counts; putting one back that was pinned
        while it was being removed adds none."""
        if _id(manifest) in self._let_go and self.run.is_pinned(manifest.name):
            return
        guest = self.sim.guest_of(process, self._owner)
        if guest is not None and guest.lease is not None and guest.epoch < self._leading:
            name = manifest.name
            self.fail(f"{name} of controller {guest.epoch} counts, and was committed after {self._leading} had begun")

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
        if self._samples is not None and (problem := self._samples.problem(self.run.records(), last)) is not None:
            self.fail(f"{when} and ranks consumed {problem}")

    def took(self, worker: Worker, iteration: int, samples: list[tuple[int, int]]) -> None:
        """A rank trains on these before it reports the iteration."""
        assert self._samples is not None
        epoch = self.sim.guest_at(worker.node.endpoint.address, self._owner).epoch
        self._samples.add((epoch, worker.generation, iteration), worker.rank, samples)

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
        self._leading = max(self._leading, guest.epoch)
        visible = self.run.visible()
        if visible and self.is_newest(guest):
            self.acknowledged |= {_id(one) for one in visible}
            self._reports_up_to(visible[-1])

    # ------------------------------------------------------------ steps

    def stepped(self, guest: Guest, event: e.Event, decided: Step, folded: Durable, now: float) -> None:
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
        if isinstance(event, e.AgentJoined) and guest not in self._stopping:
            self._joined_at[guest] = now
        if isinstance(event, e.StopRequested):
            self._asked_to_stop(guest, event, folded, now)
        for record in decided.records:
            if isinstance(record, r.CheckpointDeleted) and record.name in {one.name for one in self.run.visible()}:
                self.fail(f"{record.name} is written down as deleted, and is there")
        for record in decided.records:
            if isinstance(record, r.GenerationEnded):
                self._generation_ended(guest, record, folded)
            elif isinstance(record, r.BoundsChanged):
                self._bounds[guest] = record.workers_min, record.workers_max
                self._need_not_wait.add(guest)  # who asks for more need not wait
            elif isinstance(record, r.GenerationStarted):
                self._generation_started(guest, record)
        self._watch_room(guest, decided, now)
        self._sets_aside_in_time(guest, decided)
        if isinstance(event, e.ControllerBegan) and self.is_newest(guest):
            self._keeps_bounds(guest)
        self._gave_up(decided)

    def _most(self, guest: Guest) -> tuple[int, int]:
        spec = self.scenario.spec
        return self._bounds.get(guest, (spec.workers_min, spec.workers_max))

    def _generation_started(self, guest: Guest, started: r.GenerationStarted) -> None:
        fewest, most = self._most(guest)
        if not fewest <= started.world_size <= most:
            self.fail(f"a world of {started.world_size} is not within {fewest} to {most}")
        if guest in self._stops:
            self.fail(f"generation {started.generation} starts although the run was asked to stop")
        self._generations[guest] = started
        self._room_since.pop(guest, None)
        self._need_not_wait.discard(guest)
        self._stopping.discard(guest)

    def _watch_room(self, guest: Guest, decided: Step, now: float) -> None:
        """What counts is what there was when it was decided to stop a generation."""
        assert guest.controller is not None
        started = self._generations.get(guest)
        if any(isinstance(one, StopWorkers) for one in decided.commands):
            self._stopping.add(guest)
        if guest in self._stopping:
            return
        if started is None or min(guest.controller.room(), self._most(guest)[1]) <= started.world_size:
            self._room_since.pop(guest, None)
        else:
            self._room_since.setdefault(guest, now)

    def _generation_ended(self, guest: Guest, ended: r.GenerationEnded, folded: Durable) -> None:
        if ended.planned:
            self._changed(guest, ended, folded)
        if ended.counted and self.sim.scenario.only_announced:
            self.fail(f"only announced things happened, and that was counted as a failure: {ended.why}")
        if ended.preemption is not None and ended.planned and not ended.why.endswith("its time is up"):
            self.fail(f"no step was lost, and that was counted as a preemption: {ended.why}")
        if guest in self._stops and not ended.failures:
            self._stopped(ended, folded, *self._stops[guest])
        if ended.counted:
            self._blame(guest, ended)

    # ------------------------------------------------------------ stops

    def _asked_to_stop(self, guest: Guest, asked: e.StopRequested, folded: Durable, now: float) -> None:
        """The user pressed Ctrl+C. What the function has asked, its controller knows once there was a report."""
        started = self._generations.get(guest)
        trains = started is not None and folded.iteration > started.iteration
        known = self._stops.get(guest, (now, asked.grace_s, self.scenario.asks and trains))
        self._stops[guest] = (known[0], 0.0 if asked.force else known[1], known[2])

    def _stopped(self, ended: r.GenerationEnded, folded: Durable, asked_at: float, grace_s: float, asks: bool) -> None:
        """A stop waits for a last checkpoint of a function that asks whether to make one, and no longer than it may."""
        slow = any(fault.kind in _SLOWING for fault in self.sim.scenario.faults)
        if ended.detected_at > asked_at + grace_s + _TURN_S and not slow:
            self.fail(
                f"the run was asked to stop at {asked_at:.3f}, within {grace_s} s, and did at {ended.detected_at}"
            )
        newest = folded.resume_point()
        kept = newest.iteration if newest is not None else 0
        trains = ended.iteration < self.scenario.iterations  # not if it only waits for validations
        if asks and trains and kept != ended.iteration and ended.detected_at < asked_at + grace_s - _ROUNDING_S:
            self.fail(f"the run stopped at iteration {ended.iteration} with {kept} kept, before its grace was over")

    # ------------------------------------------------------------ hosts

    def _blame(self, guest: Guest, ended: r.GenerationEnded) -> None:
        """A generation failed: where, if it was a machine's fault for all that is known."""
        nodes = [self.sim.nodes[one.agent] for one in ended.failures if one.agent and one.error_type is None]
        hosts = {node.process.host for node in nodes}
        raised = any(one.error_type is not None and "closed by peer" not in (one.error or "") for one in ended.failures)
        if hosts:
            is_clear = len(hosts) == 1 and not raised
            self._blamed.setdefault(guest, []).append((ended.at, hosts.pop() if is_clear else ""))

    def _sets_aside_in_time(self, guest: Guest, decided: Step) -> None:
        """Three failures of a host are enough, and fewer are not."""
        commands = [one for one in decided.commands if isinstance(one, SetHostAside)]
        for command in commands:
            blamed = self._blamed.get(guest, [])
            if sum(host in (command.host, "") for _, host in blamed) < _FAILURES:
                self.fail(f"{command.host} is set aside after {blamed}")
            blamed[:] = [one for one in blamed if one[1] not in (command.host, "")]
        for host in {host for _, host in self._blamed.get(guest, ()) if host}:
            if sum(one == host for _, one in self._blamed[guest]) >= _FAILURES:
                self.fail(f"{host} is not set aside after {self._blamed[guest]}")

    def sets_aside(self, guest: Guest, command: SetHostAside) -> None:
        """A controller is about to set a host aside."""
        assert guest.controller is not None
        if guest.controller.ready_elsewhere(command.host) >= self._most(guest)[0]:
            self._aside[guest, command.host] = self.sim.loop.time() + command.duration_s

    def _keeps_bounds(self, guest: Guest) -> None:
        """A controller has begun: the bounds that were set last hold."""
        found = [one for one in self.run.records() if isinstance(one, r.BoundsChanged)]
        wanted = (found[-1].workers_min, found[-1].workers_max) if found else None
        if self._bounds.get(guest) != wanted:
            self.fail(f"the bounds are {self._bounds.get(guest)} and were set to {wanted}")

    def _changed(self, guest: Guest, ended: r.GenerationEnded, folded: Durable) -> None:
        """A planned change loses no step, but at a deadline. Whoever joins and goes makes no more than one of them in a
        settling time."""
        if ended.counted:
            self.fail(f"a planned change was counted as a failure: {ended.why}")
        if not ended.why.endswith("its time is up") and self.scenario.never_loses_planned:
            newest = folded.resume_point()
            kept = newest.iteration if newest is not None else 0
            if kept != ended.iteration:
                self.fail(f"a planned change at iteration {ended.iteration} goes on from {kept}: {ended.why}")
        if ended.why.startswith("there is room") and guest not in self._need_not_wait:
            settle_s, started = self.scenario.spec.resize_settle_s, self._generations[guest]
            quiet_since = min(self._room_since.get(guest, ended.detected_at), self._joined_at[guest])
            had_s = ended.detected_at - max(quiet_since, started.at)
            if had_s < settle_s - _ROUNDING_S:
                self.fail(f"the run grew {had_s:.3f} s after the last change, or after agents joined, not {settle_s} s")

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
            host = self.sim.nodes[place.agent].process.host
            if self._aside.get((guest, host), 0.0) > self.sim.loop.time():
                self.fail(f"generation {command.generation} starts on {place.agent}, on {host}, which is set aside")
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

    def gives(self, name: str, token: str, path: str, data: bytes) -> None:
        """An agent has this in memory, and gives it to another as a file of the checkpoint of this token."""
        for manifest in self.run.manifests():
            wanted = {one: digest for one, _, digest, _ in manifest.files if manifest.token == token}
            if path in wanted and wanted[path] != blake3(data).hexdigest():
                self.fail(f"{name} gives what is not {path} of {manifest.name}")

    def not_loaded(self, node: Node, order: StartWorkers, error: Exception) -> None:
        """Only a fenced controller's workers may find that their checkpoint is gone."""
        guest = self.sim.guest_at(node.endpoint.address, self._owner)
        if guest.driver.process.is_alive and self.is_newest(guest):
            self.fail(f"a worker cannot resume from {order.checkpoint}: {error}")

    # ------------------------------------------------------------ agents

    def validates(self, node: Node, assignment: Assignment) -> None:
        """A validation begins: of a checkpoint that counted as committed, and of which its report asked for it."""
        guest = self.sim.guest_at(node.endpoint.address, self._owner)
        name = assignment.checkpoint
        if assignment.run in node.validated:
            self.fail(f"{node.name} starts validation {assignment.run} twice")
        node.validated.add(assignment.run)
        known = [one for one in self.run.manifests() if one.name == name and not one.void]
        asked = [one for one in known if self.scenario.validation(one.iteration) is not None]
        if known and not asked and self.is_newest(guest):
            self.fail(f"{name} is validated, and nobody asked for it")

    def _validations(self, guest: Guest, records: list[r.Record]) -> None:
        """Each checkpoint that asked for it was scored once in effect, whatever crashed, and the score is its own."""
        outcomes: dict[tuple[str, str], r.CheckpointValidated] = {}
        for record in records:
            if isinstance(record, r.CheckpointValidated):
                if (key := (record.name, record.token)) in outcomes:
                    self.fail(f"{record.name} was scored twice")
                outcomes[key] = record
        assert guest.controller is not None
        for manifest in self.run.visible():
            outcome = outcomes.get(_id(manifest))
            if (outcome is None) != (self.scenario.validation(manifest.iteration) is None):
                self.fail(f"{manifest.name} of iteration {manifest.iteration} has the validation {outcome}")
            if outcome is None:
                continue
            score = self.sums[manifest.iteration]
            wanted = {"score": score} if outcome.status is ValidationStatus.VALIDATED else {}
            metrics = guest.controller.durable.checkpoints[manifest.name].metrics
            if outcome.metrics != wanted or metrics.get("score") != wanted.get("score"):
                self.fail(f"{manifest.name} was scored with {outcome.metrics}, has {metrics}, and not {wanted}")
            if metrics.get("sum") != score:
                self.fail(f"{manifest.name} has lost the metrics of its report: {metrics}")

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
        if isinstance(message, e.WorkerExited) and "internal error" in message.failure.cause:
            self.fail(f"{node.name} failed: {message.failure.cause}")
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
            if self.scenario.validates and guest.controller is not None:
                self._validations(guest, records)

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
        if outcome.preemption is not None:
            allowed = self.scenario.spec.max_preemption_failures
            taken = sum(isinstance(one, r.GenerationEnded) and one.preemption is not None for one in records)
            if self.is_newest(guest) and (allowed < 0 or taken <= allowed):
                self.fail(f"the run failed after {taken} preemptions with a budget of {allowed}")
        elif outcome.error_type == "TrainingFailedError":
            if self.is_newest(guest) and (budget < 0 or spent != budget + 1):
                self.fail(f"the run failed after {spent} failures with a budget of {budget}")
        elif not self.sim.excuses or outcome.error.startswith("Only "):
            self.fail(f"the run failed without a cause: {outcome.error}")
