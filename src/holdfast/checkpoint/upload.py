"""The second step of a commit: upload the files to the draft, in parallel, and return their sizes and hashes.

Any number of ranks may each add a directory, or files in memory, to one draft, from independent processes; `commit`
merges what they return. A file that the parent checkpoint has already is copied inside the storage.
What is returned always describes the bytes that are stored, even if the user's file changes meanwhile.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from holdfast.checkpoint import layout
from holdfast.checkpoint.claims import decode_claim
from holdfast.checkpoint.known_files import process_wide
from holdfast.checkpoint.manifest import decode, has_valid_seal
from holdfast.checkpoint.reservation import decode_reservation
from holdfast.core.checkpoint_types import Draft, FileEntry
from holdfast.errors import AlreadyExists, CheckpointError, ConfigError, Damaged, DuplicateFile, NotFound
from holdfast.runtime import current
from holdfast.storage.failures import translated
from holdfast.storage.files import set_mode
from holdfast.storage.hashing import digest_file, digest_memory, new_hasher, sample_memory, size_of
from holdfast.storage.store import Digest, InMemory, OnBytes, Source, Store

__all__ = ["merge_parts", "owned_by_others", "reference_existing", "upload_memory", "upload_part"]


def upload_part(
    store: Store,
    draft: Draft,
    directory: Path,
    *,
    rank: int,
    parent_files: Sequence[FileEntry] | None,
    hash_only: Collection[str] = (),
    threads: int = 4,
    on_bytes: OnBytes | None = None,
    on_sent: OnBytes | None = None,
) -> list[FileEntry]:
    """Upload one rank's directory to a draft; the entries are sorted by path.

    `parent_files` are those of the checkpoint `draft.parent`; the paths in `hash_only` are hashed and not stored,
    since another rank stores its file of that name.
    `on_bytes` counts copied bytes too; `on_sent` only what was really sent.
    """
    files, empty = _files_below(directory)
    metadata = files.pop(layout.METADATA, None)
    part = _PartUpload(store, draft, rank, parent_files or (), on_bytes, on_sent, hash_only=hash_only)
    entries = part.run(files, threads)
    entries += part.add_directories(empty)
    if metadata is not None:
        _carry_metadata(store, draft, metadata, rank)
    return entries


def upload_memory(
    store: Store,
    draft: Draft,
    files: Mapping[str, memoryview],
    *,
    rank: int,
    parent_files: Sequence[FileEntry] | None,
    samples: MutableMapping[str, str] | None = None,
    hash_only: Collection[str] = (),
    threads: int = 4,
    on_bytes: OnBytes | None = None,
    on_sent: OnBytes | None = None,
) -> list[FileEntry]:
    """Like `upload_part`, for files in memory that nobody changes before this returns.

    `samples` is state that the caller keeps from one checkpoint to the next: it shows which files have certainly
    changed, so that these are hashed while they are written and not before.
    """
    if reserved := sorted(path for path in files if layout.is_sidecar(path)):
        raise ConfigError(f"{reserved[0]} is a name that holdfast keeps for itself: choose another.")
    part = _PartUpload(store, draft, rank, parent_files or (), on_bytes, on_sent, samples, hash_only)
    return part.run({path: InMemory(view) for path, view in files.items()}, threads)


def owned_by_others(names: Mapping[int, Collection[str]]) -> dict[int, frozenset[str]]:
    """Of each rank's file names, those that a lower rank gives as well: that rank's file is kept, and this one's only
    hashed."""
    taken: set[str] = set()
    found: dict[int, frozenset[str]] = {}
    for rank in sorted(names):
        found[rank] = frozenset(taken.intersection(names[rank]))
        taken.update(names[rank])
    return found


def merge_parts(parts: Mapping[int, Sequence[FileEntry]]) -> tuple[FileEntry, ...]:
    """All ranks' files in one list, sorted by path.

    Of files with the same name the lowest rank's counts; where bytes differ, its entry names the other ranks. The other
    ranks must have hashed theirs and not stored it (`owned_by_others`): `DuplicateFile` if nobody knows whose is there.
    """
    merged: dict[str, FileEntry] = {}
    for rank in sorted(parts):
        for entry in parts[rank]:
            kept = merged.setdefault(entry.path, entry)
            if kept is entry and entry.hash_only is True:
                raise DuplicateFile(f"Rank {rank}'s file {entry.path!r} was not stored, nor was a lower rank's.")
            if kept is entry or kept.directory is entry.directory is True:
                continue
            if entry.hash_only is not True and entry.differs_from(kept):
                raise DuplicateFile(
                    f"Ranks {kept.rank} and {rank} both stored {entry.path!r}: give each rank's file a name of its own,"
                    " for example with the rank in it."
                )
            if entry.differs_from(kept):
                others = () if isinstance(kept.differing_ranks, UnsetType) else kept.differing_ranks
                merged[entry.path] = replace(kept, differing_ranks=(*others, rank))
    return tuple(merged[path] for path in sorted(merged))


def reference_existing(store: Store, name: str, *, on_bytes: OnBytes | None = None) -> list[FileEntry]:
    """Entries for files that the user has stored below `name` by other means; each is read once to hash it."""
    prefix = layout.key_of(name, "")
    entries: list[FileEntry] = []
    for entry in store.list(name):
        path = entry.key.removeprefix(prefix)
        if not layout.is_sidecar(path):
            found = process_wide.read_digest(store, entry.key, on_bytes)
            mode = UNSET if store.local_root is None else _mode_of(store.local_root / entry.key)
            entries.append(FileEntry(path=path, size_bytes=found.size_bytes, blake3=found.blake3, mode=mode))
    return entries


class _Cancelled(CheckpointError):
    """A file's upload was given up because another file's failed."""


class _PartUpload:
    """One rank's upload: what all its threads share."""

    def __init__(
        self,
        store: Store,
        draft: Draft,
        rank: int,
        parent_files: Sequence[FileEntry],
        on_bytes: OnBytes | None,
        on_sent: OnBytes | None,
        samples: MutableMapping[str, str] | None = None,
        hash_only: Collection[str] = (),
    ) -> None:
        self._hash_only = frozenset(hash_only)
        self._on_sent = on_sent
        self._samples = {} if samples is None else samples
        self._store = store
        self._draft = draft
        self._rank = rank
        self._on_bytes = on_bytes
        self._files = process_wide
        self._failed = threading.Event()
        self._cause: BaseException | None = None
        self._known: dict[Digest, str] = {}
        if draft.parent is not None:
            for entry in parent_files:
                self._known[Digest(entry.size_bytes, entry.blake3)] = layout.key_of(draft.parent, entry.path)
        self._known_sizes = {digest.size_bytes for digest in self._known}

    def run(self, files: Mapping[str, Source], threads: int) -> list[FileEntry]:
        """Upload all files, largest first, so that no thread is left with a large one at the end. While one file is
        written, another thread hashes the next."""
        order = sorted(files.items(), key=lambda item: size_of(item[1]), reverse=True)
        if threads < 2 or len(order) < 2:
            return sorted((self._one(*item) for item in order), key=lambda entry: entry.path)
        try:
            entries = current().map_in_threads(lambda item: self._guarded(*item), order, threads)
        except _Cancelled:
            if self._cause is not None:
                raise self._cause from None  # the first error, not the cancellations that it caused
            raise
        return sorted(entries, key=lambda entry: entry.path)

    def add_directories(self, paths: Sequence[str]) -> list[FileEntry]:
        """The entries of empty directories, which are made where the storage has such things."""
        root = self._store.local_root
        for path in paths:
            if root is not None:
                stored = root / self._draft.name / path
                with translated(stored):
                    stored.mkdir(parents=True, exist_ok=True)
        empty = new_hasher().hexdigest()
        return [FileEntry(path=path, size_bytes=0, blake3=empty, rank=self._rank, directory=True) for path in paths]

    def _guarded(self, path: str, source: Source) -> FileEntry:
        try:
            return self._one(path, source)
        except BaseException as error:
            if not self._failed.is_set():
                self._cause = error
            self._failed.set()
            raise

    def _one(self, path: str, source: Source) -> FileEntry:
        key = layout.key_of(self._draft.name, path)
        try:
            mode = UNSET if isinstance(source, InMemory) else _mode_of(source)
            if path in self._hash_only:
                digest = self._digest(source)
                return FileEntry(
                    path=path, size_bytes=digest.size_bytes, blake3=digest.blake3, rank=self._rank, hash_only=True
                )
            found = self._digest_if_worth_while(path, source)
            if found is not None and self._copied(key, found, mode):
                digest = found
            else:
                if isinstance(source, InMemory):
                    source = InMemory(source.view, found)
                digest = self._store.upload(key, source, self._sent)
                self._set_mode(key, mode)
                self._files.wrote(self._store, key, digest)
        except OSError as error:
            raise CheckpointError(
                f"{source} could not be read ({error.strerror}): keep it until report returns."
            ) from error
        return FileEntry(path=path, size_bytes=digest.size_bytes, blake3=digest.blake3, rank=self._rank, mode=mode)

    def _digest_if_worth_while(self, path: str, source: Source) -> Digest | None:
        """The source's digest, if the parent may have the same bytes; None otherwise."""
        seen = self._samples.get(path)
        if isinstance(source, InMemory):
            self._samples[path] = sample = sample_memory(source.view)
        if size_of(source) not in self._known_sizes:
            return None
        if isinstance(source, InMemory) and seen is not None and seen != sample:
            return None
        return self._digest(source)

    def _digest(self, source: Source) -> Digest:
        if isinstance(source, InMemory):
            return digest_memory(source.view, self._check_cancelled)
        return digest_file(source)

    def _set_mode(self, key: str, mode: int | UnsetType) -> None:
        """Give a stored file the permissions of the user's file, where the storage has any: it is read in place."""
        root = self._store.local_root
        if root is not None and not isinstance(mode, UnsetType):
            set_mode(root / key, mode)

    def _copied(self, key: str, digest: Digest, mode: int | UnsetType) -> bool:
        """Whether the parent had the same bytes and they are under `key` now."""
        origin = self._known.get(digest)
        if origin is None:
            return False
        try:
            if not self._has_mode(origin, mode) or not self._holds(origin, digest):
                return False  # the parent's file may be damaged; ours is not
            self._store.copy(origin, key)
        except NotFound:
            return False  # the parent was removed meanwhile
        for stored in (origin, key):  # a hard link changes the version of both
            self._files.wrote(self._store, stored, digest)
        self._progress(digest.size_bytes)
        return True

    def _has_mode(self, origin: str, mode: int | UnsetType) -> bool:
        """Whether the parent's file has the permissions of ours: a hard link shares them."""
        root = self._store.local_root
        return root is None or isinstance(mode, UnsetType) or _mode_of(root / origin) == mode

    def _holds(self, origin: str, digest: Digest) -> bool:
        """Whether the parent's file certainly holds these bytes, whatever its manifest says.

        In doubt it is hashed if it is local; elsewhere sending our own bytes is as cheap as reading its bytes."""
        if self._store.local_root is None:
            return self._files.digest(self._store, origin) == digest
        return self._files.read_digest(self._store, origin, self._check_cancelled) == digest

    def _check_cancelled(self, count: int) -> None:
        """Called for each hashed block: raise if the upload was cancelled."""
        self._progress(0)

    def _sent(self, count: int) -> None:
        self._progress(count)
        if self._on_sent is not None:
            self._on_sent(count)

    def _progress(self, count: int) -> None:
        if self._failed.is_set():
            raise _Cancelled("This upload was abandoned, since another file's failed.")
        if self._on_bytes is not None:
            self._on_bytes(count)


