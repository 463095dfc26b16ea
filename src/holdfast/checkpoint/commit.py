"""From a directory to a committed checkpoint: reserve, upload, commit.

The three steps are separate calls, since in a training run they happen in different processes: the controller
reserves and commits, each rank's agent uploads (see `reserve` and `upload`). `commit_directory` does all of
them in one call. Readers see the checkpoint, complete, from the moment its manifest exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import UNSET, UnsetType

from holdfast.checkpoint import layout
from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.claims import create_once
from holdfast.checkpoint.deletion import delete_files, delete_sidecars, delete_voided
from holdfast.checkpoint.epochs import read_fences
from holdfast.checkpoint.manifest import Manifest, check_metrics, encode, split_entries
from holdfast.checkpoint.process_identity import describe, this_process
from holdfast.checkpoint.reservation import is_reserved_by, read_reservation, write_tombstone
from holdfast.checkpoint.reserve import reserve as reserve
from holdfast.checkpoint.timestamps import now_text
from holdfast.checkpoint.upload import merge_parts as merge_parts
from holdfast.checkpoint.upload import reference_existing as reference_existing
from holdfast.checkpoint.upload import upload_part as upload_part
from holdfast.core.checkpoint_types import Draft as Draft
from holdfast.core.checkpoint_types import FileEntry
from holdfast.errors import ConfigError, Fenced, OutOfSpace, StorageError, Unavailable
from holdfast.storage.failures import translated
from holdfast.storage.keys import check_key
from holdfast.storage.store import OnBytes, Store

__all__ = ["abandon", "commit", "commit_directory"]

_ATTEMPTS = 10


def commit(
    store: Store,
    draft: Draft,
    files: Sequence[FileEntry],
    *,
    metrics: Mapping[str, Any] | None = None,
    world_size: int = 1,
    generation: int = 0,
    iteration: int = 0,
    created_at: str | None = None,
    worker_states: FileEntry | UnsetType = UNSET,
) -> Manifest:
    """Make the draft visible: create its manifest, exclusively. Raises `Fenced` if this writer was fenced.

    Calling it again after an unknown outcome (`Unavailable`, `OutOfSpace`) is safe: the token identifies our own
    manifest.
    """
    manifest = Manifest(
        name=draft.name,
        index=draft.index,
        epoch=draft.epoch,
        token=draft.token,
        created_at=created_at or now_text(),
        writer=describe(this_process()),
        world_size=world_size,
        generation=generation,
        iteration=iteration,
        parent=draft.parent,
        metrics=check_metrics(metrics),
        files=split_entries(files)[0],
        directories=split_entries(files)[1],
        worker_states=worker_states,
    )
    reservation = read_reservation(store, draft.name)
    if reservation is None or reservation.token != draft.token:
        raise Fenced(f"{store.uri}: the reservation of {draft.name} was cleared away by somebody who took us for dead.")
    _make_directories(store, manifest)
    for _ in range(_ATTEMPTS):
        if _create_manifest(store, draft, encode(manifest)):
            break
        if (found := _resolve_conflict(store, draft)) is not None:
            manifest = found
            break
    else:
        raise Unavailable(f"{store.uri}: {draft.name} is being written to by controllers that were taken over.")
    if read_fences(store).may_void(draft.epoch, draft.index, draft.token):
        raise Fenced(f"{store.uri}: a newer controller took the run over before {draft.name} was committed.")
    return manifest


def _make_directories(store: Store, manifest: Manifest) -> None:
    """Make the empty directories where the storage has such things: a node that streams its files could not."""
    if store.local_root is None:
        return
    for path in manifest.directories:
        stored = store.local_root / manifest.name / check_key(path)
        with translated(stored):
            stored.mkdir(parents=True, exist_ok=True)


def abandon(store: Store, draft: Draft, *, adopt: bool = False) -> None:
    """Delete the files of an uncommitted draft, ignoring errors of storage; it is invisible in any case.

    A generated name stays used, since ranks may still be uploading to it; a custom one is free again. A draft that
    turns out to be committed (its answer was lost) is kept, and so are the user's own files in a directory that was to
    be adopted.
    """
    with suppress(StorageError):
        _abandon(store, draft, free=layout.parse_index(draft.name) is None, adopt=adopt)


def commit_directory(
    store: Store,
    directory: Path,
    *,
    metrics: Mapping[str, Any] | None = None,
    name: str | None = None,
    on_bytes: OnBytes | None = None,
) -> Manifest:
    """Commit a local directory as the run's next checkpoint, or under a custom name."""
    plain = check_metrics(metrics)
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory: give one that holds the checkpoint's files.")
    if store.local_root is not None and store.local_root.resolve().is_relative_to(directory.resolve()):
        raise ConfigError(f"{directory} is or contains the run {store.local_root}: give a directory of its own.")
    draft = reserve(store, name=name)
    try:
        files = upload_part(
            store, draft, directory, rank=0, parent_files=_parent_files(store, draft), on_bytes=on_bytes
        )
        return commit(store, draft, files, metrics=plain)
    except BaseException:
        with suppress(StorageError):
            _abandon(store, draft, free=True)
        raise


