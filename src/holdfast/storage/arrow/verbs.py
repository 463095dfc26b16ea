"""The operations in which pyarrow's filesystems differ: read, move, copy, delete, and caching.

pyarrow's own bridge to fsspec hands paths to functions that expand `*`, `?` and `[` in them, so that deleting one file
might delete others, and its streams ask for a file's size first and read it afterwards, which an overwrite may tear:
fsspec is called directly for those operations. `store` does all that is alike.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Protocol

from pyarrow import fs as pafs

__all__ = ["Fsspec", "Native", "Verbs", "verbs_of"]

_OBJECTS = {"s3", "s3a", "gs", "gcs", "gcsfs", "abfs", "abfss", "az", "adl", "azure", "oss", "oci", "r2", "tos", "cos"}

_TRIES = 100


class Verbs(Protocol):
    """What `ArrowStore` needs of a filesystem, besides opening and listing."""

    objects: bool
    """Whether a file appears whole when it is closed, and directories need not be made."""

    def refresh(self) -> None:
        """Forget what was cached, so that other processes' writes are seen."""
        ...

    def read(self, path: str) -> bytes:
        """All of a file as it was at some moment."""
        ...

    def read_range(self, path: str, start: int, length: int) -> bytes:
        """A range that is known to lie inside the file."""
        ...

    def copy(self, source: str, target: str) -> None:
        """Copy one file; NotImplementedError where the filesystem cannot by itself."""
        ...

    def move(self, source: str, target: str) -> None:
        """Rename one file over another."""
        ...

    def delete(self, path: str) -> None:
        """Delete one file; FileNotFoundError if it is not there."""
        ...

    def prune(self, directory: str, root: str) -> None:
        """Remove a directory and those above it, up to `root`, if they are empty; never a directory that is not."""
        ...


def verbs_of(filesystem: Any) -> Verbs:
    """The verbs of this filesystem."""
    handler = getattr(filesystem, "handler", None)
    if isinstance(handler, pafs.FSSpecHandler):
        return Fsspec(handler.fs)
    return Native(filesystem)


class Native:
    """One of pyarrow's own filesystems, or a user's handler."""

    def __init__(self, filesystem: Any) -> None:
        self._fs = filesystem
        self.objects = filesystem.type_name in _OBJECTS

    def refresh(self) -> None:
        """Nothing is cached."""

    def read(self, path: str) -> bytes:
        # A stream learns the size and then reads that much of whatever is there by then: look again until both agree.
        for _ in range(_TRIES):
            before = self._fingerprint(path)
            with self._fs.open_input_stream(path, compression=None) as stream:
                data = bytes(stream.read())
            if before == self._fingerprint(path) and len(data) == before[0]:
                return data
        raise TimeoutError(f"{path} keeps changing")

    def _fingerprint(self, path: str) -> tuple[int, object]:
        info = self._fs.get_file_info(path)
        if info.type != pafs.FileType.File:
            raise FileNotFoundError(path)
        if not self.objects:
            return int(info.size), info.mtime_ns
        with self._fs.open_input_stream(path, compression=None) as stream:
            return int(info.size), (stream.metadata() or {}).get(b"ETag", info.mtime_ns)

    def read_range(self, path: str, start: int, length: int) -> bytes:
        with self._fs.open_input_file(path) as file:
            file.seek(start)
            return bytes(file.read(length))

    def copy(self, source: str, target: str) -> None:
        self._fs.copy_file(source, target)

    def move(self, source: str, target: str) -> None:
        try:
            self._fs.move(source, target)
        except OSError:
            # HDFS renames nothing onto a file that is there.
            if self._fs.get_file_info(target).type != pafs.FileType.File:
                raise
            self._fs.delete_file(target)
            self._fs.move(source, target)

    def delete(self, path: str) -> None:
        self._fs.delete_file(path)

    def prune(self, directory: str, root: str) -> None:
        # pyarrow deletes directories with all that is in them, or not at all. But it marks one that was left empty by
        # an object "directory/", and some servers make a file of that, which is then in the way. Deleting it marks the
        # directory above; where that holds anything else, such a server is confused by the mark, so there it stays.
        while self.objects and "/" in directory and self._is_lone_false_mark(directory):
            self._fs.delete_file(directory)
            directory = directory.rpartition("/")[0]

    def _is_lone_false_mark(self, directory: str) -> bool:
        if self._fs.get_file_info(directory).type != pafs.FileType.Directory:
            return False
        beside = self._fs.get_file_info(pafs.FileSelector(directory.rpartition("/")[0], allow_not_found=True))
        return [(info.path, info.type, info.size) for info in beside] == [(directory, pafs.FileType.File, 0)]


class Fsspec:
    """A filesystem of fsspec's."""

    def __init__(self, filesystem: Any) -> None:
        self._fs = filesystem
        if hasattr(filesystem, "dircache"):
            # Threads fill it with what they saw before another's write.
            filesystem.dircache.use_listings_cache = False
        protocols = filesystem.protocol
        self.objects = not _OBJECTS.isdisjoint((protocols,) if isinstance(protocols, str) else protocols)

    def refresh(self) -> None:
        self._fs.invalidate_cache()

    def read(self, path: str) -> bytes:
        return bytes(self._fs.cat_file(path))

    def read_range(self, path: str, start: int, length: int) -> bytes:
        return bytes(self._fs.cat_file(path, start=start, end=start + length))

    def copy(self, source: str, target: str) -> None:
        self._fs.cp_file(source, target)

    def move(self, source: str, target: str) -> None:
        self._fs.cp_file(source, target)
        self._fs.rm_file(source)

    def delete(self, path: str) -> None:
        self._fs.rm_file(path)

    def prune(self, directory: str, root: str) -> None:
        with suppress(OSError):
            while not self.objects and len(directory) > len(root):
                self._fs.rmdir(directory)
                directory = directory.rpartition("/")[0]
