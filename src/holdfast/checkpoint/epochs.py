"""The fence between controllers: what `epochs/000002.json` says about checkpoints.

Each controller creates one such file exclusively (the lease in `holdfast.control` does); it may name a
`floor`: what earlier controllers commit at that index or above is void. `catalog` hides it, `commit` tells
its own writer.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from holdfast.checkpoint.layout import EPOCHS
from holdfast.errors import Damaged, NotFound
from holdfast.storage.store import Store

__all__ = ["Fences", "read_fences"]

_NAME = re.compile(rf"{EPOCHS}/([0-9]{{6,18}})\.json\Z")
_PAUSES_S = (0.02, 0.1)


class _EpochFile(msgspec.Struct):
    epoch: int
    floor: int | None = None


@dataclass(frozen=True, slots=True)
class Fences:
    """Every controller's epoch with its floor; None is a controller that has not settled its floor yet."""

    floors: Mapping[int, int | None] = field(default_factory=dict)

    @property
    def highest(self) -> int:
        """The epoch of the controller that counts; 0 where there never was one."""
        return max(self.floors, default=0)

    def voids(self, epoch: int, index: int) -> bool:
        """Whether a checkpoint of that epoch and index came too late to count."""
        return any(floor is not None and index >= floor for later, floor in self.floors.items() if later > epoch)

    def may_void(self, epoch: int, index: int) -> bool:
        """The writer's stricter question: could a later controller already be past this checkpoint?"""
        return any(floor is None or index >= floor for later, floor in self.floors.items() if later > epoch)


def read_fences(store: Store) -> Fences:
    """What the run's controllers have declared. A damaged file is an error: nobody may guess at a fence."""
    floors: dict[int, int | None] = {}
    for entry in store.list(EPOCHS):
        if (named := _NAME.match(entry.key)) is not None:
            try:
                floors[int(named[1])] = _floor(store, entry.key)
            except NotFound:
                continue
    return Fences(floors)


def _floor(store: Store, key: str) -> int | None:
    for pause_s in (*_PAUSES_S, None):
        data = store.get(key)
        try:
            return msgspec.json.decode(data, type=_EpochFile).floor
        except msgspec.MsgspecError as error:
            if pause_s is not None:
                time.sleep(pause_s)  # some FUSE mounts show a mixture for an instant when a file is replaced
            elif not data.rstrip().endswith(b"}"):
                return None  # its controller died while creating it, where that is not atomic, and declared nothing
            else:
                raise Damaged(
                    f"{store.uri}: {key} is not what a controller wrote ({error}); restore it from a backup, or"
                    " delete it if no run is using this directory."
                ) from error
    return None
