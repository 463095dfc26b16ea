"""`prepare_data_loader`: the same loader, but each worker sees its own share of the samples.

As in plain PyTorch, call `loader.sampler.set_epoch(epoch)` at the start of every epoch for a new order each time.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError
from holdfast.train.torch.devices import get_device

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

__all__ = ["prepare_data_loader"]


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
) -> Any:
    """Give each worker its share (`add_dist_sampler`) and put batches on its device (`move_to_device`).

    A loader that shuffles goes on shuffling. Iterable datasets and loaders with a `DistributedSampler` are left as they
    are. `auto_transfer` copies to a GPU without waiting for it.
    """
    import torch.distributed as dist

    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if add_dist_sampler and world_size > 1:
        data_loader = _shared_out(data_loader, world_size, dist.get_rank())
    device = get_device()
    if move_to_device and device.type != "cpu":
        return _OnDevice(data_loader, device, auto_transfer)
    return data_loader


def _shared_out(loader: DataLoader[Any], world_size: int, rank: int) -> DataLoader[Any]:
    from torch.utils.data import (
        BatchSampler,
        DataLoader,
        DistributedSampler,
        IterableDataset,
        RandomSampler,
        SequentialSampler,
    )

    if isinstance(loader.dataset, IterableDataset) or isinstance(loader.sampler, DistributedSampler):
        return loader
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        raise ConfigError(
            f"prepare_data_loader() cannot share out a loader with the batch_sampler "
            f"{type(loader.batch_sampler).__name__}: make that sampler aware of ranks and pass add_dist_sampler=False."
        )
    if not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        warnings.warn(
            f"prepare_data_loader() replaces the sampler {type(loader.sampler).__name__} by a shuffling "
            "DistributedSampler; pass add_dist_sampler=False to keep yours.",
            stacklevel=3,
        )
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset,
        num_replicas=world_size,
        rank=rank,
        shuffle=not isinstance(loader.sampler, SequentialSampler),
        seed=loader.generator.initial_seed() if loader.generator is not None else 0,
        drop_last=loader.drop_last,
    )
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


class _OnDevice:
    """A loader whose batches arrive on the device. Everything else is the loader's own."""

    def __init__(self, loader: DataLoader[Any], device: torch.device, non_blocking: bool) -> None:
        self._loader = loader
        self._device = device
        self._non_blocking = non_blocking

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield self._moved(batch)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def _moved(self, value: Any) -> Any:
        if hasattr(value, "to"):
            return value.to(self._device, non_blocking=self._non_blocking)
        if isinstance(value, Mapping):
            return {key: self._moved(item) for key, item in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._moved(item) for item in value))
        if isinstance(value, list | tuple):
            return type(value)(self._moved(item) for item in value)
        return value
