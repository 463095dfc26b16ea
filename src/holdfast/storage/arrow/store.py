"""Any `pyarrow.fs.FileSystem` as a store: HDFS, those that users bring along, and fsspec's through `FSSpecHandler`.

pyarrow knows no creation that refuses an existing file, so this store is never `exclusive`; a local filesystem
therefore becomes a `PosixStore`, which is, and which reads in place, and S3 goes through obstore (`s3`). On
object stores a file appears when it is closed; elsewhere a temporary is written and moved. `verbs` holds the
verbs in which filesystems differ, `failures` the errors. This is the one place that opens pyarrow's filesystems.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pyarrow import fs as pafs

from holdfast.errors import AlreadyExists, ConfigError, HoldfastError, MissingExtra, NotFound, StorageError, Unavailable
from holdfast.storage.arrow.failures import translate
from holdfast.storage.arrow.s3 import through_objects
from holdfast.storage.arrow.verbs import Verbs, verbs_of
from holdfast.storage.hashing import BLOCK_BYTES, HashingSource
from holdfast.storage.keys import check_key, check_prefix, is_temporary, new_temporary
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.store import Digest, Entry, OnBytes, Source, Store
from holdfast.storage.transfer import receive
from holdfast.storage.uri import scheme_of

__all__ = ["ArrowStore", "filesystem_for", "open_arrow"]

_READ_BYTES = 4 * BLOCK_BYTES


def open_arrow(path: str, filesystem: object | None) -> Store:
    """The store at `path` of a filesystem; without one, `path` is an hdfs:// URI."""
    if filesystem is None:
        return _open_hdfs(path)
    if not isinstance(filesystem, pafs.FileSystem):
        if not hasattr(filesystem, "cp_file"):
            raise ConfigError(
                f"storage_filesystem is a {type(filesystem).__name__}: give a pyarrow.fs.FileSystem or one of fsspec's."
            )
        filesystem = pafs.PyFileSystem(pafs.FSSpecHandler(filesystem))
    while isinstance(filesystem, pafs.SubTreeFileSystem):
        path = f"{filesystem.base_path.rstrip('/')}/{path.lstrip('/')}"
        filesystem = filesystem.base_fs
    if isinstance(filesystem, pafs.LocalFileSystem):
        return PosixStore(Path(path))
    root = path.rstrip("/")
    check_prefix(root.lstrip("/"))
    if isinstance(filesystem, pafs.S3FileSystem) and (store := through_objects(filesystem, root)) is not None:
        return store
    return ArrowStore(filesystem, root, root)


def filesystem_for(uri: str | None) -> Any:
    """pyarrow's own filesystem for a URI, the local one for None: what users of `Checkpoint.filesystem` expect."""
    if uri is None:
        return pafs.LocalFileSystem()
    if scheme_of(uri) == "az":
        uri = "abfs" + uri[2:]
    parts = urlsplit(uri)
    try:
        # Without the path, in which pyarrow takes offence at a blank.
        return pafs.FileSystem.from_uri(f"{parts.scheme}://{parts.netloc}/?{parts.query}".rstrip("?"))[0]
    except ImportError as error:
        raise MissingExtra(f"This pyarrow has no filesystem for {scheme_of(uri)}://: install another build.") from error
    except ValueError:
        shown = uri.partition("?")[0].rpartition("@")[2]
        raise ConfigError(
            f"pyarrow does not understand {shown}: read it with to_directory() or as_directory()."
        ) from None


def _open_hdfs(uri: str) -> Store:
    parts = urlsplit(uri)
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
    try:
        filesystem, path = pafs.FileSystem.from_uri(uri)
    except ImportError as error:
        raise MissingExtra(f"{shown} needs pyarrow with HDFS; run: pip install 'holdfast[arrow]'") from error
    except OSError as error:
        if "libhdfs" in str(error) or "libjvm" in str(error):
            raise MissingExtra(
                f"{shown} needs Hadoop's client: install it, and set JAVA_HOME, HADOOP_HOME and CLASSPATH."
            ) from None
        raise translate(error, shown) from None
    except ValueError:
        raise ConfigError(f"The storage path {shown} is no HDFS URI: write hdfs://host:port/path.") from None
    return ArrowStore(filesystem, path.rstrip("/"), shown)


