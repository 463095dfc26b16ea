"""Carrying out `FindPins` and `DeleteCheckpoint`: what the core decided to let go, looked at again and removed.

Whatever storage or users did is an outcome for the core (`core.removal`), never an error of the run: a checkpoint that
somebody has pinned, removed or replaced meanwhile is left alone. Only a lost lease is more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from holdfast.checkpoint import removal
from holdfast.checkpoint.catalog import Catalog
from holdfast.control.blocking_calls import BlockingCalls
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.errors import Fenced, HoldfastError, NotCommitted, Pinned, StorageError
from holdfast.runtime import current
from holdfast.storage.store import Store

__all__ = ["Remover"]

_THREADS = 16


class Remover:
    """Removes checkpoints of one run as long as `check_lease` does not raise `Fenced`. `also_pinned` names those that
    stay although no user has pinned them."""

    def __init__(
        self,
        store: Store,
        check_lease: Callable[[], None],
        blocking: BlockingCalls,
        also_pinned: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._store = store
        self._check_lease = check_lease
        self._blocking = blocking
        self._also_pinned = also_pinned

    async def find_pins(self, command: c.FindPins) -> e.PinsFound:
        """Which of the checkpoints are pinned now."""
        try:
            found = await self._blocking.run(self._pinned, command.names)
            return e.PinsFound(pinned=tuple(sorted({*found, *self._also_pinned()})))
        except StorageError as error:
            return e.PinsFound(error=str(error))

    async def remove(self, command: c.DeleteCheckpoint) -> e.CheckpointRemoved | e.CheckpointKept | e.ControllerFenced:
        """Remove one checkpoint, unless it is pinned, gone, or another's by now."""
        name, token = command.name, command.token
        try:
            await self._blocking.run(removal.remove, self._store, name, token=token, check_lease=self._check_lease)
        except Fenced as error:
            return e.ControllerFenced(why=str(error))
        except Pinned:
            return e.CheckpointKept(name=name, token=token, pinned=True)
        except NotCommitted:
            return e.CheckpointRemoved(name=name, token=token, by_others=True)
        except HoldfastError as error:
            invisible = await self._blocking.run(self._is_invisible, name, token)
            return e.CheckpointKept(name=name, token=token, error=str(error), invisible=invisible)
        return e.CheckpointRemoved(name=name, token=token)

    def _pinned(self, names: Sequence[str]) -> tuple[str, ...]:
        if self._store.local_root is not None:
            return tuple(name for name in names if removal.is_pinned(self._store, name))
        found = current().map_in_threads(partial(removal.is_pinned, self._store), names, _THREADS)
        return tuple(name for name, pinned in zip(names, found, strict=True) if pinned)

    def _is_invisible(self, name: str, token: str) -> bool:
        """Whether readers no longer find the checkpoint; False where storage does not tell."""
        try:
            found = Catalog(self._store).read_manifest(name).manifest
        except HoldfastError:
            return False
        return found is None or found.token != token
