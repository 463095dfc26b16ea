"""Letting checkpoints go, and keeping some from ever going.

`holdfast.core.retention` chooses, this deletes: the manifest first, so that no reader finds a half-deleted
checkpoint; `erase` has the order. A pin is a file of its own, so that it can be set and lifted without touching the
manifest.
"""

from __future__ import annotations

import msgspec

from holdfast.checkpoint import layout
from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.erase import erase
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.reservation import Reservation, now_text, read_reservation
from holdfast.checkpoint.writer import describe, this_process
from holdfast.errors import CheckpointError, NotCommitted, NotFound
from holdfast.storage.store import Store

__all__ = ["is_pinned", "pin", "remove", "unpin"]


def remove(store: Store, name: str) -> None:
    """Delete one checkpoint, committed or damaged. A pinned one is refused; unfinished drafts are `repair`'s."""
    look = Catalog(store).look(layout.check_name(name))
    if look.manifest is None and (look.problem is None or look.torn):
        raise NotCommitted(
            f"{store.uri} holds no checkpoint {name!r} to remove: `holdfast ckpt verify --repair` clears leftovers."
        )
    if is_pinned(store, name):
        raise CheckpointError(f"{store.uri}: {name} is pinned: `holdfast ckpt unpin` it before it is removed.")
    owner = _taken_over(look.manifest) if look.manifest is not None else read_reservation(store, name)
    if owner is not None:
        # Should we die half-way, what is left is ours, so that `repair` need not wait for the writer's death.
        mine = msgspec.structs.replace(owner, writer=this_process())
        store.put(layout.key_of(name, layout.RESERVED), msgspec.json.encode(mine))
    erase(store, name)


def _taken_over(manifest: Manifest) -> Reservation:
    return Reservation(
        token=manifest.token,
        index=manifest.index,
        epoch=manifest.epoch,
        created_at=manifest.created_at,
        writer=this_process(),
    )


def pin(store: Store, name: str) -> None:
    """Keep a committed checkpoint from retention and removal."""
    Catalog(store).get(name)
    note = {"pinned_at": now_text(), "by": describe(this_process())}
    store.put(layout.key_of(name, layout.PINNED), msgspec.json.encode(note))


def unpin(store: Store, name: str) -> None:
    """Lift the pin; no error if there is none."""
    Catalog(store).get(name)
    store.delete([layout.key_of(name, layout.PINNED)])


def is_pinned(store: Store, name: str) -> bool:
    try:
        store.size(layout.key_of(name, layout.PINNED))
    except NotFound:
        return False
    return True