class ArrowStore:
    """A Store in a directory of a pyarrow filesystem."""

    def __init__(self, filesystem: Any, root: str, shown: str, verbs: Verbs | None = None) -> None:
        self._fs = filesystem
        self._root = root
        self._shown = shown
        self._verbs: Verbs = verbs if verbs is not None else verbs_of(filesystem)
        self._creating = threading.Lock()

    def __repr__(self) -> str:
        return f"ArrowStore({self.uri!r}, {self._fs.type_name})"

    @property
    def uri(self) -> str:
        return self._shown

    @property
    def local_root(self) -> Path | None:
        return None

    @property
    def exclusive(self) -> bool:
        return False  # there is no conditional write to probe

    def put(self, key: str, data: bytes) -> None:
        self._write(key, iter((data,)))

    def create(self, key: str, data: bytes) -> None:
        # The best there is: threads of this process do not cross; other processes may.
        with self._creating:
            with suppress(NotFound):
                self.size(key)
                raise AlreadyExists(f"{self._show(key)} exists already: choose another name.")
            self.put(key, data)

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with self._reading(key):
            return self._verbs.read(path)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        path = self._path(key)
        with self._reading(key):
            length = min(length, self._file_size(path) - start)
            return self._verbs.read_range(path, start, length) if length > 0 else b""

    def size(self, key: str) -> int:
        path = self._path(key)
        with self._reading(key):
            return self._file_size(path)

    def version(self, key: str) -> str | None:
        self.size(key)  # NotFound if it is not there
        return None  # a modification time alone, often in whole seconds, tells too little

    def children(self, prefix: str = "") -> list[str]:
        # Empty directories stay behind on some filesystems, so only what holds files is named.
        skip = len(prefix) + 1 if prefix else 0
        names = (entry.key[skip:].partition("/") for entry in self.list(prefix))
        return sorted({name for name, slash, _ in names if slash})

    def list(self, prefix: str = "") -> list[Entry]:
        start = "/".join(part for part in (self._root, check_prefix(prefix)) if part)
        # Some filesystems (fsspec's memory) answer with a leading slash that they were not asked with.
        skip = len(self._root.lstrip("/")) + 1 if self._root.lstrip("/") else 0
        with self._translated(prefix):
            self._verbs.refresh()
            try:
                found = self._fs.get_file_info(pafs.FileSelector(start, allow_not_found=True, recursive=True))
            except NotADirectoryError:
                return []
        files = (info for info in found if info.type == pafs.FileType.File and info.path != start)
        named = ((info.path.lstrip("/")[skip:], info) for info in files if not is_temporary(info.base_name))
        return sorted(Entry(key, info.size) for key, info in named)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            with self._translated(key):
                try:
                    self._verbs.delete(path)
                except OSError:
                    self._verbs.refresh()
                    if self._fs.get_file_info(path).type == pafs.FileType.File:
                        raise
            with suppress(StorageError), self._translated(key):
                self._verbs.prune(path.rpartition("/")[0], self._root)

    def copy(self, source: str, target: str) -> None:
        origin = self._path(source)
        with self._reading(source):
            size_bytes = self._file_size(origin)
        if source == target:
            return

        def copy(at: str) -> None:
            with self._translated(source):
                self._verbs.copy(origin, at)

        try:
            self._write_whole(target, copy)
        except NotImplementedError:
            self._write(target, self._blocks(source, size_bytes))
        if self.size(target) != size_bytes:
            raise Unavailable(f"{self._show(target)} was copied with another size: copy it again.")

    def upload(self, key: str, source: Source, on_bytes: OnBytes | None = None) -> Digest:
        self._path(key)
        sent = HashingSource(source, on_bytes, BLOCK_BYTES)
        self._write(key, iter(sent))
        digest = sent.digest()
        if self.size(key) != digest.size_bytes:
            raise Unavailable(f"{self._show(key)} was stored with another size than was sent: send it again.")
        return digest

    def download(self, key: str, target: Path, on_bytes: OnBytes | None = None) -> Digest:
        expected = self.size(key)
        return receive(self._blocks(key, expected), target, expected, self._show(key), on_bytes)

    def sub(self, prefix: str) -> ArrowStore:
        view = ArrowStore(
            self._fs,
            "/".join(part for part in (self._root, check_prefix(prefix)) if part),
            "/".join(part for part in (self._shown, prefix) if part),
            self._verbs,
        )
        view._creating = self._creating
        return view

    def close(self) -> None:
        """The filesystem is the user's."""

    # -- names and errors ---------------------------------------------------------------------------------------

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}" if self._root else check_key(key)

    def _show(self, key: str) -> str:
        return "/".join(part for part in (self._shown, key) if part)

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        try:
            yield
        except (HoldfastError, NotImplementedError):
            raise
        except Exception as error:  # noqa: BLE001  a user's filesystem raises what it likes
            raise translate(error, self._show(key)) from None

    @contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        """Like `_translated`; whatever is said of what is no file, there is no object of that key."""
        self._verbs.refresh()
        try:
            with self._translated(key):
                yield
        except NotFound:
            raise
        except StorageError:
            with self._translated(key):
                self._file_size(self._path(key))
            raise

    def _file_size(self, path: str) -> int:
        info = self._fs.get_file_info(path)
        if info.type != pafs.FileType.File:
            raise FileNotFoundError(path)
        return int(info.size)

    # -- writing ------------------------------------------------------------------------------------------------

    def _write(self, key: str, data: Iterator[Any]) -> None:
        def write(at: str) -> None:
            with self._translated(key):
                stream = self._fs.open_output_stream(at, compression=None)
            try:
                for block in data:
                    with self._translated(key):
                        stream.write(block)
            except BaseException:
                # There is no giving up on a stream, only closing it, which may store the part that was sent.
                with suppress(StorageError), self._translated(key):
                    stream.close()
                with suppress(StorageError), self._translated(key):
                    self._verbs.delete(at)
                    self._verbs.prune(at.rpartition("/")[0], self._root)
                raise
            with self._translated(key):
                stream.close()

        self._write_whole(key, write)

    def _write_whole(self, key: str, write: Callable[[str], None]) -> None:
        """Let `write` make a file that appears under `key` whole or not at all."""
        path = self._path(key)
        if self._verbs.objects:
            write(path)
            return
        parent = path.rpartition("/")[0]
        temporary = f"{parent}/{new_temporary()}" if parent else new_temporary()
        with self._translated(key):
            if parent:
                self._fs.create_dir(parent, recursive=True)
        try:
            write(temporary)
            with self._translated(key):
                self._verbs.move(temporary, path)
        except BaseException:
            with suppress(StorageError), self._translated(key):
                self._verbs.delete(temporary)
            raise

    def _blocks(self, key: str, size_bytes: int) -> Iterator[bytes]:
        path = self._path(key)
        for start in range(0, size_bytes, _READ_BYTES):
            with self._reading(key):
                block = self._verbs.read_range(path, start, min(_READ_BYTES, size_bytes - start))
            yield block
