"""The run's directory as the simulator's storage holds it: epochs with floors, reservations, manifests, journals.

Each call is one atomic operation of the real store (an exclusive creation, a listing, a delete); what takes several, as
taking over or committing does, is spread over time by `driver` and `persisting`. The rules are those of
`holdfast.checkpoint` and `holdfast.control`: who may see what is decided here, whether it was right in `checkers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.checkpoint_types import StoredCheckpoint
from holdfast.core.records import Record

__all__ = ["Disk", "Epoch", "Manifest"]


@dataclass(slots=True)
class Epoch:
    """`epochs/<n>.json`: where earlier controllers' checkpoints end, and their journals."""

    floor: int | None = None
    cuts: dict[int, int] | None = None
    """How many records of each earlier epoch count."""
    closed: bool = False
    """A later controller came before this one had settled: it never will."""


@dataclass(frozen=True, slots=True)
class Manifest:
    name: str
    index: int
    epoch: int
    iteration: int = 0
    generation: int = 0
    world_size: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Each rank's file: (iteration, sum)."""
    void: bool = False
    token: str = ""

    def stored(self) -> StoredCheckpoint:
        return StoredCheckpoint(
            name=self.name,
            index=self.index,
            iteration=self.iteration,
            generation=self.generation,
            metrics=self.metrics,
            token=self.token,
        )


class Disk:
    """Everything that outlives every process."""

    def __init__(self) -> None:
        self.epochs: dict[int, Epoch] = {}
        self.reserved: dict[str, tuple[int, int]] = {}
        """Name to (index, epoch)."""
        self.tokens: dict[str, str] = {}
        """Name to the token of its reservation."""
        self.pinned: set[str] = set()
        self.manifests: dict[str, Manifest] = {}
        self.journals: dict[int, list[Record]] = {}

    def take_epoch(self) -> int:
        epoch = max(self.epochs, default=0) + 1
        self.epochs[epoch] = Epoch()
        return epoch

    def next_index(self) -> int:
        return max((index for index, _ in self.reserved.values()), default=-1) + 1

    def close_unsettled(self, below: int) -> None:
        """Nobody who was overtaken may settle anything after this: floors are created once, by whoever is first."""
        for number, one in self.epochs.items():
            if number < below and one.floor is None:
                one.closed = True

    def settle(self, epoch: int, floor: int, cuts: dict[int, int]) -> bool:
        """Declare where earlier controllers end; False if this one was overtaken meanwhile."""
        if self.epochs[epoch].closed:
            return False
        self.epochs[epoch].floor, self.epochs[epoch].cuts = floor, cuts
        return True

    def seal(self, epoch: int, floor: int) -> None:
        """Shut what earlier controllers reserved and have not committed."""
        for name, (index, owner) in self.reserved.items():
            if name not in self.manifests and owner < epoch and index < floor:
                self.manifests[name] = Manifest(name, index, epoch, void=True, token=self.tokens[name])

    def reserve(self, epoch: int, at_least: int, custom: str | None, token: str) -> tuple[str, int] | None:
        """A name and its index; None if the custom name is taken. What an earlier controller left unfinished under it
        is cleared away."""
        if custom is not None and custom in self.reserved:
            manifest = self.manifests.get(custom)
            committed = manifest is not None and not manifest.void and not self._voids(manifest.epoch, manifest.index)
            if committed or self.reserved[custom][1] >= epoch:
                return None
            self.delete(custom)
        index = max(at_least, self.next_index())
        name = custom or f"checkpoint_{index:06d}"
        self.reserved[name], self.tokens[name] = (index, epoch), token
        return name, index

    def create(self, manifest: Manifest) -> bool:
        """False if one is there already: a tombstone."""
        if manifest.name in self.manifests or self.tokens.get(manifest.name) != manifest.token:
            return False
        self.manifests[manifest.name] = manifest
        return True

    def abandon(self, name: str, epoch: int, token: str) -> None:
        """A numbered name is shut, a custom one is free again."""
        if self.tokens.get(name) != token or name in self.manifests:
            return
        if not name.startswith("checkpoint_"):
            self.delete(name)
        else:
            self.manifests[name] = Manifest(name, self.reserved[name][0], epoch, void=True)

    def delete(self, name: str) -> None:
        self.manifests.pop(name, None)
        self.reserved.pop(name, None)
        self.tokens.pop(name, None)
        self.pinned.discard(name)

    def is_fenced(self, epoch: int, index: int) -> bool:
        """The writer's question after its manifest is there."""
        return any(
            later.floor is None or index >= later.floor for number, later in self.epochs.items() if number > epoch
        )

    def visible(self) -> list[Manifest]:
        """What counts as committed, oldest first."""
        found = [one for one in self.manifests.values() if not one.void and not self._voids(one.epoch, one.index)]
        return sorted(found, key=lambda one: one.index)

    def _voids(self, epoch: int, index: int) -> bool:
        return any(
            later.floor is not None and index >= later.floor for number, later in self.epochs.items() if number > epoch
        )

    def lengths(self, below: int) -> dict[int, int]:
        return {epoch: len(found) for epoch, found in self.journals.items() if epoch < below}

    def records(self) -> Iterator[Record]:
        """The journal that counts, in order."""
        for epoch in sorted(self.journals):
            found = self.journals[epoch]
            cuts = [
                later.cuts.get(epoch, 0) for n, later in self.epochs.items() if n > epoch and later.cuts is not None
            ]
            yield from found[: min(cuts)] if cuts else found
