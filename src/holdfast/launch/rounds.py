"""Which hosts run a plain script together: pure decisions of the elected host, from the keys that it sees.

    leader                 the elected host, while it lives
    hosts/<id>             each host: where it is, and for which round it is ready
    rounds/<n>             who takes part in round n, and where rank 0 listens
    closed/<n>             round n is over, and why: its workers are stopped
    ended/<n>/<id>         how the workers of a host ended in round n
    result                 the job is over

A host takes part in one round at a time: it is ready for the next when its workers of the last are gone. Rounds and
their ends are created, never changed, so of two hosts that believe to lead only one is heard. What workers do in
storage is not fenced by any of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

__all__ = [
    "Bounds",
    "CloseRound",
    "EndJob",
    "Ended",
    "HostRecord",
    "JobResult",
    "Member",
    "OpenRound",
    "Round",
    "Rounds",
]


_STOP_S = 30.0
"""How long a host that lives may take to stop its workers before a round begins without it."""


class HostRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a host says of itself."""

    address: str
    port: int = 0
    """Free on this host, for rank 0 of the round that it is ready for."""
    workers: int = 1
    ready: int = 0
    """The round that it can take part in."""
    incarnation: str = ""
    """Of its launcher: another one of the same name has none of the workers of this one."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    workers: int
    incarnation: str = ""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Members in the order of their ranks; the first one's host runs rank 0."""

    number: int
    members: tuple[Member, ...]
    master_address: str
    master_port: int
    restarts: int = 0
    """How often workers have failed before it."""
    by: str = ""


class Closed(msgspec.Struct, frozen=True, kw_only=True):
    why: str
    is_failure: bool = False
    code: int = 1
    """The job's exit code, if this failure ends it."""
    by: str = ""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a host's workers of one round ended by themselves."""

    code: int
    what: str = ""


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    code: int
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    min_hosts: int
    max_hosts: int
    last_call_s: float
    max_restarts: int
    join_timeout_s: float


@dataclass(frozen=True, slots=True)
class OpenRound:
    round: Round


@dataclass(frozen=True, slots=True)
class CloseRound:
    number: int
    closed: Closed


@dataclass(frozen=True, slots=True)
class EndJob:
    result: JobResult


Decision = OpenRound | CloseRound | EndJob


