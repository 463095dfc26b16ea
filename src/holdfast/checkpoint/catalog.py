"""List a run's checkpoints: committed, void or damaged, and what crashed writers left.

All manifests are read here: `reserve` needs the next index and the parent, `restore` the newest checkpoint, `verify`
all of them. A checkpoint is committed if its manifest is complete and not void, and no later controller's floor (see
`epochs`) excludes it. Directories without any file of ours are the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from holdfast.checkpoint import layout
from holdfast.checkpoint.claims import Claim, decode_claim
from holdfast.checkpoint.deletion import delete_files
from holdfast.checkpoint.epochs import Fences, read_fences
from holdfast.checkpoint.manifest import Manifest, decode, is_torn
from holdfast.checkpoint.part_records import complete_draft
from holdfast.checkpoint.process_identity import is_dead
from holdfast.checkpoint.reservation import (
    Reservation,
    decode_reservation,
    is_reserved_by,
    write_tombstone,
    writer_is_gone,
)
from holdfast.errors import Damaged, NotCommitted, NotFound
from holdfast.runtime import current
from holdfast.storage.store import Entry, Store

__all__ = ["Catalog", "Leftover", "ManifestRead", "Survey", "visible"]

_THREADS = 16
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class ManifestRead:
    """The outcome of reading one directory's manifest: the manifest, or a problem, or neither if there is none."""

    name: str
    manifest: Manifest | None = None
    problem: str | None = None
    torn: bool = False


@dataclass(frozen=True, slots=True)
class Leftover:
    """A directory that a writer reserved (or claimed) and never committed."""

    name: str
    entries: tuple[Entry, ...]
    reservation: Reservation | None = None
    claim: Claim | None = None
    """The claim of a writer that had not reserved it yet."""

    @property
    def owner(self) -> Reservation | Claim | None:
        """Who wrote here and when; None if that cannot be read."""
        return self.reservation or self.claim

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)

    @property
    def has_part_records(self) -> bool:
        """Whether agents have finished parts of it for a controller that died: the next one may commit it."""
        prefix = layout.key_of(self.name, "")
        return any(layout.is_part_record(entry.key.removeprefix(prefix)) for entry in self.entries)

    @property
    def index(self) -> int | None:
        named = layout.parse_index(self.name)
        return named if named is not None or self.reservation is None else self.reservation.index


