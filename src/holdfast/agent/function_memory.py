"""The pickled training function as it arrives at the agent: in pieces, into memory that zygotes and workers can map.

The first piece comes with `PrepareFunction`, the others follow as `FunctionPiece`. The agent never opens it: it hands
the descriptor to the zygote, and to every zygote that replaces it, so that the bytes cross the network once and each
process that unpickles reads them where they lie. The memory has no name and is freed with the last process that
holds it.
"""

from __future__ import annotations

import asyncio
import os

from blake3 import blake3

from holdfast.agent.code_directory import CodeDirectory
from holdfast.errors import WireError
from holdfast.linux.memory import available_bytes
from holdfast.wire.messages import PrepareFunction

__all__ = ["FunctionMemory"]


class FunctionMemory:
    """One function. `whole` is done when all of it has arrived and its hash is right."""

    def __init__(self, order: PrepareFunction, code: CodeDirectory | None = None) -> None:
        """`code` is the driver's working directory on this node, where the driver is on another."""
        if code is not None:
            order = code.localize(order)
        self.order = order
        self._code = code
        self._size_bytes = len(order.function) if order.size_bytes is None else order.size_bytes
        self._hasher = blake3()
        self._received_bytes = 0
        self.whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.fd = os.memfd_create("holdfast-function", os.MFD_CLOEXEC)
        if self._size_bytes > available_bytes() // 2:
            self._fail(
                f"The training function and what it captures have {self._size_bytes >> 20} MiB, more than half of the "
                "memory that is free on this node: load large objects inside the function instead."
            )
        self.add(order.function)

    async def ready(self) -> None:
        """Returns when a zygote can load it; raises `WireError` where it never can."""
        await asyncio.shield(self.whole)  # other runs wait for it as well, and this one may be cancelled
        if self._code is not None:
            await asyncio.shield(self._code.whole)

    def add(self, piece: bytes) -> None:
        """The next piece; they come in order."""
        if self.whole.done():
            return
        left = memoryview(piece)
        try:
            while left:
                left = left[os.write(self.fd, left) :]
        except OSError as error:
            self._fail(f"This node has no memory for the training function and what it captures: {error.strerror}.")
            return
        self._hasher.update(piece)
        self._received_bytes += len(piece)
        if self._received_bytes < self._size_bytes:
            return
        if self._received_bytes > self._size_bytes or self.order.hash not in ("", self._hasher.hexdigest()):
            self._fail("The training function arrived damaged: its hash is not the one that was announced.")
        else:
            self.whole.set_result(None)

    @property
    def is_whole(self) -> bool:
        """Whether all of it has arrived, undamaged, and its code as well."""
        arrived = self.whole.done() and not self.whole.cancelled() and self.whole.exception() is None
        return arrived and (self._code is None or self._code.is_whole)

    def close(self) -> None:
        """Closing twice is fine."""
        self.whole.cancel()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _fail(self, text: str) -> None:
        self.whole.set_exception(WireError(text))
        self.whole.exception()  # whoever waits for it gets it; nobody may
