"""Keys as plain files below a directory: local disks, NFS, Lustre, and FUSE mounts of anything.

What is written appears whole: a `atomic_file` in the same directory, fsync, then link or rename, then fsync of the
directory. FUSE mounts differ: there an upload goes straight to its final name, since close, not fsync, finalises a
file, and a rename may copy it; where hard links are missing, too, `create` writes in place, and a crash can leave a
torn file there. The kernel caches sizes and pages of a FUSE file for a second or so, so a reader at the moment of an
overwrite may see a mixture. Hence callers seal what they create or overwrite. `directories` makes directories,
`transfer` moves bulk bytes, `failures` words the errors; `tests/contract` holds this backend to the protocol in
`store`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from holdfast.errors import AlreadyExists, NotFound, StorageError, Unavailable
from holdfast.storage.failures import translate, translated
from holdfast.storage.files import atomic_download, copy_bytes, mount_kind, read_all, reflink, write_all
from holdfast.storage.hashing import size_of
from holdfast.storage.keys import check_key, check_prefix, is_temporary, new_temporary
from holdfast.storage.posix.atomic_file import AtomicFile, discard, link_open_file, sync
from holdfast.storage.posix.directories import Directories
from holdfast.storage.store import Digest, Entry, Incoming, OnBytes, Source
from holdfast.storage.transfer import write_stream

__all__ = ["PosixStore"]

_T = TypeVar("_T")

_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EMLINK, errno.EXDEV, errno.ENOENT}
_TRIES = 100


class _SharedRoot:
    """What a store and its `sub` views probe once for all of them."""

    def __init__(self) -> None:
        self.directories = Directories()
        self.exclusive: bool | None = None
        self.fuse: bool | None = None
        self.links = True


class PosixStore:
    """A Store in a directory. Nothing is created, the root included, until something is written."""

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.abspath(root))  # noqa: PTH100  keeps symlinks, unlike resolve()
        self._shared = _SharedRoot()
        self._durable = True

    def __repr__(self) -> str:
        return f"PosixStore({str(self._root)!r})"

    @property
    def uri(self) -> str:
        return str(self._root)

    @property
    def local_root(self) -> Path | None:
        return self._root

    @property
    def exclusive(self) -> bool:
        """On a network mount this is about this machine only: two mounts of one bucket may not see each other."""
        if self._shared.exclusive is None:
            self._shared.exclusive = self._probe()
        return self._shared.exclusive

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)

        def replace(directory: int) -> None:
            with translated(path), AtomicFile(directory, durable=self._durable) as draft:
                write_all(draft.fd, data)
                draft.replace(path.name)

        self._in_directory(path, replace)

    def create(self, key: str, data: bytes) -> None:
        path = self._path(key)
        self._in_directory(path, lambda directory: self._create(directory, path, data))

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with _reading(path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:  # without a file object, which takes twice as many system calls
                return read_all(fd)
            finally:
                os.close(fd)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        path = self._path(key)
        with _reading(path), path.open("rb") as file:
            file.seek(start)
            return file.read(length)

    def size(self, key: str) -> int:
        return self._status(key).st_size

    def version(self, key: str) -> str | None:
        found = self._status(key)
        return f"{found.st_dev:x}-{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}-{found.st_ctime_ns:x}"

    def children(self, prefix: str = "") -> list[str]:
        entries = _scan(self._root / check_prefix(prefix))
        return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    def list(self, prefix: str = "") -> list[Entry]:
        found = _walk(self._root / check_prefix(prefix), prefix + "/" if prefix else "")
        return sorted(entry for entry in found if not is_temporary(entry.key.rpartition("/")[2]))

    def delete(self, keys: Iterable[str]) -> None:
        parents: set[Path] = set()
        for key in keys:
            path = self._path(key)
            parents.add(path.parent)
            # A directory is no object, so there is none of that key.
            with translated(path), suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                path.unlink()
        for parent in sorted(parents, key=lambda path: len(path.parts), reverse=True):
            with translated(parent):
                self._shared.directories.sync_deletion(parent, self._root)

    def copy(self, source: str, target: str) -> None:
        origin, path = self._path(source), self._path(target)
        with _reading(origin), origin.open("rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise NotFound(f"{origin} is not a file: check the path.")
            sync(file.fileno())
            self._in_directory(path, lambda directory: _copy(file.fileno(), directory, path))

    def upload(self, key: str, source: Source, on_bytes: OnBytes | None = None) -> Digest:
        return self._upload(key, source, on_bytes)

    def receive(self, key: str, source: Incoming) -> Digest:
        """Like `upload`, for bytes that come from another process."""
        return self._upload(key, source, None)

    def _upload(self, key: str, source: Source | Incoming, on_bytes: OnBytes | None) -> Digest:
        path = self._path(key)
        size_of(source)  # a missing source fails before anything is made in the store

        def send(directory: int) -> Digest:
            if self._fuse():
                return _upload_in_place(directory, path, source, on_bytes)
            with translated(path):
                draft = AtomicFile(directory, _mode_for(source), durable=self._durable)
            with draft:
                digest = write_stream(source, draft.fd, path, on_bytes, direct=True)
                with translated(path):
                    draft.replace(path.name)
            return digest

        return self._in_directory(path, send)

    def download(self, key: str, target: Path, on_bytes: OnBytes | None = None) -> Digest:
        path = self._path(key)
        self.size(key)  # NotFound before anything is made at the target
        with _reading(path), atomic_download(target, _mode_for(path)) as file:
            return write_stream(path, file.fileno(), target, on_bytes)

    def sub(self, prefix: str) -> PosixStore:
        view = PosixStore(self._root / check_key(prefix))
        view._shared, view._durable = self._shared, self._durable
        return view

    def volatile(self) -> PosixStore:
        """A view that does not fsync what it puts, creates and uploads."""
        view = PosixStore(self._root)
        view._shared, view._durable = self._shared, False
        return view

    def sync(self, keys: Iterable[str], directories: Iterable[str] = ()) -> None:
        """Make keys durable that a `volatile` view wrote, and the names of directories, which are made if need be."""
        inside: set[Path] = set()
        for key in keys:
            path = self._path(key)
            inside.add(path.parent)
            with _reading(path), path.open("rb", buffering=0) as file:
                sync(file.fileno())
        for prefix in directories:
            path = self._path(prefix)
            with translated(path):
                os.close(self._shared.directories.open(path, self._root, durable=False))
        with translated(self._root):
            self._shared.directories.sync(inside, map(self._path, directories), self._root)

    def close(self) -> None:
        """Nothing is kept open."""

    def _status(self, key: str) -> os.stat_result:
        path = self._path(key)
        with _reading(path):
            found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise NotFound(f"{path} is not a file: check the path.")
        return found

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _in_directory(self, path: Path, action: Callable[[int], _T]) -> _T:
        """Run `action` on the directory of `path`; again, if a concurrent `delete` removed that directory meanwhile."""
        for _ in range(_TRIES):
            with translated(path):
                directory = self._shared.directories.open(path.parent, self._root, durable=self._durable)
            try:
                return action(directory)
            except NotFound:
                self._shared.directories.forget(path.parent)
            finally:
                os.close(directory)
        raise Unavailable(f"{path.parent} keeps vanishing: find out what else deletes there.")

    def _create(self, directory: int, path: Path, data: bytes) -> None:
        if self._shared.links:
            with translated(path), AtomicFile(directory, durable=self._durable) as draft:
                write_all(draft.fd, data)
                try:
                    return draft.create(path.name)
                except OSError as error:
                    if error.errno not in _NO_LINKS - {errno.ENOENT}:
                        raise
                    self._shared.links = False
        with translated(path):
            _create_in_place(directory, path, data)

    def _fuse(self) -> bool:
        if self._shared.fuse is None:
            self._shared.fuse = mount_kind(self._root).startswith("fuse")
        return self._shared.fuse

    def _probe(self) -> bool:
        view = self.volatile()  # what creation does now is asked, not what a power cut leaves of it
        path = self._root / new_temporary()
        try:
            view._in_directory(path, lambda directory: view._create(directory, path, b"first"))
            view._in_directory(path, lambda directory: view._create(directory, path, b"second"))
        except AlreadyExists:
            return True
        except StorageError as error:
            if isinstance(error.__cause__, OSError):  # the user knows the root, and not the file of this probe
                raise translate(error.__cause__, self._root) from error.__cause__
            raise
        finally:
            with suppress(OSError):
                path.unlink()
        return False


def _create_in_place(directory: int, path: Path, data: bytes) -> None:
    """Create a file at its final name, which on FUSE only close finishes.

    Another mount of the same bucket may have created the name since: then writing, fsync or close fails (gcsfuse says
    ESTALE, rclone EPERM), and what is there is the other's, who won.
    """
    fd = os.open(path.name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666, dir_fd=directory)
    closed = False
    try:
        write_all(fd, data)
        sync(fd)
        closed = True
        os.close(fd)
        sync(directory)
    except OSError as error:
        if not closed:
            with suppress(OSError):
                os.close(fd)
        found = _read_whole(path)
        if found is not None and not data.startswith(found):
            raise FileExistsError(errno.EEXIST, "another mount was faster", path) from error
        if error.errno != errno.ESTALE:  # stale: whatever is there, this process did not put it there
            discard(path.name, directory)
        raise


def _read_whole(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


@contextmanager
def _in_place(fd: int, path: Path, directory: int) -> Iterator[None]:
    """Finish the file at its final name, which on FUSE only close does; remove it on failure."""
    try:
        yield
        with translated(path):
            sync(fd)
    except BaseException:
        with suppress(OSError):
            os.close(fd)
        discard(path.name, directory)
        raise
    try:
        with translated(path):
            os.close(fd)
            sync(directory)
    except StorageError:
        discard(path.name, directory)
        raise


def _upload_in_place(directory: int, path: Path, source: Source | Incoming, on_bytes: OnBytes | None) -> Digest:
    with translated(path):
        fd = os.open(
            path.name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, _mode_for(source), dir_fd=directory
        )
    with _in_place(fd, path, directory):
        digest = write_stream(source, fd, path, on_bytes)
    with translated(path):
        found_bytes = os.stat(path.name, dir_fd=directory).st_size
    if found_bytes != digest.size_bytes:
        discard(path.name, directory)
        raise Unavailable(f"{path} holds {found_bytes} of {digest.size_bytes} bytes after its upload: check the mount.")
    return digest


def _mode_for(source: Source | Incoming | int) -> int:
    """The mode of a copy: that of the source (minus the umask), readable by its owner; the default mode for memory."""
    if isinstance(source, Path | int):
        found = os.fstat(source) if isinstance(source, int) else source.stat()
        return stat.S_IMODE(found.st_mode) & 0o777 | stat.S_IRUSR
    return source.mode if isinstance(source, Incoming) else 0o666


def _copy(source: int, directory: int, path: Path) -> None:
    """Share the blocks, else the whole file, else copy the bytes."""
    with translated(path), AtomicFile(directory, _mode_for(source)) as draft:
        if not reflink(source, draft.fd):
            try:
                return _hard_link(source, directory, path.name)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
            copy_bytes(source, draft.fd)
        draft.replace(path.name)


def _hard_link(source: int, directory: int, name: str) -> None:
    temporary = new_temporary()
    link_open_file(source, temporary, directory)
    try:
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        sync(directory)
    finally:
        discard(temporary, directory)  # a rename onto another name of the same file does nothing


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Like `translated`; a directory, or a path below a file, holds no object."""
    try:
        yield
    except (IsADirectoryError, NotADirectoryError):
        raise NotFound(f"{path} is not a file: check the path.") from None
    except OSError as error:
        raise translate(error, path) from error


def _scan(directory: Path) -> list[os.DirEntry[str]]:
    with translated(directory), suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as entries:
        return list(entries)
    return []


def _walk(directory: Path, prefix: str) -> Iterator[Entry]:
    """Every file below, temporaries included. Symlinked directories are not followed: they may form a cycle."""
    for entry in _scan(directory):
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(directory / entry.name, f"{prefix}{entry.name}/")
        else:
            with translated(entry.path), suppress(FileNotFoundError):
                found = entry.stat()
                if stat.S_ISREG(found.st_mode):
                    yield Entry(prefix + entry.name, found.st_size)
