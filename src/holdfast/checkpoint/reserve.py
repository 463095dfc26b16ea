"""The first step of a commit: reserve a name for this writer.

Generated names count upwards, and a lost race means the next index. A custom name is free or taken; what a
crashed or fenced writer left under it is deleted first, so that a resumed run may use the name again.
The next steps are in `upload` and `commit`.
"""

from __future__ import annotations

from functools import partial

import msgspec

from holdfast.checkpoint import layout
from holdfast.checkpoint.catalog import Catalog, visible
from holdfast.checkpoint.claims import create_once
from holdfast.checkpoint.deletion import delete_all, delete_sidecars, delete_voided
from holdfast.checkpoint.epochs import list_epochs, void_token
from holdfast.checkpoint.process_identity import describe, this_process
from holdfast.checkpoint.reservation import (
    Reservation,
    is_reserved_by,
    read_reservation,
    write_tombstone,
    writer_is_gone,
)
from holdfast.checkpoint.timestamps import now_text
from holdfast.core.backoff import backoff_s
from holdfast.core.checkpoint_types import Draft
from holdfast.errors import ConfigError, Fenced, NameTaken, Unavailable
from holdfast.runtime import current
from holdfast.storage.store import Store

__all__ = ["reserve"]

_ATTEMPTS = 200
_BACKOFF_S = 0.01
_MAX_BACKOFF_S = 0.5


def reserve(
    store: Store,
    *,
    epoch: int | None = None,
    name: str | None = None,
    at_least: int = 0,
    adopt: bool = False,
    token: str | None = None,
) -> Draft:
    """Reserve a name for a new checkpoint.

    `epoch` is the controller's (the highest there is, if None); `name` is a custom one, which
    raises `NameTaken` if a checkpoint has it; `at_least` is the smallest index allowed. `adopt` lets a custom
    name have files in it already: the user's own, put there by other means (see `upload.reference_existing`).
    `token` identifies the draft. A caller that tries again after an unknown outcome passes the same one, and gets
    the reservation that it had already made.
    """
    if name is not None:
        layout.check_name(name)
    may_be_there = token is not None
    token = token or current().token_hex(16)
    catalog = Catalog(store)
    survey = catalog.survey()
    epoch = survey.fences.highest if epoch is None else epoch
    if epoch < survey.fences.highest:
        raise Fenced(f"{store.uri}: a newer controller took the run over before a checkpoint was begun.")
    newest = next(survey.newest_first(), None)
    parent = newest.name if newest is not None else None
    if name is None:
        first = survey.next_index(at_least)
        blank = Draft(name="", index=0, epoch=epoch, token=token, parent=parent)
        # The index is taken already: by another writer, or by this one before an answer was lost.
        mine = _own(store, _numbered(blank, first - 1)) if may_be_there and first > at_least else None
        return mine or _reserve_next(store, first, blank)
    index = layout.parse_index(name)
    if index is None:
        index = survey.next_index(at_least)
    elif newest is not None and index <= newest.index and name != newest.name:
        raise ConfigError(
            f"The checkpoint name {name!r} is refused: numbered names count upwards, and {newest.name} is there;"
            f" choose {layout.checkpoint_name(survey.next_index(at_least))} or a name without a number."
        )
    draft = Draft(name=name, index=index, epoch=epoch, token=token, parent=parent)
    return _reserve_named(store, catalog, draft, adopt)


def _reserve_next(store: Store, first: int, blank: Draft) -> Draft:
    """Fill in the first free index from `first` on."""
    for index in range(first, first + _ATTEMPTS):
        draft = _numbered(blank, index)
        if _create(store, draft):
            return draft
    raise Unavailable(
        f"{store.uri}: no checkpoint name could be had in {_ATTEMPTS} tries; let fewer writers commit at once."
    )


def _numbered(blank: Draft, index: int) -> Draft:
    return msgspec.structs.replace(blank, name=layout.checkpoint_name(index), index=index)


