"""Helpers that make records, and a store that is no directory, for tests of result files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.core import records as r
from holdfast.errors import NotFound, Unavailable
from holdfast.storage.hashing import size_of
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.store import Digest, OnBytes, Source

T0 = 1_700_000_000.0

__all__ = ["T0", "CountingStore", "begin", "commit", "generation", "report", "reports"]


def begin(epoch: int = 1, at: float = T0) -> r.ControllerStarted:
    return r.ControllerStarted(at=at, epoch=epoch, host="node-a", pid=7, workers=2)


def generation(
    number: int, iteration: int = 0, at: float = T0, checkpoint: str | None = None, running_after_s: float = 0.0
) -> list[r.Record]:
    """The start of a generation, and the moment in which all its workers run."""
    return [
        r.GenerationStarted(
            at=at, generation=number, world_size=2, agents=("a1",), iteration=iteration, checkpoint=checkpoint
        ),
        r.GenerationRunning(at=at + running_after_s, generation=number),
    ]


def report(
    iteration: int, at: float, metrics: dict[str, Any], *, checkpoint: bool = False, generation: int = 1
) -> r.Reported:
    return r.Reported(at=at, generation=generation, iteration=iteration, metrics=metrics, checkpoint=checkpoint)


def reports(first: int, last: int, at: float = T0, generation: int = 1) -> list[r.Record]:
    """One report a second from `at` on; the loss identifies it."""
    return [
        report(n, at + n - first + 1, {"loss": n + generation / 10, "n": n}, generation=generation)
        for n in range(first, last + 1)
    ]


def commit(iteration: int, at: float, index: int = 0, generation: int = 1) -> r.CheckpointCommitted:
    return r.CheckpointCommitted(
        at=at, name=f"checkpoint_{index:06d}", index=index, iteration=iteration, generation=generation, metrics={}
    )


class CountingStore(PosixStore):
    """A directory that looks like an object store: no plain files, every upload counted, and failing on demand."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.uploads: list[tuple[str, int]] = []
        self.failing = False

    @property
    def local_root(self) -> Path | None:
        return None

    def put(self, key: str, data: bytes) -> None:
        if self.failing:
            raise Unavailable("The bucket is not there at the moment: try later.")
        self.uploads.append((key, len(data)))
        super().put(key, data)

    def upload(self, key: str, source: Source, on_bytes: OnBytes | None = None) -> Digest:
        if self.failing:
            raise Unavailable("The bucket is not there at the moment: try later.")
        self.uploads.append((key, size_of(source)))
        return super().upload(key, source, on_bytes)

    def sent(self, key: str) -> list[int]:
        """Sizes of what was uploaded there, one after the other."""
        return [size_bytes for name, size_bytes in self.uploads if name.startswith(key)]

    def text(self, key: str) -> str:
        try:
            return self.get(key).decode()
        except NotFound:
            return ""
