"""The state that `bench.checkpoint` saves, the ways in which others save it, and the floors that nobody gets below."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from holdfast.worker.snapshot_buffer import make_memory, prefault

__all__ = ["Floors", "Others", "change", "make_state"]

_TENSORS = 20
_WRITE_BYTES = 8 * 1024 * 1024


def make_state(size_bytes: int) -> dict[str, Any]:
    """Twenty tensors, and the few plain values that every state has."""
    import torch

    count = size_bytes // _TENSORS // 4
    model = {f"layer_{number:02d}": torch.randn(count) for number in range(_TENSORS)}
    return {"model": model, "step": 0, "lr": 0.1}


def change(state: dict[str, Any], share: float) -> None:
    """Change this share of the tensors."""
    state["step"] += 1
    for tensor in list(state["model"].values())[: round(share * _TENSORS)]:
        tensor.add_(1)


class Others:
    """How a training script saves a state without a trainer."""

    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        import torch.distributed as dist

        self._target = directory / "others"
        self._state = state
        self._dist = dist
        self._saving: Any = None
        self._count = 0
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())

    def close(self) -> None:
        self._dist.destroy_process_group()

    def torch_save(self) -> dict[str, float]:
        """`torch.save`, then fsync: training waits for all of it."""
        import torch

        self._target.mkdir()
        began = time.perf_counter()
        with (self._target / "state.pt").open("wb") as file:
            torch.save(self._state, file)
            file.flush()
            os.fsync(file.fileno())
        return self._done(began, time.perf_counter())

    def async_save(self) -> dict[str, float]:
        """`torch.distributed.checkpoint.async_save`, which copies, and writes with fsync behind training's back."""
        import torch.distributed.checkpoint as dcp

        began = time.perf_counter()
        saving = dcp.async_save(self._state, checkpoint_id=str(self._target))
        stalled = time.perf_counter()
        saving.result()
        return self._done(began, stalled)

    def save_again(self) -> None:
        """The same in a loop: whoever saves again waits for the one before, or they pile up."""
        import torch.distributed.checkpoint as dcp

        self.finish()
        self._target.mkdir(exist_ok=True)
        self._count += 1
        self._saving = dcp.async_save(self._state, checkpoint_id=str(self._target / str(self._count % 2)))

    def finish(self) -> None:
        """Wait until all is stored."""
        if self._saving is not None:
            self._saving.result()

    def _done(self, began: float, stalled: float) -> dict[str, float]:
        taken = {"stall_s": stalled - began, "durable_s": time.perf_counter() - began}
        shutil.rmtree(self._target)
        return taken


class Floors:
    """What the machine can do: one copy into memory that is at hand, and the bytes to the disk past its cache."""

    def __init__(self, directory: Path, tensors: Sequence[Any]) -> None:
        import torch

        self._directory = directory / "floor"
        self._tensors = tensors
        fd = make_memory("holdfast-bench")
        os.ftruncate(fd, sum(_whole_pages(one.nbytes) for one in tensors))
        self._memory = mmap.mmap(fd, 0)
        os.close(fd)
        prefault(self._memory)
        self._views: list[memoryview] = []
        self._targets: list[Any] = []
        at = 0
        for one in tensors:
            self._views.append(memoryview(self._memory)[at : at + _whole_pages(one.nbytes)])
            self._targets.append(torch.frombuffer(self._memory, dtype=one.dtype, count=one.numel(), offset=at))
            at += _whole_pages(one.nbytes)

    def copied(self) -> dict[str, float]:
        """memcpy of each tensor as a whole, by as many cores as there are."""
        pairs = zip(self._targets, self._tensors, strict=True)
        blocks = [(target.data_ptr(), source.data_ptr(), source.nbytes) for target, source in pairs]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            began = time.perf_counter()
            list(pool.map(lambda block: ctypes.memmove(*block), blocks))
            return {"stall_s": time.perf_counter() - began}

    def copied_by_torch(self) -> dict[str, float]:
        """`Tensor.copy_`, with torch's own threads."""
        began = time.perf_counter()
        for target, source in zip(self._targets, self._tensors, strict=True):
            target.copy_(source)
        return {"stall_s": time.perf_counter() - began}

    def written(self, threads: int) -> dict[str, float]:
        """One file a tensor, each with fsync."""
        self._directory.mkdir()
        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(self._write, range(len(self._views))))
        taken = {"durable_s": time.perf_counter() - began}
        shutil.rmtree(self._directory)
        return taken

    def _write(self, number: int) -> None:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT
        fd = os.open(self._directory / str(number), flags)
        view = self._views[number]
        for start in range(0, len(view), _WRITE_BYTES):
            os.write(fd, view[start : start + _WRITE_BYTES])
        os.fsync(fd)
        os.close(fd)


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