def _own(store: Store, draft: Draft) -> Draft | None:
    """The draft as it was reserved already, with this very token; None if it was not, or was given up since."""
    found = read_reservation(store, draft.name)
    if found is None or (found.token, found.epoch) != (draft.token, draft.epoch):
        return None
    manifest = Catalog(store).read_manifest(draft.name).manifest
    if manifest is not None and manifest.void:
        return None
    return msgspec.structs.replace(draft, index=found.index)


def _reserve_named(store: Store, catalog: Catalog, draft: Draft, adopt: bool) -> Draft:
    for failures in range(1, 5):
        if not adopt and not _only_ours(store, draft.name):
            raise NameTaken(f"{store.uri} has a directory {draft.name!r} with other files in it: choose another name.")
        if _create(store, draft):
            return draft
        if (mine := _own(store, draft)) is not None:
            return mine
        if not _reclaim(store, catalog, draft, adopt, is_patient=failures < 3):
            break
        current().sleep(current().uniform(0, backoff_s(failures, _BACKOFF_S, _MAX_BACKOFF_S)))
    owner = read_reservation(store, draft.name)
    by = f" (taken by {describe(owner.writer)})" if owner is not None else ""
    raise NameTaken(f"{store.uri} has a checkpoint {draft.name!r} already{by}: choose another name.")


def _create(store: Store, draft: Draft) -> bool:
    reservation = Reservation(
        token=draft.token,
        index=draft.index,
        epoch=draft.epoch,
        created_at=now_text(),
        writer=this_process(),
    )
    created = create_once(store, layout.key_of(draft.name, layout.RESERVED), msgspec.json.encode(reservation))
    if created and max(list_epochs(store), default=0) > draft.epoch:
        # The newer controller's floor may be above this index: the claim of this name was there when it was chosen, or
        # a custom name that took the index while this writer stood still. The reservation may not have been there yet
        # when that controller voided drafts.
        raise Fenced(f"{store.uri}: a newer controller took the run over while a checkpoint was begun.")
    return created


def _only_ours(store: Store, name: str) -> bool:
    """Whether a directory is empty or reserved; any other is the user's own."""
    prefix = layout.key_of(name, "")
    paths = [entry.key.removeprefix(prefix) for entry in store.list(name)]
    signs = (layout.RESERVED, layout.MANIFEST)
    return not paths or any(path in signs or path.startswith(layout.CLAIM_PREFIX) for path in paths)


def _reclaim(store: Store, catalog: Catalog, draft: Draft, adopt: bool, *, is_patient: bool) -> bool:
    """Free a name whose writer is certainly dead and never committed; False if that is not so. A reservation that stays
    torn is removed by the run's controller: its writer died, or is fenced, and finds out before it commits. The files
    in a directory to `adopt` are the user's, who may have stored them again since."""
    entry = catalog.read_manifest(draft.name)
    if visible(entry, catalog.fences()) is not None or (entry.problem is not None and not entry.torn):
        return False
    owner = read_reservation(store, draft.name)
    if owner is None:
        if entry.manifest is not None or entry.problem is not None:
            return False
        if draft.epoch > 0 and not is_patient:
            store.delete([layout.key_of(draft.name, layout.RESERVED)])
        return True  # it was being made or removed: try again
    if not writer_is_gone(owner) and owner.epoch >= draft.epoch:
        return False
    still_ours = partial(is_reserved_by, store, draft.name, owner.token)
    is_void = entry.manifest is not None and entry.manifest.void
    if entry.manifest is None and not entry.torn:
        if not write_tombstone(store, draft.name, index=owner.index, epoch=draft.epoch, token=owner.token):
            return False
        is_void = True
    if draft.epoch > 0:  # its writer may stand still right before it creates its manifest, or that request be delayed
        void_token(store, owner.token)
    if adopt:
        delete_sidecars(store, draft.name, still_ours)
    elif is_void:
        delete_voided(store, draft.name, still_ours)
    else:
        delete_all(store, draft.name, still_ours)
    return True
