"""The reservation: the file that is created first, exclusively, and makes a name one writer's own.

`reserve` makes them, `commit` checks that its own is still there, `catalog` and `verify` read who was at
work. The tombstone, a void manifest in the place of the one that never came, shuts a reservation for good.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from holdfast.checkpoint import layout
from holdfast.checkpoint.claims import create_by_claim
from holdfast.checkpoint.manifest import Manifest, encode
from holdfast.checkpoint.process_identity import ProcessIdentity, describe, is_dead, this_process
from holdfast.checkpoint.upload_locks import is_uploading
from holdfast.core.decode_errors import DECODE_ERRORS
from holdfast.errors import AlreadyExists, NotFound
from holdfast.runtime import current
from holdfast.storage.store import Store

__all__ = [
    "Reservation",
    "age_s",
    "decode_reservation",
    "write_tombstone",
    "now_text",
    "create_once",
    "read_reservation",
    "writer_is_gone",
]


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Whose a name is, and since when."""

    format: str = "holdfast.reservation/1.0"
    token: str
    index: int
    epoch: int
    created_at: str
    writer: ProcessIdentity


def decode_reservation(data: bytes) -> Reservation | None:
    """Read a reservation or a claim; None if it is torn or somebody else's file."""
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


def writer_is_gone(reservation: Reservation) -> bool:
    """Whether certainly nobody writes to this draft any more: neither who reserved it, nor an agent that finishes the
    uploads of a dead controller."""
    return is_dead(reservation.writer) is True and not is_uploading(reservation.token)


def write_tombstone(store: Store, name: str, *, index: int, epoch: int, token: str) -> bool:
    """Put a void manifest where the missing one would go. False if a manifest is there: the writer was
    faster."""
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


def create_once(store: Store, key: str, data: bytes) -> bool:
    """Create a key that must not be there; False if it is. Of any number of concurrent callers exactly one gets True,
    also where the storage itself refuses no second creation (see `claims`)."""
    if not store.exclusive:
        return create_by_claim(store, key, data)
    try:
        store.create(key, data)
    except AlreadyExists:
        return False
    return True


def now_text() -> str:
    """The time as it stands in every file: UTC, ISO 8601."""
    return datetime.fromtimestamp(current().now(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def age_s(created_at: str) -> float:
    """Seconds since a `created_at`; 0 where it cannot be read, which lets nobody call it old."""
    try:
        then = datetime.fromisoformat(created_at)
    except ValueError:
        return 0.0
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return current().now() - then.timestamp()
