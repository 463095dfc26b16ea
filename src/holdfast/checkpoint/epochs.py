"""The fence between controllers: the files in `epochs/`.

Each controller creates `epochs/<n>.json`, which fences those before it, and then `epochs/<n>.floor.json`, which says
how far they had come: what earlier controllers commit at its floor or above is void. Both are written once and never
changed. The lease in `holdfast.control` makes them; `catalog` hides what is void, and `commit` raises for its writer.

A draft below a floor is shut by a tombstone. A custom name is used again, and the tombstone goes; then a file
`epochs/void-<token>` shuts the draft of that token, whose writer may be about to create its manifest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import msgspec

from holdfast.checkpoint.layout import EPOCHS
from holdfast.core.decode_errors import DECODE_ERRORS
from holdfast.errors import Damaged, NotFound
from holdfast.storage.store import Store

__all__ = ["Fences", "EpochFloor", "epoch_key", "floor_key", "list_epochs", "read_fences", "read_floor", "void_token"]

_NAME = re.compile(rf"{EPOCHS}/([0-9]{{6,18}})\.json\Z")
_VOID = re.compile(rf"{EPOCHS}/void-([0-9a-zA-Z]{{1,64}})\Z")


class EpochFloor(msgspec.Struct, frozen=True, kw_only=True):
    """How far earlier controllers had come when this one took over. A `floor` of None voids nothing: the controller was
    fenced before it began."""

    epoch: int
    floor: int | None
    journal_key: str = ""
    """The last segment of the journal that counts, of those that earlier controllers wrote."""
    journal_bytes: int = 0
    journal_record: int = 0
    """The last record of that segment's lease that counts. Segments without numbered records end by bytes instead."""


@dataclass(frozen=True, slots=True)
class Fences:
    """Every controller's epoch with its floor; None if the controller has not written its floor."""

    floors: Mapping[int, int | None] = field(default_factory=dict)
    void_tokens: frozenset[str] = frozenset()
    """Of drafts whose names were used again."""

    @property
    def highest(self) -> int:
        """The epoch of the controller that counts; 0 if there is none."""
        return max(self.floors, default=0)

    def voids(self, epoch: int, index: int, token: str = "") -> bool:
        """Whether a checkpoint of that epoch, index and token came too late to count."""
        return token in self.void_tokens or any(
            floor is not None and index >= floor for later, floor in self.floors.items() if later > epoch
        )

    def may_void(self, epoch: int, index: int, token: str = "") -> bool:
        """Whether a later controller may void this checkpoint: stricter than `voids`, for the writer."""
        return token in self.void_tokens or any(
            floor is None or index >= floor for later, floor in self.floors.items() if later > epoch
        )


def epoch_key(epoch: int) -> str:
    return f"{EPOCHS}/{epoch:06d}.json"


def floor_key(epoch: int) -> str:
    return f"{EPOCHS}/{epoch:06d}.floor.json"


def list_epochs(store: Store) -> dict[int, bool]:
    """Every controller's epoch, in order, with whether it has a floor file. One listing, nothing is read."""
    return _epochs_among({entry.key for entry in store.list(EPOCHS)})


def _epochs_among(keys: Set[str]) -> dict[int, bool]:
    epochs = sorted(int(named[1]) for key in keys if (named := _NAME.match(key)) is not None)
    return {epoch: floor_key(epoch) in keys for epoch in epochs}


def read_fences(store: Store) -> Fences:
    """Read the epochs and floors of the run's controllers."""
    floors: dict[int, int | None] = {}
    keys = {entry.key for entry in store.list(EPOCHS)}
    for epoch, has_floor in _epochs_among(keys).items():
        settled = read_floor(store, epoch) if has_floor else None
        floors[epoch] = settled.floor if settled is not None else None
    return Fences(floors, frozenset(named[1] for key in keys if (named := _VOID.match(key)) is not None))


def void_token(store: Store, token: str) -> None:
    """No manifest of this token counts from here on: before its tombstone goes. It cannot have counted before."""
    if _VOID.match(key := f"{EPOCHS}/void-{token}") is not None:
        store.put(key, b"{}")


def read_floor(store: Store, epoch: int) -> EpochFloor | None:
    """The floor file of an epoch; None if there is none. A damaged file is an error: a fence must not be guessed."""
    try:
        data = store.get(floor_key(epoch))
    except NotFound:
        return None
    try:
        return msgspec.json.decode(data, type=EpochFloor)
    except DECODE_ERRORS as error:
        if not data.rstrip().endswith(b"}"):
            return None  # its controller died while creating it, where that is not atomic: it declared nothing
        raise Damaged(
            f"{store.uri}: {floor_key(epoch)} is not what a controller wrote ({error}); restore it from a backup, or"
            " delete it if no run is using this directory."
        ) from error