def _parent_files(store: Store, draft: Draft) -> tuple[FileEntry, ...]:
    """The parent's files, which may be copied instead of uploaded; none if the parent was removed meanwhile."""
    if draft.parent is None:
        return ()
    found = Catalog(store).read_manifest(draft.parent).manifest
    return found.files if found is not None else ()


def _create_manifest(store: Store, draft: Draft, data: bytes) -> bool:
    try:
        return create_once(store, layout.key_of(draft.name, layout.MANIFEST), data)
    except StorageError:
        if _own_manifest(store, draft) is None:
            raise
        return False  # it was made, and only what came after that failed: an answer, an fsync on a full disk


def _resolve_conflict(store: Store, draft: Draft) -> Manifest | None:
    """A manifest exists already. Return it if it is ours, because an answer was lost; raise if a later controller wrote
    it. None if an earlier controller wrote it, which was paused between checking the reservation (ours since then) and
    creating its manifest: that one never counts, and is deleted."""
    found = _own_manifest(store, draft)
    if found is None:
        entry = Catalog(store).read_manifest(draft.name)
        owner = read_reservation(store, draft.name)
        if entry.manifest is None:
            late = entry.problem is None or entry.torn
        else:
            # A tombstone of another token was meant for the draft that had this name before.
            is_late = entry.manifest.void or entry.manifest.epoch < draft.epoch
            late = is_late and entry.manifest.token != draft.token
        if late and owner is not None and owner.token == draft.token and read_fences(store).highest <= draft.epoch:
            store.delete([layout.key_of(draft.name, layout.MANIFEST)])
            return None
        raise Fenced(f"{store.uri}: {draft.name} was shut by a newer controller before it was committed.")
    # The fsync of the directory may be what failed. Deleting a key that is not there repeats it, and writes nothing.
    store.delete([layout.key_of(draft.name, layout.CLAIM_KEEP)])
    return found


def _own_manifest(store: Store, draft: Draft) -> Manifest | None:
    """The manifest that commits this very draft, if it is there."""
    found = Catalog(store).read_manifest(draft.name).manifest
    return found if found is not None and found.token == draft.token and not found.void else None


def _abandon(store: Store, draft: Draft, *, free: bool, adopt: bool = False) -> None:
    if read_fences(store).highest > draft.epoch:
        return  # a newer controller may use the name again at any moment, and clears it then
    owner = read_reservation(store, draft.name)
    if owner is None or owner.token != draft.token:
        return  # removed already, and perhaps another writer's by now
    still_ours = partial(is_reserved_by, store, draft.name, draft.token)
    try:
        if not write_tombstone(store, draft.name, index=draft.index, epoch=draft.epoch, token=draft.token):
            found = Catalog(store).read_manifest(draft.name).manifest
            if found is None or not found.void:
                return
    except OutOfSpace:
        # The disk may have filled up before the tombstone was tried and after our manifest was made. If there is none,
        # deleting is what makes room: nobody but us commits this draft, unless a newer controller is at work, and we
        # no longer will.
        if _own_manifest(store, draft) is not None or read_fences(store).highest > draft.epoch:
            return
        if not adopt:
            delete_files(store, draft.name, still_ours)
    if adopt:
        delete_sidecars(store, draft.name, still_ours)
    elif free:
        delete_voided(store, draft.name, still_ours)
    else:
        delete_files(store, draft.name, still_ours)
