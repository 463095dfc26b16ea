"""`.workers.json`: what Holdfast itself saves of each rank with a checkpoint, beside the user's files.

The position in each elastic loader and the states of random generators, as plain JSON by rank. Workers send theirs with
each report (`worker.session`), the controller puts the file of all ranks into the draft before any upload is ordered
(`control.persister`), and the manifest lists it apart from the user's files: it is verified like them and never copied
to a user's directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from blake3 import blake3

from holdfast.checkpoint import layout
from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.digest import mismatch
from holdfast.core.checkpoint_types import FileEntry
from holdfast.core.decode_errors import DECODE_ERRORS
from holdfast.errors import Damaged, NotFound
from holdfast.storage.store import Digest, Store

__all__ = ["WorkerStates", "put_worker_states", "read_worker_states"]

_FORMAT = "holdfast.workers/1.0"


class WorkerStates(msgspec.Struct, frozen=True, kw_only=True):
    """The states of all ranks that sent one; `world_size` is how many ranks there were."""

    format: str = _FORMAT
    world_size: int
    ranks: dict[int, dict[str, Any]]


class _Encoded(msgspec.Struct, frozen=True, kw_only=True):
    format: str = _FORMAT
    world_size: int
    ranks: dict[int, msgspec.Raw]


def put_worker_states(store: Store, name: str, world_size: int, states: Mapping[int, bytes]) -> FileEntry:
    """Store the states, each a JSON object, in the draft `name`; the entry for its manifest."""
    ranks = {rank: msgspec.Raw(states[rank]) for rank in sorted(states)}
    data = msgspec.json.encode(_Encoded(world_size=world_size, ranks=ranks)) + b"\n"
    store.put(layout.key_of(name, layout.WORKER_STATES), data)
    return FileEntry(path=layout.WORKER_STATES, size_bytes=len(data), blake3=blake3(data).hexdigest())


def read_worker_states(store: Store, name: str) -> WorkerStates | None:
    """The states that were saved with a committed checkpoint; None if none were. Raises `Damaged`."""
    entry = Catalog(store).get(name).worker_states
    if isinstance(entry, msgspec.UnsetType):
        return None
    where = store.sub(name).uri
    try:
        data = store.get(layout.key_of(name, entry.path))
    except NotFound:
        raise Damaged(f"{where}: {entry.path} is missing; use another checkpoint.", checkpoint=where) from None
    if (problem := mismatch(entry, Digest(len(data), blake3(data).hexdigest()))) is not None:
        raise Damaged(f"{where}: {problem}; use another checkpoint.", checkpoint=where)
    try:
        return msgspec.json.decode(data, type=WorkerStates)
    except DECODE_ERRORS as error:
        raise Damaged(f"{where}: {entry.path} does not follow the format ({error}).", checkpoint=where) from error
