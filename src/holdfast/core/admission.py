"""Which run gets which places on which agents: a pure policy, events in, decisions out.

A run asks for a gang, workers that all take the same. It gets all of them at once or none, first come first served:
while a gang waits, nobody who came later is given anything that it could use, on any agent that could hold one of its
workers. So whatever becomes free is its own, and it waits no longer than until the gangs before it are gone.

A gang that loses an agent keeps its turn and the rest of its places, and waits for what is missing. Two such gangs
might wait for each other's places for ever; so the later one has to give its places up if that lets the earlier go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from holdfast.core.resources import FreeResources, Offer, Taken

__all__ = ["Admission", "Decision", "Gang", "Grant", "Revoke", "capacity"]


class Gang(msgspec.Struct, frozen=True, kw_only=True):
    """What one run asks for."""

    run: str
    workers: int
    resources: dict[str, float] = {}
    """What each worker takes."""
    workers_per_agent: int | None = None
    """So many workers at most are placed on one agent."""
    slots_per_worker: int = 1
    """0 for workers that an agent holds besides as many as it has slots for."""


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
    held: dict[str, tuple[Taken, ...]] = field(default_factory=dict)
    """What it has been given, by agent, those included that are being given up."""
    leaving: set[str] = field(default_factory=set)
    """Agents whose places are being given up."""
    withdrawn: bool = False

    @property
    def kind(self) -> object:
        """The same for gangs that ask for the same."""
        gang = self.gang
        return gang.workers, gang.workers_per_agent, gang.slots_per_worker, frozenset(gang.resources.items())

    @property
    def missing(self) -> int:
        """How many workers it still waits for."""
        if self.withdrawn:
            return 0
        return self.gang.workers - sum(len(taken) for agent, taken in self.held.items() if agent not in self.leaving)


class Admission:
    """Every run that asked, in the order in which they came, and every agent in the order in which they joined."""

    def __init__(self) -> None:
        self._offers: dict[str, Offer] = {}
        self._free: dict[str, FreeResources] = {}
        self._requests: dict[str, _Request] = {}

    # ------------------------------------------------------------ events

    def ask(self, gang: Gang) -> list[Decision]:
        """A run asks for its gang, once; it keeps its turn until it withdraws."""
        assert gang.run not in self._requests, gang.run
        self._requests[gang.run] = _Request(gang)
        return self._decide()

    def withdraw(self, run: str) -> list[Decision]:
        """The run is over and wants nothing any more; what it holds stays its own until it is released."""
        if (request := self._requests.get(run)) is not None:
            request.withdrawn = True
            self._forget_if_done(run)
        return self._decide()

    def release(self, run: str, agent: str) -> list[Decision]:
        """Nothing of the run is left on this agent."""
        request = self._requests.get(run)
        if request is not None and agent in request.held:
            for taken in request.held.pop(agent):
                self._free[agent].give_back(taken)
            request.leaving.discard(agent)
            self._forget_if_done(run)
        return self._decide()

    def agent_joined(self, agent: str, offer: Offer) -> list[Decision]:
        assert agent not in self._offers, agent
        self._offers[agent] = offer
        self._free[agent] = FreeResources(offer)
        return self._decide()

    def agent_lost(self, agent: str) -> list[Decision]:
        """The agent is gone, with all that runs had there."""
        if self._offers.pop(agent, None) is not None:
            del self._free[agent]
            for run in list(self._requests):
                self._requests[run].held.pop(agent, None)
                self._requests[run].leaving.discard(agent)
                self._forget_if_done(run)
        return self._decide()

    # ------------------------------------------------------------ questions

    @property
    def waiting(self) -> list[Gang]:
        """Those who wait, in their order."""
        return [one.gang for one in self._requests.values() if one.missing]

    @property
    def gangs(self) -> list[Gang]:
        """All who asked and have not withdrawn."""
        return [one.gang for one in self._requests.values() if not one.withdrawn]

    def held(self, run: str) -> Mapping[str, tuple[Taken, ...]]:
        """What the run has, by agent."""
        return self._requests[run].held if run in self._requests else {}

    # ------------------------------------------------------------ the policy

    def _forget_if_done(self, run: str) -> None:
        request = self._requests[run]
        if request.withdrawn and not request.held:
            del self._requests[run]

    def _decide(self) -> list[Decision]:
        decisions: list[Decision] = []
        left = {agent: free.copy() for agent, free in self._free.items()}
        """What those who came later may still take."""
        failed: set[object] = set()
        """What did not fit: the next gang of that kind does not fit either, and a thousand may wait."""
        requests = list(self._requests.values())
        for n, request in enumerate(requests):
            if not request.missing:
                continue
            if not request.held and request.kind in failed:
                continue
            places = _place(request, left)
            if places is not None:
                for agent, wanted in places.items():
                    self._grant(request, agent, wanted, left, decisions)
                continue
            if not request.held:
                failed.add(request.kind)
            decisions += self._revoke_for(request, requests[n + 1 :])
            for agent in self._suitable(request.gang):
                left[agent].block(frozenset(request.gang.resources))
        return decisions

    def _grant(
        self,
        request: _Request,
        agent: str,
        count: int,
        left: dict[str, FreeResources],
        decisions: list[Decision],
    ) -> None:
        given: list[Taken] = []
        for _ in range(count):
            taken = _take(left[agent], request.gang)
            again = _take(self._free[agent], request.gang)
            assert taken is not None and taken == again, (request.gang, agent)
            given.append(taken)
        before = request.held.get(agent, ())
        request.held[agent] = (*before, *given)
        decisions.append(Grant(run=request.gang.run, agent=agent, workers=tuple(given)))

    def _revoke_for(self, request: _Request, later: list[_Request]) -> list[Decision]:
        """Take the places of later gangs that wait, the last one's first, if that is enough for this gang."""
        if any(one.leaving for one in self._requests.values()):
            return []  # one at a time: it may be enough
        left = {agent: free.copy() for agent, free in self._free.items()}
        revoked: list[Decision] = []
        for other in reversed(later):
            if not other.missing or not other.held:
                continue
            for agent, given in other.held.items():
                for taken in given:
                    left[agent].give_back(taken)
                revoked.append(Revoke(run=other.gang.run, agent=agent))
            if _place(request, left) is not None:
                for one in revoked:
                    self._requests[one.run].leaving.add(one.agent)
                return revoked
        return []

    def _suitable(self, gang: Gang) -> Iterable[str]:
        """The agents that could hold a worker of the gang if they were empty."""
        return [agent for agent, offer in self._offers.items() if _take(FreeResources(offer), gang)]


def _place(request: _Request, left: Mapping[str, FreeResources]) -> dict[str, int] | None:
    """How many of the missing workers go to each agent; None if they do not all fit."""
    missing = request.missing
    places: dict[str, int] = {}
    for agent, free in left.items():
        count = _fill(free.copy(), request.gang, missing, len(request.held.get(agent, ())))
        if agent in request.leaving:
            count = 0  # not before all of it is given back
        if count:
            places[agent] = count
            missing -= count
    return places if missing == 0 else None


def _fill(free: FreeResources, gang: Gang, most: int, there: int = 0) -> int:
    """How many workers of the gang fit, up to `most`, where so many are there already."""
    if gang.workers_per_agent is not None:
        most = min(most, gang.workers_per_agent - there)
    count = 0
    while count < most and _take(free, gang) is not None:
        count += 1
    return count


def _take(free: FreeResources, gang: Gang) -> Taken | None:
    return free.take(gang.resources, gang.slots_per_worker)


def capacity(gang: Gang, offers: Iterable[Offer]) -> int:
    """How many of the gang's workers these agents could hold if they were empty; at most all of them."""
    total = 0
    for offer in offers:
        total += _fill(FreeResources(offer), gang, gang.workers - total)
    return total
