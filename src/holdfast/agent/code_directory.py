"""The driver's working directory on this node: received in pieces, unpacked once, first on the workers' search path.

Kept by hash in the session directory, for every run whose driver has the same files.
"""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from blake3 import blake3

from holdfast.errors import WireError
from holdfast.storage.private_directory import make_private_directory
from holdfast.wire.messages import PrepareCode, PrepareFunction

__all__ = ["CodeDirectory", "map_paths", "unpack"]


class CodeDirectory:
    """One directory. `whole` is done when all of it is unpacked."""

    def __init__(self, order: PrepareCode, path: Path) -> None:
        self.root = order.root
        self.path = path
        self.whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._order = order
        self._pieces: list[bytes] = []
        self._received_bytes = 0
        self._unpacking: asyncio.Task[None] | None = None

    @property
    def is_whole(self) -> bool:
        return self.whole.done() and self.whole.exception() is None

    def add(self, piece: bytes) -> None:
        """The next piece; they come in order."""
        if self.is_whole:
            return  # sent again by another driver
        self._pieces.append(piece)
        self._received_bytes += len(piece)
        if self._received_bytes >= self._order.size_bytes and self._unpacking is None:
            self._unpacking = asyncio.get_running_loop().create_task(self._unpack())

    def localize(self, order: PrepareFunction) -> PrepareFunction:
        """The order with paths of this node."""
        environment = {
            name: str(self.path) if value == self.root else value for name, value in order.environment.items()
        }
        sys_path = map_paths(order.sys_path, self.root, self.path)
        return msgspec.structs.replace(order, sys_path=sys_path, environment=environment)

    async def _unpack(self) -> None:
        archive = b"".join(self._pieces)
        self._pieces.clear()
        try:
            await asyncio.to_thread(unpack, archive, self._order.hash, self.path)
        except Exception as error:  # noqa: BLE001  whoever waits for it must learn of it
            self.whole.set_exception(WireError(f"The driver's working directory could not be unpacked: {error}"))
            self.whole.exception()  # whoever waits for it gets it; nobody may
        else:
            self.whole.set_result(None)


def unpack(archive: bytes, digest: str, path: Path) -> None:
    """Unpack what `control.working_dir` has packed."""
    if blake3(archive).hexdigest() != digest:
        raise WireError("its hash is not the one that was announced.")
    make_private_directory(path)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as files:
        if hasattr(tarfile, "data_filter"):  # since Python 3.11.4; what the driver sends runs here in any case
            files.extractall(path, filter="data")
        else:
            files.extractall(path)


def map_paths(paths: Sequence[str], root: str, directory: Path) -> list[str]:
    """A driver's search path on this node: what lies in its working directory is found in ours, which comes first; the
    rest where it is there under the same path."""
    mapped = [str(directory)]
    for path in paths:
        if path == root or path.startswith(f"{root}{os.sep}"):
            path = str(directory / os.path.relpath(path, root)) if path != root else str(directory)
        elif not os.path.exists(path):  # noqa: PTH110
            continue
        if path not in mapped:
            mapped.append(path)
    return mapped