def _carry_metadata(store: Store, draft: Draft, source: Path, rank: int) -> None:
    """Store the directory's metadata as the checkpoint's. Rank 0's values win; other ranks add keys that it lacks."""
    key = layout.key_of(draft.name, layout.METADATA)
    data = source.read_bytes()
    if rank == 0:
        store.put(key, data)
        return
    try:
        store.create(key, data)
    except AlreadyExists:
        return


def _mode_of(path: Path) -> int:
    """The permission bits that are kept: the file's own, and that its owner may read it back."""
    return stat.S_IMODE(path.stat().st_mode) & 0o777 | stat.S_IRUSR


def _files_below(directory: Path) -> tuple[dict[str, Path], list[str]]:
    """Every file below a directory by its `/`-separated path, and every empty directory. Symlinks are followed."""
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory: give one that holds the checkpoint's files.")
    found: dict[str, Path] = {}
    empty: list[str] = []
    _walk(directory, "", (), found, empty)
    for path in [path for path in found if layout.is_sidecar(path) and path != layout.METADATA]:
        if not _is_ours(path, found[path]):
            raise ConfigError(f"{found[path]} has a name that holdfast keeps for itself: rename the file.")
        del found[path]  # the directory is itself a checkpoint, or a copy of one: the new one gets its own
    return found, empty


