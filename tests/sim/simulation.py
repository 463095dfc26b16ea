"""One seed from beginning to end: the storage, the user who starts drivers, and the faults.

Drivers run the code that ships (`driver`), in processes that can be killed and stopped (`process`), on a loop with
virtual time (`event_loop`), against a store in memory that lags, fails and tears (`memory_store`). Nodes run the agent
that ships (`node`); only their workers are modelled (`worker`). The `checkers` look on.
"""

from __future__ import annotations

import contextvars
import itertools
import logging
import random
from typing import Any, NoReturn

import greenlet
from tests.sim.checkers import Violation
from tests.sim.driver import Driver, Guest
from tests.sim.event_loop import VirtualLoop
from tests.sim.memory_store import Bucket, MemoryStore
from tests.sim.neighbour import SnapshotServer
from tests.sim.network import Listener
from tests.sim.node import Node
from tests.sim.process import Process
from tests.sim.run import Run
from tests.sim.scenario import Scenario, draw
from tests.sim.worker import Fabric, Worker

from holdfast.checkpoint import removal
from holdfast.checkpoint.known_files import process_wide
from holdfast.core.events import BoundsRequested, StopRequested
from holdfast.core.records import Record
from holdfast.engines.engine import ControllerEndpoint
from holdfast.errors import AccessDenied, HoldfastError, StorageError, Unavailable

__all__ = ["Simulation", "simulate"]

_PATIENCE_S = 600.0
"""Virtual time that a run gets to end after the last fault."""
_STEPS_MAX = 400_000


