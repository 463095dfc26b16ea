"""Check that committed checkpoints are unchanged, and delete what crashed writers left.

`verify` reads and reports; `repair` deletes what crashed writers left, and only that: damaged checkpoints and the
user's own directories are never touched. The command line's `holdfast ckpt verify [--repair]` is made of the two.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from holdfast.checkpoint import layout
from holdfast.checkpoint.catalog import Catalog, Leftover, ManifestRead, visible
from holdfast.checkpoint.deletion import (
    StillOurs,
    delete_all,
    delete_files,
    delete_temporaries,
    delete_voided,
)
from holdfast.checkpoint.digest import check_files
from holdfast.checkpoint.epochs import Fences
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.process_identity import is_dead
from holdfast.checkpoint.reservation import (
    Reservation,
    is_reserved_by,
    read_reservation,
    write_tombstone,
    writer_is_gone,
)
from holdfast.checkpoint.timestamps import age_s
from holdfast.checkpoint.upload_locks import is_uploading
from holdfast.errors import NotCommitted, OutOfSpace
from holdfast.storage.store import OnBytes, Store

__all__ = ["VerifyReport", "repair", "verify"]

_DAY_S = 24 * 3600.0
_TORN_S = 60.0


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found; `damaged` maps a name to its problems."""

    ok: list[Manifest] = field(default_factory=list)
    damaged: dict[str, list[str]] = field(default_factory=dict)
    leftovers: list[Leftover] = field(default_factory=list)
    void: list[Manifest] = field(default_factory=list)

    @property
    def intact(self) -> bool:
        """Whether every committed checkpoint is whole; leftovers do no harm."""
        return not self.damaged


def verify(
    store: Store,
    names: Iterable[str] | None = None,
    deep: bool = True,
    on_bytes: OnBytes | None = None,
    threads: int = 4,
) -> VerifyReport:
    """Check these checkpoints, or all there are. `deep` reads every byte; otherwise presence and sizes count."""
    catalog = Catalog(store)
    if names is None:
        entries = catalog.read_manifests()
    else:
        entries = [catalog.read_manifest(layout.check_name(name)) for name in names]
    fences = catalog.fences()
    report = VerifyReport()
    for entry in entries:
        if (found := visible(entry, fences)) is not None:
            problems = check_files(store, found, name=entry.name, deep=deep, threads=threads, on_bytes=on_bytes)
            if problems and catalog.read_manifest(entry.name).manifest is None:
                continue  # it was removed while we read
            if problems:
                report.damaged[entry.name] = problems
            else:
                report.ok.append(found)
        elif entry.manifest is not None:
            if entry.manifest.name == entry.name:
                report.void.append(entry.manifest)
        elif entry.problem is not None and not entry.torn:
            report.damaged[entry.name] = [entry.problem]
        elif (leftover := catalog.leftover(entry.name)) is not None:
            report.leftovers.append(leftover)
        elif names is not None:
            raise NotCommitted(
                f"{store.uri} holds no checkpoint {entry.name!r}: `holdfast ckpt ls` shows those there are."
            )
    report.ok.sort(key=lambda manifest: manifest.order)
    return report


def repair(store: Store, report: VerifyReport, older_than_s: float = _DAY_S) -> list[str]:
    """Delete leftovers whose writer is certainly gone, or which are older than this; returns what was removed.

    Gone means: it died on this machine, or its controller was replaced. If it may merely be slow, a tombstone is
    written first, so that it cannot commit, and stays until a later repair finds the tombstone old as well. Whose
    the name is by now is looked at before each deletion: a driver that runs may use a custom one again.
    """
    fences = Catalog(store).fences()
    removed = [found.name for found in report.leftovers if _repair_leftover(store, found, fences, older_than_s)]
    removed += [found.name for found in report.void if _repair_void(store, found, older_than_s)]
    return removed + delete_temporaries(store, "", older_than_s)


def _repair_leftover(store: Store, seen: Leftover, fences: Fences, older_than_s: float) -> bool:
    entry = Catalog(store).read_manifest(seen.name)
    found = Catalog(store).leftover(seen.name) if _unfinished(entry) else None
    if found is None:
        return False  # it was committed, or removed, since the report
    if found.claim is not None:
        if is_dead(found.claim.writer) is not True and age_s(found.claim.created_at) < older_than_s:
            return False
        return delete_all(store, found.name, partial(is_reserved_by, store, found.name, None))
    owner = found.reservation
    still_ours = partial(is_reserved_by, store, found.name, None if owner is None else owner.token)
    if owner is None:
        # Torn as it was made, on a filesystem without links. Making one takes no minute, and a writer that is merely
        # that slow finds its reservation gone before it commits.
        if _file_age_s(store, found) < min(older_than_s, _TORN_S):
            return False
        return delete_all(store, found.name, still_ours)
    if writer_is_gone(owner) and not found.has_part_records:
        # An agent elsewhere may be finishing the uploads: the next controller may commit the draft at any moment.
        try:
            if not _shut(store, entry, owner, fences, still_ours):
                return False
        except OutOfSpace:
            pass  # deleting is what makes room
        return delete_voided(store, found.name, still_ours)
    wanted = owner.epoch >= fences.highest or found.has_part_records or is_uploading(owner.token)
    if wanted and age_s(owner.created_at) < older_than_s:
        return False
    return _shut(store, entry, owner, fences, still_ours) and delete_files(store, found.name, still_ours)


def _shut(store: Store, entry: ManifestRead, owner: Reservation, fences: Fences, still_ours: StillOurs) -> bool:
    """Write a tombstone; False if the draft was committed meanwhile, or the name is another's."""
    if not still_ours():
        return False
    if entry.torn:
        store.delete([layout.key_of(entry.name, layout.MANIFEST)])
    return write_tombstone(store, entry.name, index=owner.index, epoch=fences.highest, token=owner.token)


def _repair_void(store: Store, seen: Manifest, older_than_s: float) -> bool:
    owner = read_reservation(store, seen.name)
    gone = owner is not None and writer_is_gone(owner)
    if not gone and age_s(seen.created_at) < older_than_s:
        return False
    now = Catalog(store).read_manifest(seen.name).manifest
    if now is None or (now.token, now.void) != (seen.token, seen.void):
        return False
    still_ours = partial(is_reserved_by, store, seen.name, None if owner is None else owner.token)
    return (delete_voided if now.void else delete_all)(store, seen.name, still_ours)


def _unfinished(entry: ManifestRead) -> bool:
    return entry.manifest is None and (entry.problem is None or entry.torn)


def _file_age_s(store: Store, leftover: Leftover) -> float:
    """How long ago a directory with an unreadable reservation was last written to; 0 where nobody can tell."""
    if store.local_root is None:
        return 0.0
    written = [(store.local_root / entry.key).stat().st_mtime for entry in leftover.entries]
    return time.time() - max(written, default=time.time())