def _walk(
    directory: Path, prefix: str, above: tuple[tuple[int, int], ...], found: dict[str, Path], empty: list[str]
) -> None:
    here = directory.stat()
    identity = (here.st_dev, here.st_ino)
    if identity in above:
        raise ConfigError(f"{directory} is a symbolic link to a directory above it: remove the link.")
    entries = list(_entries(directory))
    if not entries and prefix:
        empty.append(prefix.rstrip("/"))
    for entry in entries:
        path = prefix + entry.name
        try:
            path.encode()
            mode = entry.stat().st_mode
        except UnicodeEncodeError:
            raise ConfigError(f"{directory} has a file name that is not valid Unicode ({path!r}): rename it.") from None
        except FileNotFoundError:
            raise ConfigError(f"{entry.path} is a symbolic link to nothing: remove it, or mend its target.") from None
        if stat.S_ISDIR(mode):
            _walk(Path(entry.path), path + "/", (*above, identity), found, empty)
        elif stat.S_ISREG(mode):
            found[path] = Path(entry.path)
        else:
            raise ConfigError(
                f"{entry.path} is no plain file (a socket, pipe or device): remove it from the checkpoint."
            )


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        yield from sorted(entries, key=lambda entry: entry.name)


def _is_ours(path: str, source: Path) -> bool:
    """Whether a file of a reserved name really is one of our sidecars."""
    checks: dict[str, Callable[[bytes], object]] = {
        layout.MANIFEST: lambda data: decode(data, path),
        layout.PINNED: lambda data: True,
        layout.WORKER_STATES: lambda data: data.startswith(b'{"format":"holdfast.workers/'),
    }
    if layout.is_part_record(path):
        return has_valid_seal(source.read_bytes())
    if path.startswith(layout.CLAIM_PREFIX):
        return path == layout.CLAIM_KEEP or decode_claim(source.read_bytes()) is not None
    try:
        return bool(checks.get(path, decode_reservation)(source.read_bytes()))
    except Damaged:
        return False
