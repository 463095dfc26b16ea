"""The driver: a model of the controller's shell around the real core.

It keeps the shell's promises and no others: one event at a time into `machine.step`, records durable before
commands run, events that arrive during a flush taken together afterwards, records without commands flushed within a
second. Killing it loses everything that is not on `Disk`.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from tests.sim.node import Fabric, Node
from tests.sim.persisting import Persisting
from tests.sim.removing import Removing

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import machine
from holdfast.core import records as r
from holdfast.core.invariants import Monitor
from holdfast.core.state import Durable, State, fold

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

__all__ = ["Driver"]

_NEEDS_NO_JOURNAL = (c.StopWorkers, c.AnnounceCheckpoint, c.EndRun)


class Driver:
    """One process that called `fit()`."""

    durable_first = True
    """Mutants set this to False: commands then run before their records are durable."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.clock = sim, sim.clock
        self.alive, self.status = True, ""
        self.epoch = sim.disk.take_epoch()
        self.name = f"driver-{self.epoch}"
        self.nodes: dict[str, Node] = {}
        self.state = State(sim.scenario.spec)
        self._events: deque[e.Event] = deque()
        self._old: list[e.Event] = []
        self._unsaved: list[r.Record] = []
        self._busy = False
        self._journal_lost = False
        self._timer = 0
        self.clock.say(self.name, "takes the lease")
        sim.moment("leased")
        self._pause(self._set_floor)

    # ------------------------------------------------------------ taking the run on

    def _pause(self, then: object, *arguments: object) -> None:
        self.clock.after(self.clock.delay_s(self.sim.scenario.storage_s), self._go_on, then, arguments)

    def _go_on(self, then: object, arguments: tuple[object, ...]) -> None:
        if self.alive:
            then(*arguments)  # type: ignore[operator]

    def _set_floor(self) -> None:
        self.sim.disk.close_unsettled(self.epoch)
        self._pause(self._look)

    def _look(self) -> None:
        self._pause(self._look_again, self.sim.disk.next_index())

    def _look_again(self, floor: int) -> None:
        """The journal after the indices: whatever was reserved below the floor is told in what is read of it."""
        self._pause(self._fence, floor, self.sim.disk.lengths(self.epoch))

    def _fence(self, floor: int, cuts: dict[int, int]) -> None:
        if not self.sim.disk.settle(self.epoch, floor, cuts):
            self.end("fenced")
            return
        self.sim.checkers.nothing_lost()
        self._pause(self._seal, floor)

    def _seal(self, floor: int) -> None:
        self.sim.disk.seal(self.epoch, floor)
        self._pause(self._begin, floor)

    def _begin(self, floor: int) -> None:
        disk = self.sim.disk
        for record in disk.records():
            fold(self.state.durable, record)
        self.sim.checkers.began(self)
        self._shadow = Durable()
        for record in disk.records():
            fold(self._shadow, record)
        self._monitor = Monitor(self.state)
        stored = tuple(one.stored() for one in disk.visible())
        began = e.ControllerBegan(
            epoch=self.epoch,
            host="host",
            pid=self.epoch,
            stored=stored,
            pinned=tuple(disk.pinned),
            next_index=floor,
        )
        self.clock.after(self.clock.delay_s(3.0), self._beat)
        self.post(began)

    def _beat(self) -> None:
        """The lease is looked at every few seconds."""
        if self.alive:
            if max(self.sim.disk.epochs) > self.epoch:
                self.post(e.ControllerFenced(why="a newer controller took over"))
            else:
                self.clock.after(self.clock.delay_s(3.0), self._beat)

    # ------------------------------------------------------------ events in

    def hear(self, node: Node, event: e.Event) -> None:
        """A message from a node; to be safe, some are heard twice, or again when they are stale."""
        if self.nodes.get(node.name) is not node:
            return
        self.post(event)
        if isinstance(event, e.AgentJoined):
            node.joined = True
            return
        scenario = self.sim.scenario
        if self.clock.happens(scenario.repeats):
            self.post(event)
        generation = getattr(event, "generation", None)
        if generation is not None and scenario.repeats:
            self._old.append(event)
            stale = self.clock.chance.choice(self._old)
            if stale.generation < self.state.durable.generation:  # type: ignore[union-attr]
                self.post(stale)

    def lose(self, node: Node, why: str) -> None:
        """The connection to a node is gone."""
        if self.nodes.get(node.name) is node:
            del self.nodes[node.name]
            node.cut_at = min(node.cut_at, self.clock.now)
            self.sim.moment("lost")
            if node.joined:
                self.post(e.AgentLost(agent=node.name, why=why))
            else:
                self.sim.excuses.add("refusals")
                self.post(e.AgentUnavailable(slots=node.slots, why=why))

    def post(self, event: e.Event) -> None:
        if self.alive:
            self._events.append(event)
            if not self._busy:
                self._busy = True
                self.clock.after(0.0, self._turn)

    # ------------------------------------------------------------ deciding

    def _turn(self) -> None:
        """All that was heard, then one flush, then what was decided."""
        if not self.alive:
            return
        commands: list[c.Command] = []
        while self._events:
            commands.extend(self._step(self._events.popleft()))
        if not commands:
            if self._unsaved:
                self.clock.after(self.sim.scenario.flush_s, self._flush_later)
            self._rest()
        elif any(isinstance(one, c.EndRun) and one.status == "fenced" for one in commands) or self._journal_lost:
            self._do_all(commands)
        elif self.durable_first:
            self._flush(commands, self.clock.now + self.sim.scenario.patience_s)
        else:
            self._do_all(commands)
            self.clock.after(self.sim.scenario.flush_s, self._flush_later)

    def _step(self, event: e.Event) -> list[c.Command]:
        decided = machine.step(self.state, event, self.clock.now)
        if self.clock.tracing:
            self.clock.say(self.name, "%s -> %s", event, [type(one).__name__ for one in decided.commands])
        self._monitor.after(decided, self.clock.now)
        for record in decided.records:
            fold(self._shadow, record)
        self.sim.checkers.stepped(self, self._shadow)
        self.sim.checkers.recorded(self, decided.records)
        self._unsaved.extend(decided.records)
        return decided.commands

    def _rest(self) -> None:
        self._busy = False
        if self._events:
            self._busy = True
            self.clock.after(0.0, self._turn)
            return
        due = machine.deadline(self.state)
        self._timer += 1
        if due is not None and due != math.inf:
            self.clock.at(due, self._ring, self._timer)

    def _ring(self, timer: int) -> None:
        if self.alive and not self._busy and timer == self._timer:
            self.post(e.TimePassed())

    # ------------------------------------------------------------ durable, then done

    def _flush(self, commands: list[c.Command], give_up_at: float) -> None:
        if not self.alive:
            return
        if self.clock.now < self.sim.outage_until:
            if self.clock.now < give_up_at:
                self.clock.after(0.5, self._flush, commands, give_up_at)
                return
            self._journal_lost = True
            self.sim.excuses.add("outage")
            self.post(e.StorageLost(error="the journal cannot be written"))
            self._do_all(commands)
            return
        self.clock.after(self.clock.delay_s(self.sim.scenario.storage_s / 4), self._flushed, commands)

    def _flushed(self, commands: list[c.Command]) -> None:
        if self.alive:
            self._save(len(self._unsaved))
            self.sim.moment("flushed")
            self.clock.after(0.0, self._do_all, commands)

    def _flush_later(self) -> None:
        if self.alive and not self._busy and not self._journal_lost and self.clock.now >= self.sim.outage_until:
            self._save(len(self._unsaved))

    def _save(self, count: int) -> None:
        self.sim.disk.journals.setdefault(self.epoch, []).extend(self._unsaved[:count])
        del self._unsaved[:count]

    def _do_all(self, commands: list[c.Command]) -> None:
        for command in commands:
            if self.alive:
                self._do(command)
        if self.alive:
            self._rest()

    def _do(self, command: c.Command) -> None:
        if self._journal_lost and not isinstance(command, _NEEDS_NO_JOURNAL):
            return  # nothing new may begin
        match command:
            case c.RequestAgents(slots=slots):
                self.sim.engine_start(self, slots)
            case c.StartWorkers():
                self._start(command)
            case c.StopWorkers(generation=generation, agents=agents):
                for node in self._of(agents):
                    node.order(node.stop, generation)
            case c.PersistCheckpoint():
                Persisting(self, command)
            case c.AnnounceCheckpoint(ticket=ticket, agents=agents):
                for node in self._of(agents):
                    node.order(node.settle, ticket)
            case c.FindPins(names=names):
                self.clock.after(self.clock.delay_s(self.sim.scenario.storage_s), self._find_pins, names)
            case c.DeleteCheckpoint():
                Removing(self, command)
            case c.EndRun(status=status):
                # An end that could not be written down is no end: fit() raises, and the same call continues.
                self.end("unwritten" if self._journal_lost else status)

    def _start(self, command: c.StartWorkers) -> None:
        self.sim.checkers.starting(self, command)
        fabric = Fabric(command.world_size, self.sim.scenario.lockstep)
        for place in command.places:
            if (node := self.nodes.get(place.agent)) is not None:
                node.order(node.start, command, place, fabric)

    def _of(self, agents: tuple[str, ...]) -> list[Node]:
        return [self.nodes[agent] for agent in agents if agent in self.nodes]

    def _find_pins(self, names: tuple[str, ...]) -> None:
        if self.sim.storage_fails():
            self.post(e.PinsFound(error="the storage does not answer"))
        else:
            self.post(e.PinsFound(pinned=tuple(name for name in names if name in self.sim.disk.pinned)))

    # ------------------------------------------------------------ the end

    def end(self, status: str) -> None:
        self.clock.say(self.name, "ends: %s", status)
        self.status = status
        self._leave()
        self.sim.ended(self)

    def die(self) -> None:
        """SIGKILL: of what was about to be written, some prefix may have been."""
        if self.alive:
            self.clock.say(self.name, "is killed")
            if self._unsaved and self.clock.now >= self.sim.outage_until and not self._journal_lost:
                self._save(self.clock.chance.randint(0, len(self._unsaved)))
            self.status = "killed"
            self._leave()
            self.sim.ended(self)

    def _leave(self) -> None:
        self.alive = False
        for node in self.nodes.values():
            self.clock.after(self.clock.delay_s(0.5), node.die)
