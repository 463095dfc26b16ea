"""A store on real files that behaves like a remote one, so that unit tests need no server."""

from __future__ import annotations

import threading
from pathlib import Path

from holdfast.storage.posix.store import PosixStore
from holdfast.storage.store import Digest, OnBytes, Source

__all__ = ["FarStore", "write_source"]


class FarStore(PosixStore):
    """A store without local files that counts its calls, and may ignore put-if-absent."""

    def __init__(self, root: Path, exclusive: bool = True) -> None:
        super().__init__(root)
        self.downloads: list[str] = []
        self.uploads: list[str] = []
        self._refuses = exclusive
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        return "s3://bucket" + super().uri

    @property
    def local_root(self) -> Path | None:
        return None

    @property
    def exclusive(self) -> bool:
        return self._refuses

    def create(self, key: str, data: bytes) -> None:
        if self._refuses:
            super().create(key, data)
        else:
            self.put(key, data)

    def upload(self, key: str, source: Source, on_bytes: OnBytes | None = None) -> Digest:
        with self._lock:
            self.uploads.append(key)
        return super().upload(key, source, on_bytes)

    def download(self, key: str, target: Path, on_bytes: OnBytes | None = None) -> Digest:
        with self._lock:
            self.downloads.append(key)
        return super().download(key, target, on_bytes)

    def sub(self, prefix: str) -> FarStore:
        view = FarStore(self._root / prefix, self._refuses)
        view.downloads, view.uploads = self.downloads, self.uploads
        return view


def write_source(directory: Path, **files: str) -> Path:
    """A directory with these files; `__` in a name is a slash."""
    for name, text in files.items():
        path = directory / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory
