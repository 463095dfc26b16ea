"""`prepare_data_loader`: the same loader, but each worker sees its own share of the samples.

As in plain PyTorch, call `loader.sampler.set_epoch(epoch)` at the start of every epoch for a new order each time.
With `elastic=True` the loader goes on where the checkpoint left it, with any number of workers (`sampler`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError
from holdfast.train.saved_progress import (
    keep_progress,
    next_loader_name,
    restore_random_states,
    save_random_states,
)
from holdfast.train.torch.devices import get_device
from holdfast.train.torch.sampler import ElasticSampler

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

__all__ = ["ElasticLoader", "prepare_data_loader"]


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
    *,
    elastic: bool = False,
    global_batch_size: int | None = None,
    rng_state: bool = False,
) -> Any:
    """Give each worker its share (`add_dist_sampler`) and put batches on its device (`move_to_device`).

    A loader that shuffles goes on shuffling. Iterable datasets and loaders with a `DistributedSampler` are left as they
    are. `auto_transfer` copies to a GPU without waiting for it.

    `elastic`: each sample is consumed exactly once an epoch, across failures and with any number of workers after them:
    what the loop was given is saved with each checkpoint, and the next workers go on from there. The order depends on
    the seed alone. A loader whose `batch_sampler` is an `ElasticSampler` is elastic by itself.
    `global_batch_size` (with `elastic`): so many samples a step in all, whatever the number of workers; the batch size
    of the loader does not count. Multiply the loss by `loader.loss_weight`: shares may be uneven.
    `rng_state` (with `elastic`): save the states of this rank's random generators (Python, numpy, torch, CUDA) with
    each checkpoint, and restore them when the loader is first iterated over after a restart.
    """
    import torch.distributed as dist

    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if elastic or isinstance(data_loader.batch_sampler, ElasticSampler):
        data_loader = _elastic(data_loader, global_batch_size, rng_state)
    elif global_batch_size is not None or rng_state:
        name = "rng_state" if global_batch_size is None else "global_batch_size"
        raise ConfigError(f"prepare_data_loader({name}) needs elastic=True.")
    elif add_dist_sampler and world_size > 1:
        data_loader = _shared_out(data_loader, world_size, dist.get_rank())
    device = get_device()
    if move_to_device and device.type != "cpu":
        return _OnDevice(data_loader, device, auto_transfer)
    return data_loader


def _shared_out(loader: DataLoader[Any], world_size: int, rank: int) -> DataLoader[Any]:
    from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

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
    return _remade(loader, batch_size=loader.batch_size, sampler=sampler, drop_last=loader.drop_last)


def _elastic(loader: DataLoader[Any], global_batch_size: int | None, rng_state: bool) -> Any:
    from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            "prepare_data_loader(elastic=True) needs a data set that is indexed: give an iterable one to the trainer "
            "(datasets=...) and iterate over train.get_dataset_shard(name, elastic=True)."
        )
    if not getattr(loader, "in_order", True):
        raise ConfigError("prepare_data_loader(elastic=True) needs DataLoader(in_order=True), to know what was given.")
    sampler = loader.batch_sampler
    if sampler is None:
        raise ConfigError(
            "prepare_data_loader(elastic=True) cannot share out a loader with batch_size=None, which makes no batches: "
            "give it a batch_size."
        )
    if isinstance(sampler, ElasticSampler):
        if global_batch_size is not None:
            raise ConfigError("prepare_data_loader(global_batch_size): give it to the loader's ElasticSampler.")
        return ElasticLoader(loader, sampler, rng_state)
    if type(sampler) is not BatchSampler or not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        what = loader.sampler if type(sampler) is BatchSampler else sampler
        raise ConfigError(
            f"prepare_data_loader(elastic=True) cannot keep the sampler {type(what).__name__}: leave it out, or give "
            "the loader batch_sampler=ElasticSampler(...)."
        )
    elastic = ElasticSampler(
        loader.dataset,
        batch_size=loader.batch_size if global_batch_size is None else None,
        global_batch_size=global_batch_size,
        shuffle=isinstance(loader.sampler, RandomSampler),
        seed=loader.generator.initial_seed() if loader.generator is not None else 0,
        drop_last=loader.drop_last,
    )
    return ElasticLoader(_remade(loader, batch_sampler=elastic), elastic, rng_state)


def _remade(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """The same loader with another sampler."""
    from torch.utils.data import DataLoader

    if not getattr(loader, "in_order", True):
        changes["in_order"] = False
    return DataLoader(
        loader.dataset,
        **changes,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


class ElasticLoader:
    """A loader that counts what the loop is given. Everything else is the loader's own."""

    def __init__(self, loader: DataLoader[Any], sampler: ElasticSampler, rng_state: bool) -> None:
        self._loader = loader
        self.sampler = self.batch_sampler = sampler
        self._rng_state = rng_state
        self._seeds_processes = rng_state and loader.generator is None
        keep_progress(next_loader_name(), sampler.progress)
        if rng_state:
            save_random_states()

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration; `loader.sampler.set_epoch` is the same."""
        self.sampler.set_epoch(epoch)

    @property
    def loss_weight(self) -> float:
        """The factor for the loss (a mean over this rank's batch) that makes the mean of all ranks' gradients the
        gradient of the mean over the whole step's samples. 1 where all ranks have as many; 0 for a batch that this rank
        has only because it must have one."""
        return self.sampler.progress.weight

    def __iter__(self) -> Iterator[Any]:
        over = self.sampler.begin()
        if self._seeds_processes:  # otherwise it draws a seed for them from the generator that is saved
            self._loader.generator = self.sampler.generator(over.epoch)
        try:
            batches = iter(self._loader)
            if self._rng_state:
                restore_random_states()
            for batch in batches:
                over.give(over.share(number=over.rounds))
                yield batch
        finally:
            self.sampler.progress.end(over)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


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
