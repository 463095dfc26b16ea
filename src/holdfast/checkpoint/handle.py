"""`Checkpoint`: the user's handle of a directory, local or remote, which is downloaded on demand.

It is a name, not the bytes: making, pickling and comparing one does not access storage. A directory with a manifest is
verified before it is read (`restore`, `cache`), and one that is only reserved is refused; any other one, a user's plain
directory or another library's checkpoint, is read as it is. `holdfast.train` exports this class.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
from blake3 import blake3

from holdfast.checkpoint import layout
from holdfast.checkpoint.cache import shared_copy, shared_directory
from holdfast.checkpoint.manifest import Manifest, decode
from holdfast.checkpoint.restore import fetch_manifest, require_intact
from holdfast.core.decode_errors import DECODE_ERRORS
from holdfast.errors import ConfigError, Damaged, MissingExtra, NotCommitted, NotFound
from holdfast.storage.locate import open_store
from holdfast.storage.store import Store
from holdfast.storage.uri import AZURE_SCHEMES, is_uri, redact, scheme_of

__all__ = ["Checkpoint"]

_TYPE_NAMES = {"file": "local", "gs": "gcs", "az": "abfs", "abfss": "abfs"}


class Checkpoint:
    """A directory of files from which training can go on.

    `path` is a local path (relative, `~` and trailing slashes are fine), a URI such as `s3://bucket/run/checkpoint`,
    or, with a `filesystem` (a `pyarrow.fs.FileSystem`), a path inside that.
    """

    def __init__(self, path: str | os.PathLike[str], filesystem: Any = None) -> None:
        self._given = os.fspath(path)
        self._custom = None if getattr(filesystem, "type_name", None) == "local" else filesystem
        self._opened: Store | None = None
        self._opened_in = os.getpid()
        scheme = scheme_of(self._given) if self._custom is None else None
        if self._custom is not None:
            self._kind = str(getattr(self._custom, "type_name", "custom"))
            self._path = self._given.rstrip("/")
        elif scheme is None or scheme == "file":
            self._kind = "local"
            self._opened = open_store(self._given)
            self._given = self._path = self._opened.uri
        else:
            self._kind = _TYPE_NAMES.get(scheme, scheme)
            self._path = _path_in(self._given)

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """A checkpoint of a local directory, which must be there."""
        found = cls(path)
        if found._kind != "local":
            raise ConfigError(
                f"{redact(found._given)} is no local directory: write Checkpoint({found._path!r}) instead."
            )
        if not Path(found._path).is_dir():
            raise ConfigError(f"{found._path} is not a directory: make it, and put the checkpoint's files there first.")
        return found

    @classmethod
    def from_state(cls, state: Any) -> Checkpoint:
        """A checkpoint of a nested structure of tensors, numpy arrays and plain values, written as safetensors files.

        `train.report` copies it to the agent's memory before it returns, and training goes on while it is written.
        Whatever else is in it is refused by its path, never pickled.
        """
        from holdfast.checkpoint.state.handle import StateCheckpoint

        return StateCheckpoint(state)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Checkpoint:
        """The older name of `from_state`, for a dict. What used to be pickled here is stored as `from_state` stores
        it, or refused."""
        return cls.from_state(dict(data))

    @classmethod
    def _from_store(cls, store: Store, name: str) -> Checkpoint:
        """A checkpoint of the run whose directory is the store's root; for the runtime."""
        below = store.sub(name)
        where = str(below.local_root or below.uri)
        found = cls(where, None if below.local_root or is_uri(where) else _brought_along(below))
        found._opened = below
        return found

    @property
    def path(self) -> str:
        """A local path, or `bucket/prefix` on remote storage."""
        return self._path

    @property
    def filesystem(self) -> Any:
        """The `pyarrow.fs.FileSystem` on which `path` lies."""
        if self._custom is not None:
            return self._custom
        if self._kind == "local" and self._open().local_root is None:
            raise ConfigError(
                f"{self._path} lies on the driver's machine, which no filesystem of this one reaches: use "
                "as_directory() or to_directory()."
            )
        try:
            from holdfast.storage.arrow.store import filesystem_for

            return filesystem_for(None if self._kind == "local" else self._given)
        except MissingExtra:
            raise
        except ImportError as error:
            raise MissingExtra("Checkpoint.filesystem needs pyarrow; run: pip install 'holdfast[arrow]'") from error

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the files to a local directory (a new temporary one, if none is named) and return its path.

        Files of the same name are replaced. What has a manifest is verified on the way: `Damaged` says what is not
        what was committed.
        """
        if path is None:
            target = Path(tempfile.mkdtemp(prefix="holdfast_checkpoint_"))
        else:
            target = Path(os.path.abspath(os.path.expanduser(os.fspath(path))))  # noqa: PTH100, PTH111
        try:
            with self._naming_damage():
                self._copy_to(target)
        except BaseException:
            if path is None:
                shutil.rmtree(target, ignore_errors=True)
            raise
        return str(target)

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """The files in a local directory, to read, for as long as the block lasts. A local checkpoint is its own
        directory; a remote one is downloaded once a node and shared by all who ask.

        What was committed is verified first: `Damaged` says what is not what it was, `NotCommitted` that it never was
        committed. Files that this process has verified and nobody has written to since are not read again."""
        store = self._open()
        if store.local_root is not None:
            if not store.local_root.is_dir():
                raise NotFound(f"{self._path} does not exist: check the checkpoint's path.")
            with self._naming_damage():
                manifest = self._manifest(store)
                if manifest is not None:
                    require_intact(store, "", manifest)
            yield str(store.local_root)
            return
        with ExitStack() as held:
            with self._naming_damage():
                directory = held.enter_context(self._shared(store, self._manifest(store)))
            yield str(directory)

    def load_state(self, map_location: Any = None, into: Any = None) -> Any:
        """The state of a checkpoint that `from_state` made.

        `map_location` is the device for its tensors. `into` is a structure of tensors, such as
        `{"model": model.state_dict()}`, that are filled in place: DTensors too, on any number of ranks. What it leaves
        out at its top level is loaded afresh.
        """
        from holdfast.checkpoint.state.load import load_state

        with self.as_directory() as directory, self._naming_damage():
            return load_state(lambda name: Path(directory) / name, map_location=map_location, into=into)

    def to_dict(self) -> dict[str, Any]:
        """The older name of `load_state`, of what `from_dict` was given."""
        try:
            return dict(self.load_state())
        except NotFound as error:
            raise ConfigError(
                f"{self!r} was not made by from_dict() or from_state(): read its files with as_directory()."
            ) from error

    def get_metadata(self) -> dict[str, Any]:
        """The metadata; empty if none was set."""
        store = self._open()
        try:
            found = msgspec.json.decode(store.get(layout.METADATA))
        except NotFound:
            return {}
        except DECODE_ERRORS as error:
            raise Damaged(f"{store.uri}: {layout.METADATA} is not JSON ({error}): set the metadata again.") from error
        return dict(found)

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata: a dict of what JSON can hold."""
        try:
            data = msgspec.json.encode(_json_only(dict(metadata), "metadata"))
        except ValueError as error:
            raise TypeError(f"metadata must be what JSON can hold: {error}.") from error
        self._open().put(layout.METADATA, data)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add to the metadata; keys that are there already are replaced."""
        self.set_metadata({**self.get_metadata(), **metadata})

    def __repr__(self) -> str:
        return f"Checkpoint(filesystem={self._kind}, path={self._path})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return (self._kind, self._path) == (other._kind, other._path)

    def __hash__(self) -> int:
        return hash((self._kind, self._path))

    def __reduce__(self) -> tuple[Callable[..., Checkpoint], tuple[Any, ...]]:
        return (Checkpoint, (self._given, self._custom))

    def _open(self) -> Store:
        """The store whose root is this very directory."""
        # A worker may reach this path by another store than the process that it was forked from.
        if self._opened is None or self._opened_in != os.getpid():
            self._opened, self._opened_in = open_store(self._given, self._custom), os.getpid()
        return self._opened

    def _manifest(self, store: Store) -> Manifest | None:
        """The manifest, or None where there is neither that nor any other sign that the directory is ours."""
        try:
            return decode(store.get(layout.MANIFEST), f"{store.uri}: {layout.MANIFEST}")
        except NotFound:
            pass
        try:
            store.size(layout.RESERVED)
        except NotFound:
            return None
        raise NotCommitted(f"{store.uri} was never committed, or is being written: use another checkpoint.")

    @contextmanager
    def _naming_damage(self) -> Iterator[None]:
        """Let a `Damaged` that comes out of the block say that it is of this checkpoint."""
        try:
            yield
        except Damaged as error:
            error.checkpoint = error.checkpoint or self._open().uri
            raise

    def _copy_to(self, target: Path) -> None:
        store = self._open()
        if _same(store.local_root, target):
            return
        manifest = self._manifest(store)
        if manifest is not None:
            fetch_manifest(store, "", manifest, target)
        elif store.local_root is not None:
            _copy_plain(store.local_root, target)
        else:
            _download_plain(store, target)

    @contextmanager
    def _shared(self, store: Store, manifest: Manifest | None) -> Iterator[Path]:
        if manifest is not None:
            with shared_directory(store, manifest, name="") as directory:
                yield directory
            return
        # A checkpoint without a manifest cannot be verified: other names or sizes make it another one.
        seen = blake3(repr(store.list()).encode()).hexdigest()
        with shared_copy((store.uri, "", seen), lambda target: _download_plain(store, target)) as directory:
            yield directory


def _brought_along(store: Store) -> Any:
    """The pyarrow filesystem of a store that no URI names: the user's own, which must be pickled along."""
    return getattr(getattr(store, "_store", store), "_fs", None)


