"""Remove checkpoints, and pin them against removal.

`holdfast.core.retention` chooses what to remove; this deletes it: the manifest first, so that no reader finds a
half-deleted checkpoint; `deletion` has the order. What an interrupted removal leaves is a leftover like any other. A
pin is a file of its own, so that it can be set and removed without touching the manifest.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec

from holdfast.checkpoint import layout
from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.claims import create_once
from holdfast.checkpoint.deletion import delete_part_records, delete_rest
from holdfast.checkpoint.manifest import Manifest, encode
from holdfast.checkpoint.process_identity import describe, is_dead, this_process
from holdfast.checkpoint.reservation import Reservation, is_reserved_by, read_reservation
from holdfast.checkpoint.timestamps import now_text
from holdfast.errors import NotCommitted, NotFound, OutOfSpace, Pinned
from holdfast.storage.store import Store

__all__ = ["is_pinned", "pin", "remove", "unpin"]


def remove(store: Store, name: str, *, token: str | None = None, check_lease: Callable[[], None] | None = None) -> None:
    """Delete one checkpoint, committed or damaged; unfinished drafts are `repair`'s.

    `token` is the manifest's that the caller decided about (None: whichever is there), and `check_lease` raises if the
    caller may not decide any more: both are checked right before the manifest goes, and the token again between
    deletions, so that a controller that was paused in here does not delete what its successor committed under the same
    name. With a token, a removal that was interrupted after the manifest had gone is finished. Raises `Pinned`, and
    `NotCommitted` where that checkpoint is not there (any more).
    """
    layout.check_name(name)
    reservation = read_reservation(store, name)
    owner = None if reservation is None else reservation.token
    if check_lease is not None:
        check_lease()
    if is_pinned(store, name):
        raise _pinned(store, name)
    if check_lease is None and reservation is not None:
        _sign(store, name, reservation)
    delete_part_records(store, name)
    entry = Catalog(store).read_manifest(name)
    if entry.manifest is not None or (entry.problem is not None and not entry.torn):
        found = owner if entry.manifest is None else entry.manifest.token
        if token is not None and found != token:
            raise NotCommitted(f"{store.uri}: the checkpoint {name!r} to be removed was replaced by another.")
        store.delete([layout.key_of(name, layout.MANIFEST)])
    elif token is None or owner != token:
        raise NotCommitted(
            f"{store.uri} holds no checkpoint {name!r} to remove: `holdfast ckpt verify --repair` clears leftovers."
        )

    still_ours = partial(is_reserved_by, store, name, owner)
    if entry.manifest is not None and is_pinned(store, name) and still_ours() and _restore(store, entry.manifest):
        raise _pinned(store, name)
    delete_rest(store, name, still_ours)


def _restore(store: Store, manifest: Manifest) -> bool:
    """Create the manifest of a checkpoint again that was pinned while it was being removed. `pin` writes its file
    before it looks for the manifest: if it found one, the remover finds the pin after the deletion."""
    return create_once(store, layout.key_of(manifest.name, layout.MANIFEST), encode(manifest))


def _pinned(store: Store, name: str) -> Pinned:
    return Pinned(f"{store.uri}: {name} is pinned: `holdfast ckpt unpin` it before it is removed.")


def _sign(store: Store, name: str, reservation: Reservation) -> None:
    """Write this process as the owner into the reservation of a committed checkpoint, if there is space for that.

    Should this process die half-way, `repair` then need not wait for the end of a writer that still lives. What a
    controller removes is its own or of an earlier epoch, which `repair` knows without that.
    """
    if is_dead(reservation.writer) is True or reservation.writer == this_process():
        return
    found = Catalog(store).read_manifest(name).manifest
    if found is not None and found.token == reservation.token:
        mine = msgspec.structs.replace(reservation, writer=this_process())
        with suppress(OutOfSpace):
            store.put(layout.key_of(name, layout.RESERVED), msgspec.json.encode(mine))


def pin(store: Store, name: str) -> None:
    """Keep a committed checkpoint from retention and removal."""
    Catalog(store).get(name)
    note = {"pinned_at": now_text(), "by": describe(this_process())}
    key = layout.key_of(name, layout.PINNED)
    store.put(key, msgspec.json.encode(note))
    try:
        Catalog(store).get(name)
    except NotCommitted:
        store.delete([key])  # it was being removed: the pin came too late, and must not stay behind alone
        raise


def unpin(store: Store, name: str) -> None:
    """Remove the pin; no error if there is none."""
    Catalog(store).get(name)
    store.delete([layout.key_of(name, layout.PINNED)])


def is_pinned(store: Store, name: str) -> bool:
    try:
        store.size(layout.key_of(name, layout.PINNED))
    except NotFound:
        return False
    return True
