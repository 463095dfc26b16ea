"""Which run gets which places on which agents: a pure policy, events in, decisions out.

A run asks for a gang, workers that all take the same. It gets all of them at once or none, first come first served:
while a gang waits, nobody who came later is given anything that it could use, on any agent that could hold one of its
workers. So whatever becomes free is its own, and it waits no longer than until the gangs before it are gone.

A gang may want spare agents, too. It gets them like an elastic one gets more workers, on agents where it has nothing
yet, and once all its workers are placed; when it loses an agent, the places on a spare are those of its workers.

An elastic gang may be given fewer workers, at least as many as it needs. It gets more whenever there is room that no
gang which waits could use.

A gang that loses an agent keeps its turn and the rest of its places, and waits for what is missing. Two such gangs
might wait for each other's places for ever; so the later one has to give its places up if that lets the earlier go on.

On which agents a gang's workers go together, or apart, is its `PlacementStrategy`.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from holdfast.core.resources import FreeResources, Offer, Taken
from holdfast.core.torch_version import has_torch

__all__ = ["Admission", "Decision", "Gang", "Grant", "PlacementStrategy", "Revoke", "capacity"]


class PlacementStrategy(enum.StrEnum):
    """Which agents a gang prefers, or insists on."""

    PACK = "PACK"
    """Agents are filled one after the other, in the order in which they joined."""
    SPREAD = "SPREAD"
    """Workers are spread evenly, as far as there is room."""
    STRICT_PACK = "STRICT_PACK"
    """All workers are on one agent."""
    STRICT_SPREAD = "STRICT_SPREAD"
    """No two workers are on one agent."""

    @property
    def is_strict(self) -> bool:
        """Whether a gang rather waits than is placed otherwise."""
        return self in (PlacementStrategy.STRICT_PACK, PlacementStrategy.STRICT_SPREAD)


class Gang(msgspec.Struct, frozen=True, kw_only=True):
    """What one run asks for."""

    run: str
    workers: int
    min_workers: int | None = None
    """It can do with so many of them, and takes the others as they come; None: it needs all."""
    resources: dict[str, float] = {}
    """What each worker takes."""
    workers_per_agent: int | None = None
    """So many workers at most are placed on one agent."""
    spares: int = 0
    """It takes so many agents besides, and keeps as many places there as its workers may need if another is lost."""
    slots_per_worker: int = 1
    """0 for workers that an agent holds besides as many as it has slots for."""
    strategy: PlacementStrategy = PlacementStrategy.PACK
    torch: str = ""
    """The version of torch that its workers need; "": none."""
    local_agents: int = 1
    """So many agents at least are to be there on this machine, where they stand in for nodes: the run is one of many
    that share them."""

    @property
    def needed(self) -> int:
        """How many workers it cannot do without."""
        return self.workers if self.min_workers is None else self.min_workers

    def with_bounds(self, workers_min: int, workers_max: int) -> Gang:
        """The same with other numbers of workers, spread over as many agents."""
        per_agent = self.workers_per_agent
        if per_agent is not None:
            per_agent = -(-workers_max // -(-self.workers // per_agent))
        return msgspec.structs.replace(self, workers=workers_max, min_workers=workers_min, workers_per_agent=per_agent)


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """The run may start a worker on this agent for each of `workers`."""

    run: str
    agent: str
    workers: tuple[Taken, ...]


class Revoke(msgspec.Struct, frozen=True, kw_only=True):
    """The run, which waits, must give up its places on this agent; answered by `Admission.release`."""

    run: str
    agent: str


Decision = Grant | Revoke


@dataclass(slots=True)
class _Request:
    gang: Gang
    number: int
    """Requests with lower numbers came earlier."""
    held: dict[str, tuple[Taken, ...]] = field(default_factory=dict)
    """What it has been given, by agent, those included that are being given up."""
    leaving: set[str] = field(default_factory=set)
    """Agents whose places are being given up."""
    withdrawn: bool = False
    placed: int = 0
    """How many workers it has places for, without those that are being given up."""
    kind: object = field(init=False)
    """The same for gangs that ask for the same."""

    def __post_init__(self) -> None:
        self.ask_for(self.gang)

    def ask_for(self, gang: Gang) -> None:
        """The run wants this gang, and no other."""
        self.gang = gang
        resources = frozenset(gang.resources.items())
        per_agent = gang.workers_per_agent, gang.slots_per_worker
        self.kind = gang.workers, gang.needed, per_agent, gang.strategy, gang.torch, resources

    @property
    def missing(self) -> int:
        """How many workers it still waits for."""
        return 0 if self.withdrawn else max(0, self.gang.needed - self.placed)

    @property
    def wanted(self) -> int:
        """How many workers it would take."""
        return 0 if self.withdrawn else max(0, self.gang.workers - self.placed)

    @property
    def missing_spares(self) -> int:
        """How many more agents it would take to keep them idle."""
        if self.withdrawn or self.wanted or not self.gang.spares:
            return 0
        left, idle = self.gang.workers, 0
        for agent, taken in self.held.items():
            if agent not in self.leaving:
                idle += left <= 0
                left -= len(taken)
        return max(0, self.gang.spares - idle)

    def give(self, agent: str, workers: tuple[Taken, ...]) -> None:
        self.held[agent] = (*self.held.get(agent, ()), *workers)
        self.placed += len(workers)

    def take_away(self, agent: str) -> tuple[Taken, ...]:
        """The request has nothing on this agent any more; gives what it had."""
        taken = self.held.pop(agent, ())
        self.placed -= 0 if agent in self.leaving else len(taken)
        self.leaving.discard(agent)
        return taken

    def give_back(self, agent: str, count: int) -> tuple[Taken, ...]:
        """The request keeps all but its last `count` places on this agent; gives what it had there."""
        held = self.held[agent]
        self.held[agent] = held[: len(held) - count]
        self.placed -= count
        return held[len(held) - count :]

    def leave(self, agent: str) -> None:
        """Its places on this agent are to be given up."""
        self.leaving.add(agent)
        self.placed -= len(self.held[agent])

    @property
    def is_bound(self) -> bool:
        """Whether it may have workers only on the agent where it has some."""
        return self.gang.strategy is PlacementStrategy.STRICT_PACK and bool(self.held.keys() - self.leaving)

    def count(self, agent: str, free: FreeResources) -> int:
        """How many more of its workers fit on an agent where so much is free."""
        if agent in self.leaving:
            return 0  # not before all of it is given back
        if self.is_bound and agent not in self.held:
            return 0
        return _count(self.gang, free, self.gang.workers, len(self.held.get(agent, ())))


class _Room:
    """How many workers of a request that waits fit on each agent, kept while agents change one by one."""

    def __init__(self, request: _Request, free: Mapping[str, FreeResources]) -> None:
        self._request = request
        self._counts = {agent: request.count(agent, one) for agent, one in free.items()}
        self._total = sum(self._counts.values())

    @property
    def total(self) -> int:
        if self._request.gang.strategy is PlacementStrategy.STRICT_PACK:
            return max(self._counts.values(), default=0)
        return self._total

    def update(self, agent: str, free: FreeResources | None) -> None:
        """The agent has changed, or (None) is gone."""
        self._total -= self._counts.pop(agent, 0)
        if free is not None:
            self._counts[agent] = self._request.count(agent, free)
            self._total += self._counts[agent]


class Admission:
    """Every run that asked, in the order in which they came, and every agent in the order in which they joined."""

    def __init__(self) -> None:
        self._offers: dict[str, Offer] = {}
        self._free: dict[str, FreeResources] = {}
        self._requests: dict[str, _Request] = {}
        self._number = 0
        self._waiting: dict[str, _Request] = {}
        """Those that miss something."""
        self._growing: dict[str, _Request] = {}
        """Those that miss nothing, and would take more."""
        self._holders: dict[str, dict[str, None]] = {}
        """The runs that have places on each agent, in the order in which they got them."""
        self._rooms: dict[object, _Room] = {}
        """For requests that wait, by their kind while they hold nothing, else by their run."""

    # ------------------------------------------------------------ events

    def ask(self, gang: Gang) -> list[Decision]:
        """A run asks for its gang, once; it keeps its turn until it withdraws."""
        assert gang.run not in self._requests, gang.run
        self._number += 1
        self._requests[gang.run] = request = _Request(gang, self._number)
        self._request_changed(request)
        return self._decide()

    def withdraw(self, run: str) -> list[Decision]:
        """The run is over and wants nothing any more; what it holds stays its own until it is released."""
        if (request := self._requests.get(run)) is not None:
            request.withdrawn = True
            self._request_changed(request)
        return self._decide()

    def resize(self, gang: Gang) -> list[Decision]:
        """A run that has asked wants another number of workers. What it holds beyond that stays its own until it gives
        it back."""
        if (request := self._requests.get(gang.run)) is not None and not request.withdrawn:
            self._rooms.pop(gang.run, None)
            self._rooms.pop(request.kind, None)
            request.ask_for(gang)
            self._request_changed(request)
        return self._decide()

    def give_back(self, run: str, agent: str, count: int) -> list[Decision]:
        """The run keeps only its other places on this agent: nothing of it is on the last `count`."""
        request = self._requests.get(run)
        if request is not None and agent in request.held and agent not in request.leaving:
            for taken in request.give_back(agent, count):
                self._free[agent].give_back(taken)
            self._agent_changed(agent)
            self._request_changed(request)
        return self._decide()

    def leave(self, run: str, agent: str) -> list[Decision]:
        """The run is about to release its places on this agent."""
        request = self._requests.get(run)
        if request is not None and agent in request.held and agent not in request.leaving:
            request.leave(agent)
            self._agent_changed(agent)
            self._request_changed(request)
        return self._decide()

    def release(self, run: str, agent: str) -> list[Decision]:
        """Nothing of the run is left on this agent."""
        request = self._requests.get(run)
        if request is not None and agent in request.held:
            for taken in request.take_away(agent):
                if agent in self._free:  # not if it is draining
                    self._free[agent].give_back(taken)
            self._holders[agent].pop(run, None)
            self._agent_changed(agent)
            self._request_changed(request)
        return self._decide()

    def agent_joined(self, agent: str, offer: Offer) -> list[Decision]:
        assert agent not in self._offers, agent
        self._offers[agent] = offer
        self._free[agent] = FreeResources(offer)
        self._holders[agent] = {}
        self._agent_changed(agent)
        return self._decide()

    def drain(self, agent: str) -> list[Decision]:
        """The agent is to be taken away: nothing more is placed there, and the runs that have places there wait for
        others. What they hold stays their own until they release it."""
        if self._offers.pop(agent, None) is not None:
            del self._free[agent]
            for run in self._holders[agent]:
                request = self._requests[run]
                if agent not in request.leaving:
                    request.leave(agent)
                    self._request_changed(request)
            self._agent_changed(agent)
        return self._decide()

    def agent_lost(self, agent: str) -> list[Decision]:
        """The agent is gone, with all that runs had there."""
        self._offers.pop(agent, None)
        self._free.pop(agent, None)
        for run in self._holders.pop(agent, {}):
            self._requests[run].take_away(agent)
            self._request_changed(self._requests[run])
        self._agent_changed(agent)
        return self._decide()

    # ------------------------------------------------------------ questions

    @property
    def waiting(self) -> list[Gang]:
        """Those who wait, in their order."""
        return [one.gang for one in self._in_turn()]

    @property
    def gangs(self) -> list[Gang]:
        """All who asked and have not withdrawn."""
        return [one.gang for one in self._requests.values() if not one.withdrawn]

    def has_asked(self, run: str) -> bool:
        """Whether the run asked for its gang, and has not withdrawn."""
        return run in self._requests and not self._requests[run].withdrawn

    def is_waiting(self, run: str) -> bool:
        return run in self._waiting

    def would_take_more(self, run: str) -> bool:
        """Whether the run waits, or is elastic and has not all that it would take."""
        return run in self._waiting or run in self._growing

    def missing(self, run: str) -> int:
        """How many workers the run waits for."""
        return self._waiting[run].missing if run in self._waiting else 0

    def held(self, run: str) -> Mapping[str, tuple[Taken, ...]]:
        """What the run has, by agent."""
        return self._requests[run].held if run in self._requests else {}

    def holders(self, agent: str) -> Collection[str]:
        """The runs that have places on this agent."""
        return self._holders.get(agent, {})

    # ------------------------------------------------------------ what is counted

    def _in_turn(self) -> list[_Request]:
        return sorted(self._waiting.values(), key=lambda one: one.number)

    def _request_changed(self, request: _Request) -> None:
        run = request.gang.run
        self._growing.pop(run, None)
        if request.gang.strategy is PlacementStrategy.STRICT_PACK:
            self._rooms.pop(run, None)  # where it has workers decides what all other agents are worth
        if request.missing:
            self._waiting[run] = request
        else:
            if request.wanted or request.missing_spares:
                self._growing[run] = request
            self._waiting.pop(run, None)
            self._rooms.pop(run, None)
            self._rooms.pop(request.kind, None)  # made again if others of the kind wait
        if request.withdrawn and not request.held:
            del self._requests[run]

    def _agent_changed(self, agent: str) -> None:
        for room in self._rooms.values():
            room.update(agent, self._free.get(agent))

    def _fits(self, request: _Request) -> bool:
        """Whether the request could be granted if nobody came before it."""
        key = request.gang.run if request.held else request.kind
        room = self._rooms.get(key)
        if room is None:
            like_it = request if request.held else _Request(request.gang, 0)
            room = self._rooms[key] = _Room(like_it, self._free)
        return room.total >= request.missing

    # ------------------------------------------------------------ the policy

    def _decide(self) -> list[Decision]:
        waiting = self._in_turn()
        idle = not any(map(self._fits, waiting)) and not any(one.held for one in waiting[1:])
        if idle and not self._growing:
            return []  # nothing to grant, and nobody to revoke anything from
        decisions: list[Decision] = []
        left: dict[str, FreeResources] = {}
        """What those who come later may still take, of agents where that is less than what is free."""
        failed: set[object] = set()
        """What did not fit: the next gang of that kind does not fit either, and a thousand may wait."""
        for n, request in enumerate(waiting):
            if not request.held and request.kind in failed:
                continue
            places = self._place(request, left)
            if places is not None:
                for agent, count in places.items():
                    decisions.append(self._grant(request, agent, count, left.get(agent)))
                self._request_changed(request)
                continue
            if not request.held:
                failed.add(request.kind)
            decisions += self._revoke_for(request, waiting[n + 1 :])
            if n + 1 < len(waiting) or self._growing:
                for agent in self._suitable(request.gang):
                    if agent not in left:
                        left[agent] = self._free[agent].copy()
                    left[agent].block(frozenset(request.gang.resources))
        for request in sorted(self._growing.values(), key=lambda one: one.number):
            if request.wanted:
                for agent, count in (self._place(request, left) or {}).items():
                    decisions.append(self._grant(request, agent, count, left.get(agent)))
            for agent, count in self._place_spares(request, left).items():
                decisions.append(self._grant(request, agent, count, left.get(agent)))
            self._request_changed(request)
        return decisions

    def _place(self, request: _Request, left: Mapping[str, FreeResources]) -> dict[str, int] | None:
        """How many of the wanted workers go to each agent; None if not even all that are missing fit."""
        wanted = request.wanted
        rooms = ((agent, request.count(agent, left.get(agent, free))) for agent, free in self._free.items())
        match request.gang.strategy:
            case PlacementStrategy.SPREAD:
                places = _spread(wanted, dict(rooms), request.held)
            case PlacementStrategy.STRICT_PACK:
                places = _pack_one(wanted, rooms)
            case _:
                places = _pack(wanted, rooms)
        return places if sum(places.values()) >= request.missing else None

    def _place_spares(self, request: _Request, left: Mapping[str, FreeResources]) -> dict[str, int]:
        """How many places to keep on each of the spare agents that it misses, as far as there are any."""
        missing = request.missing_spares
        places: dict[str, int] = {}
        for agent, free in self._free.items() if missing else ():
            if agent not in request.held and (count := request.count(agent, left.get(agent, free))):
                places[agent] = count
                if len(places) == missing:
                    break
        return places

    def _grant(self, request: _Request, agent: str, count: int, left: FreeResources | None) -> Grant:
        given: list[Taken] = []
        for _ in range(count):
            taken = _take(self._free[agent], request.gang)
            assert taken is not None, (request.gang, agent)
            if left is not None:
                again = _take(left, request.gang)
                assert taken == again, (request.gang, agent)
            given.append(taken)
        request.give(agent, tuple(given))
        self._holders[agent][request.gang.run] = None
        self._agent_changed(agent)
        return Grant(run=request.gang.run, agent=agent, workers=tuple(given))

    def _revoke_for(self, request: _Request, later: list[_Request]) -> list[Decision]:
        """Take the places of later gangs that wait, the last one's first, if that is enough for this gang."""
        if not any(one.held for one in later):
            return []
        if any(self._offers.keys() & one.leaving for one in self._requests.values()):
            return []  # one at a time: it may be enough. What is left on a draining agent leaves room to nobody.
        left: dict[str, FreeResources] = {}
        revoked: list[Decision] = []
        for other in reversed(later):
            if not other.held:
                continue
            for agent, given in other.held.items():
                if agent in other.leaving:
                    continue
                free = left.setdefault(agent, self._free[agent].copy())
                for taken in given:
                    free.give_back(taken)
                revoked.append(Revoke(run=other.gang.run, agent=agent))
            if self._place(request, left) is not None:
                for one in revoked:
                    self._requests[one.run].leave(one.agent)
                    self._request_changed(self._requests[one.run])
                    self._agent_changed(one.agent)
                return revoked
        return []

    def _suitable(self, gang: Gang) -> Iterable[str]:
        """The agents that could hold a worker of the gang if they were empty."""
        return [agent for agent, offer in self._offers.items() if _count(gang, FreeResources(offer), 1)]


