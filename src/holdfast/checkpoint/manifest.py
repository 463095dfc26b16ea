"""The manifest: the small file whose presence commits a checkpoint, and its codec.

`.manifest.json` is one JSON object on one line whose last member, `self`, is the BLAKE3 of the same text
without that member. So it is plain JSON to every tool, and a reader can tell a whole manifest from a torn one
without knowing how any library orders keys. docs/store-format.md is the specification; `commit` writes these,
`catalog`, `restore` and `verify` trust nothing else. A manifest comes from storage, so its paths are checked here
before they are joined to a directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from blake3 import blake3

from holdfast.checkpoint.layout import WORKER_STATES, is_sidecar
from holdfast.core.checkpoint_types import FileEntry, StoredCheckpoint
from holdfast.core.decode_errors import DECODE_ERRORS
from holdfast.core.json_floats import tag_floats, untag_floats
from holdfast.errors import ConfigError, Damaged, InvalidURI, UnsupportedFormat
from holdfast.storage.keys import check_key

__all__ = [
    "FORMAT_MAJOR",
    "FORMAT_MINOR",
    "Manifest",
    "check_metrics",
    "decode",
    "encode",
    "has_valid_seal",
    "is_torn",
    "sealed",
]

FORMAT_MAJOR = 1
FORMAT_MINOR = 2

_SEAL = re.compile(rb',"self":"([0-9a-f]{64})"\}\n\Z')
_HASH = re.compile(r"[0-9a-f]{64}\Z")
_FORMAT = re.compile(r"holdfast\.checkpoint/([0-9]{1,9})\.([0-9]{1,9})\Z")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known of one committed checkpoint.

    `void` marks a tombstone: a later controller closed this name before its writer could commit.
    """

    format: str = f"holdfast.checkpoint/{FORMAT_MAJOR}.{FORMAT_MINOR}"
    name: str
    index: int
    epoch: int
    token: str
    created_at: str
    writer: str
    world_size: int = 1
    generation: int = 0
    iteration: int = 0
    parent: str | None = None
    metrics: dict[str, Any] = {}
    files: tuple[FileEntry, ...] = ()
    directories: tuple[str, ...] = ()
    """The empty directories; since format 1.1, as are the modes of files."""
    worker_states: FileEntry | msgspec.UnsetType = msgspec.UNSET
    """The file in which Holdfast saves what it needs of each rank, where there is one; since format 1.2."""
    void: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)

    @property
    def all_files(self) -> tuple[FileEntry, ...]:
        """Every file that must be there: the user's, and Holdfast's own."""
        return self.files if isinstance(self.worker_states, msgspec.UnsetType) else (*self.files, self.worker_states)

    @property
    def order(self) -> tuple[int, str]:
        """Sorts checkpoints of one run from the oldest to the newest."""
        return self.index, self.name

    @property
    def stored(self) -> StoredCheckpoint:
        """The checkpoint without its files."""
        return StoredCheckpoint(
            name=self.name,
            index=self.index,
            iteration=self.iteration,
            generation=self.generation,
            metrics=dict(self.metrics),
            size_bytes=self.size_bytes,
            token=self.token,
        )


def split_entries(entries: Iterable[FileEntry]) -> tuple[tuple[FileEntry, ...], tuple[str, ...]]:
    """The files and the empty directories among the entries of parts, each sorted by path, as a manifest lists them."""
    files = sorted((entry for entry in entries if entry.directory is not True), key=lambda entry: entry.path)
    directories = sorted(entry.path for entry in entries if entry.directory is True)
    return tuple(files), tuple(directories)


def encode(manifest: Manifest) -> bytes:
    """The manifest's bytes as they lie in storage."""
    plain = msgspec.structs.replace(manifest, metrics=tag_floats(manifest.metrics))
    return sealed(msgspec.json.encode(plain))


def sealed(body: bytes) -> bytes:
    """A JSON object with its own hash as the last member, and a line feed."""
    return body[:-1] + b',"self":"' + blake3(body).hexdigest().encode() + b'"}\n'


def has_valid_seal(data: bytes) -> bool:
    """Whether these bytes are what `sealed` gave: not torn, not altered."""
    seal = _SEAL.search(data)
    return seal is not None and blake3(data[: seal.start()] + b"}").hexdigest().encode() == seal[1]


def decode(data: bytes, where: str) -> Manifest:
    """Read a manifest; `where` names it in errors. Raises `Damaged` or `UnsupportedFormat`, never anything
    else."""
    if not has_valid_seal(data):
        raise Damaged(f"{where}: the manifest is torn or altered (its seal does not match).")
    try:
        _check_version(msgspec.json.decode(data, type=_Header).format, where)
        manifest = msgspec.json.decode(data, type=Manifest)
        _check_files(manifest.files)
        _check_worker_states(manifest.worker_states)
        _check_directories(manifest)
        return msgspec.structs.replace(manifest, metrics=untag_floats(manifest.metrics))
    except DECODE_ERRORS as error:
        raise Damaged(f"{where}: the manifest does not follow the format ({error}).") from error


def is_torn(data: bytes) -> bool:
    """Whether this is a manifest that was never finished, rather than one that was altered afterwards.

    Only filesystems without links and atomic renames (some FUSE mounts) can leave one, when a writer dies in
    `create`.
    """
    return _SEAL.search(data) is None


def check_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """The metrics as a manifest can hold them, or a `ConfigError` that says what JSON has no word for."""
    plain = dict(metrics or {})
    try:
        msgspec.json.encode(tag_floats(plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"metrics must be numbers, strings, lists and dicts, so that any reader can read them: {error}."
        ) from error
    return plain


class _Header(msgspec.Struct):
    format: str


def _check_version(text: str, where: str) -> None:
    """A newer minor version only adds fields, which are ignored; a newer major one may mean anything."""
    version = _FORMAT.match(text)
    if version is None:
        raise ValueError(f"format is {text!r}")
    if int(version[1]) > FORMAT_MAJOR:
        raise UnsupportedFormat(
            f"{where} is written in format {version[1]}, and this holdfast reads up to {FORMAT_MAJOR}:"
            " upgrade holdfast to read it."
        )


def _check_files(files: tuple[FileEntry, ...]) -> None:
    seen: set[str] = set()
    for entry in files:
        try:
            check_key(entry.path)
        except InvalidURI:
            raise ValueError(f"path {entry.path!r} leaves the directory") from None
        if is_sidecar(entry.path) or entry.path in seen:
            raise ValueError(f"path {entry.path!r} is reserved or listed twice")
        _check_digest(entry)
        if entry.mode is not msgspec.UNSET and not 0 <= entry.mode <= 0o777:
            raise ValueError(f"mode of {entry.path!r}")
        seen.add(entry.path)


def _check_worker_states(entry: FileEntry | msgspec.UnsetType) -> None:
    if isinstance(entry, msgspec.UnsetType):
        return
    if entry.path != WORKER_STATES:
        raise ValueError(f"the states of workers are in {entry.path!r}")
    _check_digest(entry)


def _check_digest(entry: FileEntry) -> None:
    if entry.size_bytes < 0 or not _HASH.match(entry.blake3):
        raise ValueError(f"size or hash of {entry.path!r}")


def _check_directories(manifest: Manifest) -> None:
    files = {entry.path for entry in manifest.files}
    for path in manifest.directories:
        try:
            check_key(path)
        except InvalidURI:
            raise ValueError(f"directory {path!r} leaves the directory") from None
        if is_sidecar(path) or path in files:
            raise ValueError(f"directory {path!r} is reserved or a file")