class Rounds:
    """What the keys say of rounds, and what the leader does about it. Times are of one clock, the caller's."""

    def __init__(self, host: str, bounds: Bounds) -> None:
        self._host = host
        self._bounds = bounds
        self._since: dict[str, float] = {}
        """Since when each thing is so that is waited for."""
        self.wake_at: float | None = None
        """When to decide again, though nothing changes."""

    def decide(self, entries: Mapping[str, bytes], now: float) -> Decision | None:
        """The leader's next step; None: nothing yet."""
        self.wake_at = None
        if "result" in entries:
            return None
        hosts = read_hosts(entries)
        current = newest_round(entries)
        if current is None or f"closed/{current.number}" in entries:
            return self._form(entries, hosts, current, now)
        self._forget("enough", "short")
        return self._watch(entries, hosts, current, now)

    # ------------------------------------------------------------------ a round that runs

    def _watch(
        self, entries: Mapping[str, bytes], hosts: Mapping[str, HostRecord], current: Round, now: float
    ) -> Decision | None:
        ended = read_ended(entries, current.number)
        failed = [(host, one) for host, one in sorted(ended.items()) if one.code != 0]
        names = [one.host for one in current.members]
        if failed:
            host, one = failed[0]
            code = one.code if 0 < one.code < 256 else 1
            # Whether it counts is seen when those who live are ready again: a host that died with it is listed still.
            closed = Closed(why=f"{host}: {one.what}", is_failure=True, code=code, by=self._host)
            return CloseRound(current.number, closed)
        if all(name in ended for name in names):
            return EndJob(JobResult(code=0))
        lost = [one.host for one in current.members if not _lives(one, hosts) and one.host not in ended]
        if lost:
            return CloseRound(current.number, Closed(why=f"{', '.join(lost)} left", by=self._host))
        newcomers = [name for name, one in hosts.items() if name not in names and one.ready > current.number]
        if not newcomers or ended or len(names) >= self._bounds.max_hosts:
            self._forget("newcomers")
            return None
        if not self._has_waited("newcomers", self._bounds.last_call_s, now):
            return None
        return CloseRound(current.number, Closed(why=f"{', '.join(sorted(newcomers))} joined", by=self._host))

    # ------------------------------------------------------------------ the next round

    def _form(
        self, entries: Mapping[str, bytes], hosts: Mapping[str, HostRecord], last: Round | None, now: float
    ) -> Decision | None:
        self._forget("newcomers")
        number = last.number + 1 if last is not None else 1
        before = [one.host for one in last.members] if last is not None else []
        ready = [name for name in before if name in hosts and hosts[name].ready == number]
        ready += sorted(name for name, one in hosts.items() if one.ready == number and name not in before)
        bounds = self._bounds
        if len(ready) < bounds.min_hosts:
            self._forget("enough")
            if not self._has_waited("short", bounds.join_timeout_s, now):
                return None
            why = f"{len(ready)} hosts after {bounds.join_timeout_s:g} s, but {bounds.min_hosts} are needed"
            return EndJob(JobResult(code=1, why=why))
        self._forget("short")
        # Hosts that still stop their workers are waited for, and so are the dead, until their sessions end. The last
        # call is for hosts that start with the job; later ones are added to a round that runs.
        last_call_s = bounds.last_call_s if last is None else 0.0
        wait_s = last_call_s if len(ready) == len(hosts) else max(last_call_s, _STOP_S)
        if len(ready) < bounds.max_hosts and not self._has_waited("enough", wait_s, now):
            return None
        chosen = ready[: bounds.max_hosts]
        restarts = self._restarts(entries, hosts, last, ready)
        if restarts > bounds.max_restarts:
            closed = msgspec.json.decode(entries[f"closed/{number - 1}"], type=Closed)
            return EndJob(JobResult(code=closed.code, why=closed.why))
        first = hosts[chosen[0]]
        return OpenRound(
            Round(
                number=number,
                members=tuple(
                    Member(host=name, workers=hosts[name].workers, incarnation=hosts[name].incarnation)
                    for name in chosen
                ),
                master_address=first.address,
                master_port=first.port,
                restarts=restarts,
                by=self._host,
            )
        )

    def _restarts(
        self, entries: Mapping[str, bytes], hosts: Mapping[str, HostRecord], last: Round | None, ready: list[str]
    ) -> int:
        """A failure counts if no host went away with it: workers fail when a peer's host dies, too."""
        if last is None:
            return 0
        closed = msgspec.json.decode(entries[f"closed/{last.number}"], type=Closed)
        all_here = all(one.host in ready and _lives(one, hosts) for one in last.members)
        return last.restarts + (1 if closed.is_failure and all_here else 0)

    # ------------------------------------------------------------------ time

    def _has_waited(self, what: str, wait_s: float, now: float) -> bool:
        due = self._since.setdefault(what, now) + wait_s
        if due > now:
            self.wake_at = due if self.wake_at is None else min(due, self.wake_at)
        return due <= now

    def _forget(self, *what: str) -> None:
        for one in what:
            self._since.pop(one, None)


def _lives(member: Member, hosts: Mapping[str, HostRecord]) -> bool:
    """Whether it is the same launcher still."""
    found = hosts.get(member.host)
    return found is not None and found.incarnation == member.incarnation


def read_hosts(entries: Mapping[str, bytes]) -> dict[str, HostRecord]:
    return {
        key.removeprefix("hosts/"): msgspec.json.decode(value, type=HostRecord)
        for key, value in entries.items()
        if key.startswith("hosts/")
    }


def newest_round(entries: Mapping[str, bytes]) -> Round | None:
    numbers = [int(key.removeprefix("rounds/")) for key in entries if key.startswith("rounds/")]
    return msgspec.json.decode(entries[f"rounds/{max(numbers)}"], type=Round) if numbers else None


def read_ended(entries: Mapping[str, bytes], number: int) -> dict[str, Ended]:
    prefix = f"ended/{number}/"
    return {
        key.removeprefix(prefix): msgspec.json.decode(value, type=Ended)
        for key, value in entries.items()
        if key.startswith(prefix)
    }