def _pack(wanted: int, rooms: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Fill one agent after the other."""
    places: dict[str, int] = {}
    for agent, room in rooms:
        if count := min(wanted, room):
            places[agent] = count
            wanted -= count
            if not wanted:
                break
    return places


def _pack_one(wanted: int, rooms: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The first agent that has room for all; where none has, the one with the most."""
    agent, room = max(((agent, min(wanted, room)) for agent, room in rooms), key=lambda one: one[1], default=("", 0))
    return {agent: room} if room else {}


def _spread(wanted: int, rooms: dict[str, int], held: Mapping[str, Collection[Taken]]) -> dict[str, int]:
    """One worker after the other where the fewest of them are, of equal agents where the first is."""
    places: dict[str, int] = {}
    heap = [(len(held.get(agent, ())), n, agent) for n, (agent, room) in enumerate(rooms.items()) if room]
    heapq.heapify(heap)
    for _ in range(wanted):
        if not heap:
            break
        there, n, agent = heap[0]
        places[agent] = places.get(agent, 0) + 1
        if places[agent] == rooms[agent]:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (there + 1, n, agent))
    return places


def _count(gang: Gang, free: FreeResources, most: int, there: int = 0) -> int:
    """How many workers of the gang fit, up to `most`, where so many are there already."""
    if not has_torch(free.torch, gang.torch):
        return 0
    if gang.strategy is PlacementStrategy.STRICT_SPREAD:
        most = min(most, 1 - there)
    if gang.workers_per_agent is not None:
        most = min(most, gang.workers_per_agent - there)
    return free.count(gang.resources, gang.slots_per_worker, most)


def _take(free: FreeResources, gang: Gang) -> Taken | None:
    return free.take(gang.resources, gang.slots_per_worker)


def capacity(gang: Gang, offers: Iterable[Offer]) -> int:
    """How many of the gang's workers these agents could hold if they were empty; at most all of them."""
    if gang.strategy is PlacementStrategy.STRICT_PACK:
        return max((_count(gang, FreeResources(offer), gang.workers) for offer in offers), default=0)
    total = 0
    for offer in offers:
        if total == gang.workers:
            break
        total += _count(gang, FreeResources(offer), gang.workers - total)
    return total