def _path_in(uri: str) -> str:
    """`bucket/prefix`, as pyarrow's filesystems call it: no scheme, user, account's host or query."""
    parts = urlsplit(uri)
    user, at, host = parts.netloc.rpartition("@")
    bucket = user.partition(":")[0] if at and parts.scheme.lower() in AZURE_SCHEMES else host
    return unquote(bucket + parts.path).rstrip("/")


def _same(source: Path | None, target: Path) -> bool:
    return source is not None and source.exists() and target.exists() and target.samefile(source)


def _copy_plain(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise NotFound(f"{source} does not exist: check the checkpoint's path.")
    shutil.copytree(source, target, dirs_exist_ok=True)


def _download_plain(store: Store, target: Path) -> None:
    entries = store.list()
    if not entries:
        raise NotFound(f"{store.uri} holds no files: check the checkpoint's path.")
    target.mkdir(parents=True, exist_ok=True)
    for entry in entries:
        store.download(entry.key, target / entry.key)


def _json_only(value: Any, where: str) -> Any:
    """The value, if it comes back from JSON as it went in; a `TypeError` that says which part does not."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}: JSON knows only strings as keys.")
            _json_only(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            _json_only(item, f"{where}[{at}]")
    elif value is not None and not isinstance(value, str | int | float):
        raise TypeError(
            f"{where} is a {type(value).__name__}, which JSON cannot hold: convert it to plain Python first."
        )
    elif isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        raise TypeError(f"{where} is {value!r}, which JSON cannot hold: store it as a string.")
    return value
