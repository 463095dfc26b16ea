"""Keys as plain files below a directory: local disks, NFS, Lustre, and FUSE mounts of anything.

What is written appears whole: a temporary in the same directory, fsync, then rename (or link, for exclusive creation),
then fsync of the directory. FUSE mounts differ: there a bulk upload goes straight to its final name, since close, not
fsync, finalises a file and a rename may copy it. `files` holds the steps, `transfer` the fast way through them,
`failures` the errors; `tests/contract` holds this backend to the protocol in `store`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.errors import AlreadyExists, NotFound, Unavailable
from holdfast.storage import files
from holdfast.storage.failures import translate, translated
from holdfast.storage.hashing import blocks, new_hasher
from holdfast.storage.keys import check_key, check_prefix, is_temporary, new_temporary
from holdfast.storage.store import Digest, Entry, OnBytes

__all__ = ["PosixStore"]


class _Shared:
    """What a store and its `sub` views know together: the probes' answers, and which directories are durable."""

    def __init__(self) -> None:
        self.exclusive: bool | None = None
        self.fuse: bool | None = None
        self.durable: set[Path] = set()


class PosixStore:
    """A Store in a directory. Nothing is created, the root included, until something is written."""

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.abspath(root))  # noqa: PTH100  keeps symlinks, unlike resolve()
        self._shared = _Shared()

    @property
    def uri(self) -> str:
        return str(self._root)

    @property
    def local_root(self) -> Path | None:
        return self._root

    @property
    def exclusive(self) -> bool:
        if self._shared.exclusive is None:
            self._shared.exclusive = self._probe()
        return self._shared.exclusive

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)
        self._in_directory(path, lambda directory: self._replace(directory, path.name, _writing(data)))

    def create(self, key: str, data: bytes) -> None:
        path = self._path(key)
        self._in_directory(path, lambda directory: self._create(directory, path.name, data))

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with _reading(path), path.open("rb", buffering=0) as file:
            return file.readall()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        path = self._path(key)
        with _reading(path), path.open("rb") as file:
            file.seek(start)
            return file.read(length)

    def size(self, key: str) -> int:
        path = self._path(key)
        with _reading(path):
            found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise NotFound(f"{path} is not a file: check the path.")
        return found.st_size

    def children(self, prefix: str = "") -> list[str]:
        entries = _scan(self._root / check_prefix(prefix))
        return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    def list(self, prefix: str = "") -> list[Entry]:
        start = self._root / check_prefix(prefix)
        return sorted(_walk(start, prefix + "/" if prefix else ""))

    def delete(self, keys: Iterable[str]) -> None:
        parents: set[Path] = set()
        for key in keys:
            path = self._path(key)
            parents.add(path.parent)
            # A directory is no object, so there is none of that key.
            with translated(path), suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                path.unlink()
        for parent in sorted(parents, key=lambda path: len(path.parts), reverse=True):
            self._settle_deletion(parent)

    def copy(self, source: str, target: str) -> None:
        origin, path = self._path(source), self._path(target)
        with _reading(origin):
            fd = os.open(origin, os.O_RDONLY | os.O_CLOEXEC)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise NotFound(f"{origin} is not a file: check the path.")
        try:
            self._in_directory(path, lambda directory: self._copy(directory, path.name, origin, fd))
        finally:
            os.close(fd)

    def upload(self, key: str, source: Path, on_bytes: OnBytes | None = None) -> Digest:
        path, hasher = self._path(key), new_hasher()
        size_bytes = 0
        with self._directory(path) as directory:
            name = new_temporary()
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=directory)
            try:
                with os.fdopen(fd, "wb", buffering=0):
                    for block in blocks(source, hasher, on_bytes):
                        with translated(path):
                            files.write_all(fd, block)
                        size_bytes += len(block)
                    with translated(path):
                        os.fsync(fd)
                with translated(path):
                    os.rename(name, path.name, src_dir_fd=directory, dst_dir_fd=directory)
                    files.fsync_directory(directory)
            finally:
                _discard(name, directory)
        return Digest(size_bytes, hasher.hexdigest())

    def download(self, key: str, target: Path, on_bytes: OnBytes | None = None) -> Digest:
        path, hasher = self._path(key), new_hasher()
        size_bytes = 0
        with _reading(path):
            if not path.is_file():
                raise NotFound(f"{path} does not exist: check the path.")
        with files.landing(target) as file:
            for block in blocks(path, hasher, on_bytes):
                with translated(target):
                    files.write_all(file.fileno(), block)
                size_bytes += len(block)
        return Digest(size_bytes, hasher.hexdigest())

    def sub(self, prefix: str) -> PosixStore:
        view = PosixStore(self._root / check_prefix(prefix))
        view._shared = self._shared
        return view

    def close(self) -> None:
        """Nothing is kept open."""

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    # -- writing ------------------------------------------------------------------------------------------------

    @contextmanager
    def _directory(self, path: Path) -> Iterator[int]:
        """The directory of `path`, made if need be and durable itself, as a descriptor."""
        with translated(path):
            fd = self._open_directory(path.parent)
        try:
            yield fd
        finally:
            os.close(fd)

    def _open_directory(self, directory: Path) -> int:
        while True:
            try:
                if directory not in self._shared.durable:
                    self._make_durable(directory)
                return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                # Somebody pruned it between the two; make it again.
                self._shared.durable.discard(directory)

    def _make_durable(self, directory: Path) -> None:
        """Make the directory and what is missing above it, and see to it that their names survive a crash."""
        step = directory
        made: list[Path] = []
        while True:
            try:
                step.mkdir()
            except FileExistsError:
                if not step.is_dir():
                    raise NotADirectoryError(20, os.strerror(20), str(step)) from None
                break
            except FileNotFoundError:
                made.append(step)
                step = step.parent
                continue
            break
        for missing in reversed(made):
            missing.mkdir(exist_ok=True)
        self._shared.durable.add(directory)

    def _in_directory(self, path: Path, action: Callable[[int], None]) -> None:
        """Run `action` in the directory of `path`; again, if a concurrent `delete` pruned the directory underfoot."""
        for _ in range(1000):
            with self._directory(path) as directory:
                try:
                    with translated(path):
                        action(directory)
                        files.fsync_directory(directory)
                    return
                except NotFound:
                    self._shared.durable.discard(path.parent)
        raise Unavailable(f"{path.parent} keeps vanishing: check what else deletes there.")

    def _replace(self, directory: int, name: str, write: Callable[[int], None]) -> None:
        temporary = new_temporary()
        try:
            self._write_file(directory, temporary, write)
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        finally:
            _discard(temporary, directory)

    def _create(self, directory: int, name: str, data: bytes) -> None:
        temporary = new_temporary()
        try:
            self._write_file(directory, temporary, _writing(data))
            os.link(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError as error:
            if error.errno not in files.NO_LINKS:
                raise
            self._write_file(directory, name, _writing(data))
        finally:
            _discard(temporary, directory)

    def _write_file(self, directory: int, name: str, write: Callable[[int], None]) -> None:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=directory)
        try:
            try:
                write(fd)
                os.fsync(fd)
            finally:
                os.close(fd)
        except BaseException:
            _discard(name, directory)
            raise

    def _copy(self, directory: int, name: str, origin: Path, source: int) -> None:
        temporary = new_temporary()
        try:
            os.link(origin, temporary, dst_dir_fd=directory)
        except OSError as error:
            if error.errno not in files.NO_LINKS:
                raise
            self._write_file(directory, temporary, lambda fd: files.copy_bytes(source, fd))
        try:
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        finally:
            _discard(temporary, directory)

    def _settle_deletion(self, directory: Path) -> None:
        """Make deletions in a directory durable, and remove it and those above it that are empty now."""
        with translated(directory), suppress(FileNotFoundError, NotADirectoryError):
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                files.fsync_directory(fd)
            finally:
                os.close(fd)
        while directory != self._root and self._root in directory.parents:
            try:
                directory.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                return
            self._shared.durable.discard(directory)
            directory = directory.parent

    def _probe(self) -> bool:
        name = new_temporary()
        path = self._root / name
        try:
            self._in_directory(path, lambda directory: self._create(directory, name, b"one"))
            self._in_directory(path, lambda directory: self._create(directory, name, b"two"))
        except AlreadyExists:
            return True
        finally:
            path.unlink(missing_ok=True)
        return False


def _writing(data: bytes) -> Callable[[int], None]:
    return lambda fd: files.write_all(fd, data)


def _discard(name: str, directory: int) -> None:
    with suppress(OSError):
        os.unlink(name, dir_fd=directory)  # noqa: PTH108  relative to a descriptor


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
    with (
        translated(directory),
        suppress(FileNotFoundError, NotADirectoryError),
        os.scandir(directory) as entries,
    ):
        return list(entries)
    return []


def _walk(directory: Path, prefix: str) -> Iterator[Entry]:
    for entry in _scan(directory):
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(directory / entry.name, f"{prefix}{entry.name}/")
        elif not is_temporary(entry.name):
            with translated(entry.path), suppress(FileNotFoundError):
                found = entry.stat()
                if stat.S_ISREG(found.st_mode):
                    yield Entry(prefix + entry.name, found.st_size)
