"""Who leads a `fit()`: pure decisions from the keys that a host sees and what its script does.

    fits/<k>/leader      the elected host, while it lives
    fits/<k>/address     where its agents connect, while it lives
    fits/<k>/run         which run it is; stays, so that the next leader takes it over
    fits/<k>/result      how it ended; all hosts return it

`next_step` is asked again after every change, and gives one thing to do. It never trusts that something was done: a key
that a host once put and does not see any more is put again, so an etcd that lost its data is filled up by those who
live.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from holdfast.rendezvous.launcher_messages import FitResult, PublishedRun

__all__ = [
    "Campaign",
    "CreateResult",
    "FitState",
    "PutAddress",
    "PutRun",
    "SendLead",
    "SendResult",
    "Step",
    "current_address",
    "next_step",
    "run_of",
]


@dataclass(slots=True, kw_only=True)
class FitState:
    """What this host's script does."""

    host: str
    fit: int = 0
    """Which `fit()` it is in; 0 before the first."""
    is_waiting: bool = False
    """It was not told yet to lead, nor a result."""
    is_leading: bool = False
    run: PublishedRun | None = None
    """Of the `fit()` that it leads, once it listens."""
    address: str = ""
    result: FitResult | None = None
    """Of the `fit()` that it led."""
    may_campaign: bool = True
    """False for some time after the session was lost: a leader that lost its own, too, goes on."""
    sees_storage: bool = True
    """Whether the run that another leader has begun is in the storage that this host sees."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """Try to become the leader."""

    fit: int


@dataclass(frozen=True, slots=True)
class PutRun:
    fit: int
    run: PublishedRun


@dataclass(frozen=True, slots=True)
class PutAddress:
    fit: int
    address: str


@dataclass(frozen=True, slots=True)
class CreateResult:
    fit: int
    result: FitResult


@dataclass(frozen=True, slots=True)
class SendLead:
    run: PublishedRun | None


@dataclass(frozen=True, slots=True)
class SendResult:
    result: FitResult


Step = Campaign | PutRun | PutAddress | CreateResult | SendLead | SendResult


def next_step(state: FitState, entries: Mapping[str, bytes]) -> Step | None:
    """What to do next; None: nothing, until something changes."""
    if not state.fit:
        return None
    keys = f"fits/{state.fit}/"
    leader = entries.get(f"{keys}leader", b"").decode()
    if state.result is not None:
        return CreateResult(state.fit, state.result) if f"{keys}result" not in entries else None
    if state.is_waiting:
        if (result := entries.get(f"{keys}result")) is not None:
            return SendResult(msgspec.json.decode(result, type=FitResult))
        if leader == state.host:
            return SendLead(run_of(entries, state.fit))
        return Campaign(state.fit) if not leader and state.may_campaign and state.sees_storage else None
    if not state.is_leading:
        return None
    if not leader:
        return Campaign(state.fit)  # the rendezvous has forgotten it
    if leader != state.host or state.run is None:
        return None  # another one was elected; this one is fenced by storage
    if run_of(entries, state.fit) is None:
        return PutRun(state.fit, state.run)
    if entries.get(f"{keys}address", b"").decode() != state.address:
        return PutAddress(state.fit, state.address)
    return None


def run_of(entries: Mapping[str, bytes], fit: int) -> PublishedRun | None:
    """The run that a leader of this `fit()` has begun."""
    found = entries.get(f"fits/{fit}/run")
    return None if found is None else msgspec.json.decode(found, type=PublishedRun)


def current_address(entries: Mapping[str, bytes]) -> str | None:
    """Where agents connect: to the leader of the latest `fit()`."""
    fits = [int(key.split("/")[1]) for key in entries if key.startswith("fits/") and key.endswith("/address")]
    return entries[f"fits/{max(fits)}/address"].decode() if fits else None
