"""The reservation: the file that is created first, exclusively, and gives a name to one writer.

`reserve` creates it, `commit` checks that it is still there, `catalog` and `verify` read who wrote it. The tombstone, a
void manifest in the place of the missing one, closes a reservation for good.
"""

from __future__ import annotations

import msgspec

from holdfast.checkpoint import layout
from holdfast.checkpoint.claims import create_once
from holdfast.checkpoint.manifest import Manifest, encode
from holdfast.checkpoint.process_identity import ProcessIdentity, describe, is_dead, this_process
from holdfast.checkpoint.timestamps import now_text
from holdfast.checkpoint.upload_locks import is_uploading
from holdfast.core.decode_errors import DECODE_ERRORS
from holdfast.errors import NotFound
from holdfast.storage.store import Store

__all__ = [
    "Reservation",
    "decode_reservation",
    "is_reserved_by",
    "write_tombstone",
    "read_reservation",
    "writer_is_gone",
]


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a name, and since when."""

    format: str = "holdfast.reservation/1.0"
    token: str
    index: int
    epoch: int
    created_at: str
    writer: ProcessIdentity


def decode_reservation(data: bytes) -> Reservation | None:
    """Read a reservation; None if it is torn or somebody else's file."""
    try:
        return msgspec.json.decode(data, type=Reservation)
    except DECODE_ERRORS:
        return None


def read_reservation(store: Store, name: str) -> Reservation | None:
    """The reservation of a checkpoint's directory; None if there is none that can be read."""
    try:
        return decode_reservation(store.get(layout.key_of(name, layout.RESERVED)))
    except NotFound:
        return None


def is_reserved_by(store: Store, name: str, token: str | None) -> bool:
    """Whether the name is still reserved with this token; None: it has no reservation that can be read. Whoever deletes
    asks before each request: after a pause the name may be another writer's."""
    now = read_reservation(store, name)
    return token == (None if now is None else now.token)


def writer_is_gone(reservation: Reservation) -> bool:
    """Whether certainly no process writes to this draft any more: neither its owner, nor an agent that finishes the
    uploads of a dead controller."""
    return is_dead(reservation.writer) is True and not is_uploading(reservation.token)


def write_tombstone(store: Store, name: str, *, index: int, epoch: int, token: str) -> bool:
    """Create a void manifest. False if a manifest exists: the writer was faster."""
    tombstone = Manifest(
        name=name,
        index=index,
        epoch=epoch,
        token=token,
        created_at=now_text(),
        writer=describe(this_process()),
        world_size=0,
        void=True,
    )
    return create_once(store, layout.key_of(name, layout.MANIFEST), encode(tombstone))