class Simulation:
    """Everything that one seed brings into being."""

    def __init__(self, seed: int, trace: bool = False, scenario: Scenario | None = None) -> None:
        self.seed, self.tracing = seed, trace
        self.random = random.Random(seed)
        self.scenario = scenario or draw(seed)
        self.loop = VirtualLoop()  # type: ignore[abstract]  # what asyncio's sockets and processes need is left out
        self.network = contextvars.Context()
        """What belongs to no process happens in this context."""
        self.hub = greenlet.getcurrent()
        self.bucket = Bucket(f"seed-{seed}", exclusive=self.scenario.exclusive)
        self.numbers = itertools.count()
        self.processes: dict[int, Process] = {}
        self.locks: set[tuple[str, str]] = set()
        """(host, path) of the files that are locked."""
        self.listeners: dict[str, Listener] = {}
        self.nodes: dict[str, Node] = {}
        self.snapshot_servers: dict[int, SnapshotServer] = {}
        """By port."""
        self.drivers: list[Driver] = []
        self.violation: Violation | None = None
        self.runs = [Run(self, number, one) for number, one in enumerate([self.scenario, *self.scenario.others])]
        self.outage_until = 0.0
        self.broken_host = ""
        """Workers die there."""
        self.excuses: set[str] = set()
        """What may have made the run fail for good."""
        self.over = ""
        self._armed: list[list[Any]] = []
        """[moment, how many more of it, kind of fault]"""
        self._waking: list[tuple[str, Process]] = []
        """(moment, process that goes on at that)"""
        self._fabrics: dict[tuple[str, str, int], Fabric] = {}

    def run(self) -> str:
        """How the runs ended: finished, or failed if one did. Raises `Violation`."""
        process_wide.clear()
        for fault in self.scenario.faults:
            if fault.moment:
                self._at(fault.at, self._armed.append, [fault.moment, fault.count, fault.kind])
            else:
                self._at(fault.at, self._strike, fault.kind)
        for at in self.scenario.pins:
            self._at(at, self._pin_or_unpin)
        level = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            self._fit()
            in_time = self.loop.run(self.scenario.quiet_at + _PATIENCE_S, _STEPS_MAX)
        finally:
            self._discard()
            logging.disable(level)
        if self.violation is not None:
            raise self.violation
        if self.loop.errors:
            raise Violation(f"an error that nobody handled: {self.loop.errors[0]}")
        if not in_time:
            left = " and ".join(run.name for run in self.runs if not run.over) + " is not over"
            raise Violation(f"nothing more happened, or too much, and {left} at {self.loop.time():.1f} s")
        return self.over

    def records(self) -> list[Record]:
        """The first run's journal as it stands."""
        return self.runs[0].checkers.run.records()

    def fail(self, sentence: str) -> NoReturn:
        self.violation = self.violation or Violation(sentence)
        self.loop.stop()
        raise self.violation

    def run_at(self, storage: str) -> Run:
        """The run whose storage this is."""
        return next(run for run in self.runs if storage == f"memory://{run.name}")

    def _discard(self) -> None:
        errors, violation = list(self.loop.errors), self.violation
        for process in self.processes.values():
            process.is_alive = process.is_running = False
        for process in self.processes.values():
            process.discard()
        for node in self.nodes.values():
            node.free_memory()
        self.loop.discard()
        self.loop.errors, self.violation = errors, violation

    # ------------------------------------------------------------ time and chance

    @property
    def is_quiet(self) -> bool:
        """Whether no fault strikes any more."""
        return self.loop.time() >= self.scenario.quiet_at

    def delay_s(self, typical_s: float) -> float:
        """A delay: mostly near what is typical, sometimes none, now and then ten times as long."""
        roll = self.random.random()
        if roll < 0.1:
            return 0.0
        if roll > 0.97:
            return typical_s * 10 * self.random.random()
        return typical_s * (0.5 + self.random.random())

    def happens(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def say(self, who: str, text: str, *arguments: Any) -> None:
        if self.tracing:
            print(f"{self.loop.time():9.3f}  {who:<14} {text % arguments if arguments else text}")

    def _at(self, when: float, action: Any, *arguments: Any) -> None:
        self.loop.call_at(when, action, *arguments, context=self.network)

    def _after(self, seconds: float, action: Any, *arguments: Any) -> None:
        self._at(self.loop.time() + seconds, action, *arguments)

    # ------------------------------------------------------------ storage

    def request_failure(self, process: Process, verb: str, key: str) -> StorageError | None:
        """What a request to storage fails with, if it does."""
        if self._armed and process.name.startswith("driver"):
            self.moment("request")
            if verb in ("put", "create"):
                self.moment("write")
            elif verb == "list" and key.endswith("/journal"):
                self.moment("positioned")
            elif verb == "get" and key.endswith("/.manifest.json"):
                self.moment("surveyed")
        if self.loop.time() < self.outage_until:
            self.excuses.add("outage")
            return Unavailable(f"{key} cannot be reached.")
        if self.is_quiet:
            return None
        if self.happens(self.scenario.storage_trouble):
            return Unavailable(f"{key} cannot be reached.")
        if verb in ("put", "create") and self.happens(self.scenario.storage_fatal):
            self.excuses.add("storage")
            return AccessDenied(f"Access to {key} was refused.")
        return None

    def is_answer_lost(self, failure: StorageError) -> bool:
        """Whether a request that fails has taken place all the same."""
        return isinstance(failure, Unavailable) and self.loop.time() >= self.outage_until and self.happens(0.5)

    def wrote(self, process: Process, verb: str, key: str) -> None:
        """A write has taken place."""
        if self.tracing:
            self.say(process.name, "%s %s", verb, key)
        name, _, path = key.partition("/")
        run = next(one for one in self.runs if one.name == name)
        is_manifest = path.endswith("/.manifest.json")
        if is_manifest or verb == "delete" or path.startswith("epochs/"):
            run.checkers.wrote(process, verb)
        if is_manifest:
            self.moment("unlinked" if verb == "delete" else "created")
        elif path.endswith("/.reserved.json") and verb != "delete":
            self.moment("reserved")
        elif path.startswith("journal/") and verb == "put":
            self.moment("flushed")
        elif path.startswith("epochs/") and verb == "create":
            self.moment("settled" if path.endswith(".floor.json") else "leased")

    def tear(self, key: str, data: bytes) -> None:
        """Half of a write has taken place, where nothing was before."""
        if key not in self.bucket.objects:
            self.bucket.write(key, data[: self.random.randint(0, len(data))])
            self.say("FAULT", "%s is torn", key)

    # ------------------------------------------------------------ the user

    def _fit(self) -> None:
        if not self.over and not any(driver.process.is_running for driver in self.drivers):
            self._start_driver(takeover=any(driver.process.is_alive for driver in self.drivers))

    def _start_driver(self, *, takeover: bool) -> None:
        number = len(self.drivers) + 1
        host = "head" if self.scenario.one_machine else f"head-{self.random.randint(1, 2)}"
        self.drivers.append(Driver(self, number, host, [run for run in self.runs if not run.over], takeover=takeover))
        self.say(f"driver-{number}", "is started")

    def ended(self, driver: Driver) -> None:
        """The user sees each `fit()` return, or the process die."""
        for run, guest in driver.guests.items():
            self.say(driver.process.name, "ends %s: %s", run.name, guest.status)
            if driver is not self.drivers[-1]:
                continue
            run.checkers.ended(guest)
            run.failed += guest.status == "failed"
            if guest.status == "finished" or run.failed > self.scenario.retries_of_failed:
                run.over = guest.status
        if all(run.over for run in self.runs):
            self.over = "finished" if {run.over for run in self.runs} == {"finished"} else "failed"
            self.loop.stop()
            return
        # A driver that was fenced, or would have been, has no say: whoever comes next sees how things stand.
        self._after(self.delay_s(0.5), self._fit)

    def guest_of(self, process: Process, run: Run) -> Guest | None:
        """The call of `fit()` in this process that is for this run."""
        return next((one.guests.get(run) for one in self.drivers if one.process is process), None)

    def guest_at(self, address: str, run: Run) -> Guest:
        guest = self.guest_of(self.listeners[address].process, run)
        assert guest is not None
        return guest

    def _pin_or_unpin(self) -> None:
        """`holdfast ckpt pin` or `unpin`, of any checkpoint of the first run that is there."""
        stored = self.runs[0].checkers.run
        visible = stored.visible()
        if not visible:
            return
        name = self.random.choice(visible).name
        process = Process(self, "user", "head")
        store = MemoryStore(self.bucket, process.carry_out, self.runs[0].name)
        change = removal.unpin if stored.is_pinned(name) else removal.pin

        def work() -> None:
            try:
                change(store, name)
            except HoldfastError:
                return

        process.call(process.start_thread, work)

    # ------------------------------------------------------------ nodes and connections

    def start_node(self, name: str, driver: Driver, slots: int, endpoint: ControllerEndpoint) -> Node:
        host = driver.process.host if self.scenario.one_machine else f"host-{name}"
        if self.scenario.hosts:
            alive = [node.process.host for node in self.nodes.values() if node.process.is_alive]
            host = min((f"host-{n}" for n in range(self.scenario.hosts)), key=alive.count)
        node = self.nodes[name] = Node(self, name, host, slots, endpoint)
        return node

    def add_listener(self, listener: Listener) -> int:
        port = len(self.listeners) + 1
        self.listeners[f"127.0.0.1:{port}"] = listener
        return port

    def fabric(self, address: str, run: Run, generation: int, world_size: int) -> Fabric:
        """What the workers of a generation share."""
        found = self._fabrics.get((address, run.name, generation))
        if found is None:
            found = self._fabrics[address, run.name, generation] = Fabric(world_size, run.scenario.lockstep)
        return found

    # ------------------------------------------------------------ faults

    def moment(self, name: str) -> None:
        """Something happened that makes a good time for a fault: at once, or a blink later."""
        for waking in [one for one in self._waking if one[0] == name]:
            self._waking.remove(waking)
            self._after(0.0, waking[1].go_on)
        for armed in [one for one in self._armed if one[0] == name]:
            armed[1] -= 1
            if armed[1] == 0:
                self._armed.remove(armed)
                if not self.is_quiet:
                    blink_s = self.random.choice([0.0, self.scenario.message_s, self.scenario.storage_s])
                    self._after(blink_s * self.random.random(), self._strike, armed[2])

    def _strike(self, kind: str) -> None:
        self.say("FAULT", kind)
        if kind not in ("kill_worker", "hang_worker", "kill_node", "cut_link", "blink", "slow_node", "flap"):
            for run in self.runs:
                run.disturbed = True
        getattr(self, f"_{kind}")()

    def _some_driver(self) -> Driver | None:
        alive = [driver for driver in self.drivers if driver.process.is_alive]
        return self.random.choice(alive) if alive else None

    def _some_node(self) -> Node | None:
        alive = [node for node in self.nodes.values() if node.process.is_alive]
        if not alive:
            return None
        node = self.random.choice(alive)
        for guest in (guest for driver in self.drivers for guest in driver.guests.values()):
            if guest.controller is not None and node.name in guest.controller.agents:
                guest.run.disturbed = True
        return node

    def _some_worker(self, *, watched: bool = False) -> Worker | None:
        """Any live worker, or one of a run that notices hangs."""
        nodes = [node for node in self.nodes.values() if node.process.is_alive]
        alive = [worker for node in nodes for worker in node.workers if worker.alive]
        if watched:
            alive = [worker for worker in alive if worker.scenario.spec.progress_timeout_s is not None]
        if not alive:
            return None
        worker = self.random.choice(alive)
        worker.run.disturbed = True
        return worker

    def _kill_worker(self) -> None:
        if (worker := self._some_worker()) is not None:
            worker.node.process.call(worker.kill)

    def _hang_worker(self) -> None:
        if (worker := self._some_worker(watched=True)) is not None:
            worker.hung = True

    def _kill_node(self) -> None:
        if (node := self._some_node()) is not None:
            node.process.kill()

    def _drain(self) -> None:
        self._drain_some_node(None)

    def _preempt(self) -> None:
        """A node that says when it will be gone, and is."""
        self._drain_some_node(self.random.choice([0.05, 0.5, 3.0, 10.0]))

    def _notice(self) -> None:
        """SIGTERM to an agent, with the time until its machine is gone: it tells the controller itself."""
        node, deadline_s = self._some_node(), self.random.choice([0.05, 0.5, 2.0, 5.0, 15.0])
        if node is not None and node.agent is not None and node.agent._is_serving:
            node.process.call(node.agent.drain, "SIGTERM", deadline_s)
            self._after(deadline_s, node.process.kill)

    def _flap(self, times: int = 4) -> None:
        """A node is lost, and whichever joins in its place, soon after it did."""
        if (node := self._some_node()) is not None:
            known = set(self.nodes)
            node.process.kill()
            if times > 1:
                self._after(self.random.uniform(0.5, 4.0), self._flap_again, known, times - 1)

    def _flap_again(self, known: set[str], times: int) -> None:
        joined = [node for node in self.nodes.values() if node.name not in known and node.process.is_alive]
        if not joined:
            return
        known = set(self.nodes)
        joined[-1].process.kill()
        if times > 1:
            self._after(self.random.uniform(0.5, 4.0), self._flap_again, known, times - 1)

    def _break_host(self) -> None:
        self.broken_host = "host-0"
        for node in self.nodes.values():
            for worker in node.workers:
                self.break_worker(worker)

    def break_worker(self, worker: Worker) -> None:
        """If its host is broken, it dies soon."""
        if worker.node.process.host == self.broken_host and not self.is_quiet:
            worker.run.disturbed = True
            worker.node.after(0.3, worker.kill)

    def _drain_some_node(self, deadline_s: float | None) -> None:
        node = self._some_node()
        if node is None:
            return
        for driver in self.drivers:
            found = [guest.controller for guest in driver.guests.values()]
            controllers = [one for one in found if one is not None]
            if driver.process.is_running and any(node.name in one.agents for one in controllers):
                driver.process.call(controllers[0].drain, node.name, deadline_s)
                if deadline_s is not None:
                    self._after(deadline_s, node.process.kill)

    def _cut_link(self) -> None:
        if (node := self._some_node()) is not None:
            if node.comes_back:
                node.blink(self.random.uniform(8.0, 25.0))
            else:
                node.cut()

    def _blink(self) -> None:
        """A connection breaks for less than the time after which an agent is lost: no run may notice."""
        nodes = [node for node in self.nodes.values() if node.is_connected]
        if nodes:
            self.random.choice(nodes).blink(self.random.uniform(0.0, 2.0))

    def _slow_node(self) -> None:
        if (node := self._some_node()) is not None:
            node.process.stop()
            self._after(self.random.choice([2.0, 20.0]) * self.random.random(), node.process.go_on)

    def _kill_driver(self) -> None:
        if (driver := self._some_driver()) is not None:
            driver.process.kill()

    def _pause_driver(self) -> None:
        if (driver := self._some_driver()) is not None:
            driver.process.stop()
            self._after(self.random.choice([0.5, 3.0, 20.0]) * self.random.random(), driver.process.go_on)

    def _overtake(self) -> None:
        """A driver stands still wherever it is, another one takes over, and the first goes on in the middle of that."""
        driver = self.random.choice([self._some_driver(), self.drivers[-1]])
        if driver is not None and driver.process.is_alive and not self.over:
            driver.process.stop()
            self._start_driver(takeover=True)
            moment = self.random.choice(["", "leased", "settled", "flushed", "started", "created", "unlinked"])
            if moment:
                self._waking.append((moment, driver.process))
            self._after(20.0 * self.random.random(), driver.process.go_on)

    def _kill_machine(self) -> None:
        for process in list(self.processes.values()):
            process.kill()

    def _take_over(self) -> None:
        if not self.over:
            self._start_driver(takeover=True)

    def _stop(self) -> None:
        self._request_stop(force=False)

    def _force_stop(self) -> None:
        self._request_stop(force=True)

    def _request_stop(self, *, force: bool) -> None:
        asked = StopRequested(why="Ctrl+C", force=force, grace_s=self.scenario.grace_s)
        if (driver := self._some_driver()) is not None:
            for guest in driver.guests.values():
                if guest.controller is not None:
                    driver.process.call(guest.controller.post, asked)

    def _scale(self) -> None:
        """`holdfast scale`, of all runs of a driver."""
        most = self.random.randint(1, 4)
        asked = BoundsRequested(workers_min=self.random.randint(1, most), workers_max=most, why="holdfast scale")
        if (driver := self._some_driver()) is not None:
            for guest in driver.guests.values():
                if guest.controller is not None:
                    driver.process.call(guest.controller.post, asked)

    def _outage(self) -> None:
        self.outage_until = self.loop.time() + self.random.uniform(0.5, 2.5) * self.scenario.outage_s


def simulate(seed: int, trace: bool = False) -> Simulation:
    """Run one seed; a `Violation` or an invariant's AssertionError says what broke."""
    simulation = Simulation(seed, trace)
    simulation.run()
    return simulation
