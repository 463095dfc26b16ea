"""Part records: commit a checkpoint whose controller died while its files were being uploaded.

An agent that has lost its controller finishes the uploads that were ordered (`agent.parts`) and then writes
`.part-<rank>.json` into the draft, last of all: what the rank's files hash to, and everything else that the manifest
must say. Each record names all ranks that gave files, so one record tells whether the set is complete. The next
controller (`Catalog.void_drafts`) creates the manifest from a complete set, and a tombstone otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from holdfast.checkpoint import layout
from holdfast.checkpoint.claims import create_once
from holdfast.checkpoint.digest import check_files
from holdfast.checkpoint.manifest import Manifest, decode, encode, has_valid_seal, sealed, split_entries
from holdfast.checkpoint.process_identity import describe, this_process
from holdfast.checkpoint.reservation import Reservation, read_reservation
from holdfast.checkpoint.timestamps import now_text
from holdfast.checkpoint.upload import merge_parts
from holdfast.core.checkpoint_types import CheckpointInfo, Draft, FileEntry
from holdfast.core.decode_errors import DECODE_ERRORS
from holdfast.core.json_floats import tag_floats, untag_floats
from holdfast.errors import Damaged, DuplicateFile, NotFound, StorageError
from holdfast.storage.store import Store

__all__ = ["PartRecord", "complete_draft", "decode_part_record", "is_complete", "is_open", "write_part_record"]


class PartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a draft, complete in storage."""

    format: str = "holdfast.part/1.0"
    token: str
    """The token of the reservation."""
    rank: int
    ranks: tuple[int, ...]
    """Every rank that gave files: the checkpoint is complete with a record of each."""
    world_size: int
    generation: int
    iteration: int
    parent: str | None = None
    metrics: dict[str, Any] = {}
    worker_states: FileEntry | msgspec.UnsetType = msgspec.UNSET
    """The file of all ranks' states (`checkpoint.worker_states`), which was there before the uploads began."""
    files: tuple[FileEntry, ...] = ()

    def agrees_with(self, other: PartRecord) -> bool:
        """Whether both describe the same checkpoint."""
        mine, theirs = (msgspec.structs.replace(one, rank=0, files=(), metrics={}) for one in (self, other))
        return mine == theirs


def write_part_record(
    store: Store, draft: Draft, info: CheckpointInfo, rank: int, files: Sequence[FileEntry], *, generation: int
) -> bool:
    """Write the record of a rank whose files are all in storage. False if the draft is not open any more."""
    if not is_open(store, draft):
        return False
    record = PartRecord(
        token=draft.token,
        rank=rank,
        ranks=tuple(sorted(info.ranks)),
        world_size=info.world_size,
        generation=generation,
        iteration=info.iteration,
        parent=draft.parent,
        metrics=tag_floats(info.metrics),
        worker_states=info.worker_states,
        files=tuple(files),
    )
    store.put(layout.key_of(draft.name, layout.part_name(rank)), sealed(msgspec.json.encode(record)))
    return True


def is_open(store: Store, draft: Draft) -> bool:
    """Whether the draft is still reserved by the same token, and neither committed nor voided."""
    owner = read_reservation(store, draft.name)
    if owner is None or owner.token != draft.token:
        return False
    try:
        store.size(layout.key_of(draft.name, layout.MANIFEST))
    except NotFound:
        return True
    return False


def decode_part_record(data: bytes) -> PartRecord | None:
    """Read a part record; None if it is torn, altered, or somebody else's file."""
    if not has_valid_seal(data):
        return None
    try:
        record = msgspec.json.decode(data, type=PartRecord)
        if not record.format.startswith("holdfast.part/1."):
            return None
        return msgspec.structs.replace(record, metrics=untag_floats(record.metrics))
    except DECODE_ERRORS:
        return None


def complete_draft(store: Store, name: str, owner: Reservation) -> Manifest | None:
    """Create the manifest of a draft whose ranks have all left their records. None if records or files are missing,
    or a manifest is there already; the draft is then as it was."""
    records = _read_records(store, name, owner.token)
    if not _are_all(records):
        return None
    first = records[min(records)]
    if not all(record.agrees_with(first) for record in records.values()):
        return None
    try:
        files, directories = split_entries(merge_parts({rank: record.files for rank, record in records.items()}))
        manifest = Manifest(
            name=name,
            index=owner.index,
            epoch=owner.epoch,
            token=owner.token,
            created_at=now_text(),
            writer=describe(this_process()),
            world_size=first.world_size,
            generation=first.generation,
            iteration=first.iteration,
            parent=first.parent,
            metrics=first.metrics,
            files=files,
            directories=directories,
            worker_states=first.worker_states,
        )
        data = encode(manifest)
        decode(data, name)  # what it says comes from storage: names outside the directory are refused here
    except (Damaged, DuplicateFile):
        return None
    if check_files(store, manifest, name=name, deep=False):
        return None
    still = read_reservation(store, name)
    if still is None or still.token != owner.token:
        return None
    if not create_once(store, layout.key_of(name, layout.MANIFEST), data):
        return None
    with suppress(StorageError):  # harmless if they stay: nobody lists them, and they are deleted with the checkpoint
        store.delete([layout.key_of(name, layout.part_name(rank)) for rank in records])
    return manifest


def is_complete(store: Store, name: str, token: str) -> bool:
    """Whether all ranks have left their records in the draft of this token."""
    return _are_all(_read_records(store, name, token))


def _are_all(records: dict[int, PartRecord]) -> bool:
    return bool(records) and set(records) == set(next(iter(records.values())).ranks)


def _read_records(store: Store, name: str, token: str) -> dict[int, PartRecord]:
    found: dict[int, PartRecord] = {}
    prefix = layout.key_of(name, "")
    for entry in store.list(name):
        if layout.is_part_record(entry.key.removeprefix(prefix)):
            with suppress(NotFound):
                record = decode_part_record(store.get(entry.key))
                if record is not None and record.token == token:
                    found[record.rank] = record
    return found