class Catalog:
    """The checkpoints of the run whose directory is the store's root. Every call reads anew."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def names(self) -> list[str]:
        """The directories that may be checkpoints."""
        return [name for name in self._store.children() if layout.is_checkpoint_like(name)]

    def read_manifest(self, name: str) -> ManifestRead:
        """Read one directory's manifest, whatever state it is in. A newer major format raises."""
        key = layout.key_of(name, layout.MANIFEST)
        try:
            data = self._store.get(key)
        except NotFound:
            return ManifestRead(name)
        try:
            return ManifestRead(name, manifest=decode(data, f"{self._store.uri}: {key}"))
        except Damaged as error:
            return ManifestRead(name, problem=str(error), torn=is_torn(data))

    def read_manifests(self) -> list[ManifestRead]:
        """The manifests of all directories, read in parallel."""
        return self._each(self.names(), self.read_manifest)

    def fences(self) -> Fences:
        return read_fences(self._store)

    def floors(self) -> dict[int, int | None]:
        """Each controller's epoch with its floor, None where it has not written one."""
        return dict(self.fences().floors)

    def committed(self, fences: Fences | None = None) -> list[Manifest]:
        """Every committed checkpoint, oldest first; `fences` are those that the run's own controller has read."""
        # Fences last: one that appeared while manifests were read must count.
        entries = self.read_manifests()
        fences = fences or self.fences()
        return sorted(
            (found for entry in entries if (found := visible(entry, fences)) is not None),
            key=lambda manifest: manifest.order,
        )

    def void(self) -> list[Manifest]:
        """Tombstones, and what fenced controllers committed too late."""
        entries = self.read_manifests()
        fences = self.fences()
        return [entry.manifest for entry in entries if entry.manifest is not None and visible(entry, fences) is None]

    def damaged(self) -> list[tuple[str, str]]:
        """Names with a manifest that was altered, and what is wrong with it."""
        return [
            (entry.name, entry.problem)
            for entry in self.read_manifests()
            if entry.problem is not None and not entry.torn
        ]

    def get(self, name: str) -> Manifest:
        """One committed checkpoint by name; `NotCommitted` or `Damaged` otherwise."""
        entry = self.read_manifest(layout.check_name(name))
        if entry.problem is not None and not entry.torn:
            raise Damaged(entry.problem)
        found = visible(entry, self.fences())
        if found is None:
            raise NotCommitted(
                f"{self._store.uri} holds no committed checkpoint {name!r}: `holdfast ckpt ls` shows those there are."
            )
        return found

    def newest(self) -> Manifest | None:
        """The newest committed checkpoint, or None."""
        return next(self.newest_first(), None)

    def newest_first(self, on_problem: Callable[[str, str], None] | None = None) -> Iterator[Manifest]:
        """Committed checkpoints from the newest on, read one by one, so that the newest costs one read.

        `on_problem` is called with the name and problem of each damaged manifest on the way.
        """
        return self.survey().newest_first(on_problem)

    def survey(self) -> Survey:
        """What `newest_first` and the next index need, in as few requests as possible."""
        names = self.names()
        custom = self._each([name for name in names if layout.parse_index(name) is None], self.read_manifest)
        return Survey(self, names, custom, self.fences())

    def leftovers(self) -> list[Leftover]:
        """What writers that never committed left, or are still writing."""
        bare = [
            entry.name
            for entry in self.read_manifests()
            if entry.manifest is None and (entry.problem is None or entry.torn)
        ]
        return [found for found in self._each(bare, self.leftover) if found is not None]

    def leftover(self, name: str) -> Leftover | None:
        """The unfinished draft in a directory without a valid manifest; None if nobody reserved or claimed
        it."""
        entries = self._store.list(name)
        prefix = layout.key_of(name, "")
        keys = [entry.key for entry in entries]
        claims = [key for key in keys if key.startswith(prefix + layout.CLAIM_PREFIX)]
        try:
            if prefix + layout.RESERVED in keys:
                reservation = decode_reservation(self._store.get(prefix + layout.RESERVED))
                return Leftover(name, tuple(entries), reservation)
            if claims:
                return Leftover(name, tuple(entries), claim=decode_claim(self._store.get(min(claims))))
        except NotFound:
            pass  # it was withdrawn or removed meanwhile
        return None

    def void_drafts(
        self, epoch: int, floor: int, wait_for_uploads: Callable[[Leftover], None] | None = None
    ) -> list[str]:
        """Commit or void every unfinished draft of earlier controllers below `floor`.

        If all ranks have left their part records, the checkpoint is committed for its dead controller. Any other draft
        gets a tombstone, so that no late writer can commit it, and its files are deleted; the index stays used.
        `wait_for_uploads` is called first for drafts whose controller died on this machine: its agents may still be
        uploading. Returns the names that were voided."""
        shut: list[str] = []
        for found in self.leftovers():
            owner = found.reservation
            if found.index is None or found.index >= floor or owner is None or owner.epoch >= epoch:
                continue
            if wait_for_uploads is not None and is_dead(owner.writer) is True:
                wait_for_uploads(found)
            dead = writer_is_gone(owner)
            if complete_draft(self._store, found.name, owner) is not None:
                continue
            if not write_tombstone(self._store, found.name, index=found.index, epoch=epoch, token=owner.token):
                continue
            shut.append(found.name)
            if self._store.exclusive or dead:
                # Without exclusive creation a late writer might still replace the tombstone: keep the files complete.
                # A later controller may have the name by now, if it is a custom one.
                delete_files(self._store, found.name, partial(is_reserved_by, self._store, found.name, owner.token))
        return shut

    def _each(self, items: Iterable[_T], action: Callable[[_T], _R]) -> list[_R]:
        """The results in order; in parallel where each one is a network request."""
        work = list(items)
        if self._store.local_root is not None:
            return [action(item) for item in work]
        return current().map_in_threads(action, work, _THREADS)


class Survey:
    """A snapshot of a run: its directory names, the manifests of custom names, and the fences."""

    def __init__(self, catalog: Catalog, names: list[str], custom: list[ManifestRead], fences: Fences) -> None:
        self._catalog = catalog
        self._names = names
        self._custom = custom
        self.fences = fences

    def newest_first(self, on_problem: Callable[[str, str], None] | None = None) -> Iterator[Manifest]:
        """See `Catalog.newest_first`."""
        numbered = sorted((index, name) for name in self._names if (index := layout.parse_index(name)) is not None)
        pending = sorted(
            (found for entry in self._custom if (found := visible(entry, self.fences)) is not None),
            key=lambda manifest: manifest.order,
        )
        for entry in self._custom:
            _report_problem(entry, on_problem)
        for order in reversed(numbered):
            while pending and pending[-1].order > order:
                yield pending.pop()
            entry = self._catalog.read_manifest(order[1])
            _report_problem(entry, on_problem)
            if (found := visible(entry, self.fences)) is not None:
                yield found
        yield from reversed(pending)

    def next_index(self, at_least: int = 0) -> int:
        """The smallest index above those of all existing directories, finished or not."""
        taken = [index for name in self._names if (index := layout.parse_index(name)) is not None]
        for entry in self._custom:
            if entry.manifest is not None:
                taken.append(entry.manifest.index)
            elif (unfinished := self._catalog.leftover(entry.name)) is not None and unfinished.index is not None:
                taken.append(unfinished.index)
        return max([at_least, *(index + 1 for index in taken)])


def visible(entry: ManifestRead, fences: Fences) -> Manifest | None:
    """The manifest if the checkpoint is committed. A copy under another name is the user's, not the run's."""
    found = entry.manifest
    if found is None or found.void or found.name != entry.name or fences.voids(found.epoch, found.index, found.token):
        return None
    return found


def _report_problem(entry: ManifestRead, on_problem: Callable[[str, str], None] | None) -> None:
    if on_problem is not None and entry.problem is not None and not entry.torn:
        on_problem(entry.name, entry.problem)
