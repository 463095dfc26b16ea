"""`ElasticSampler`: the batches of one rank, so that an epoch consumes each sample once across failures and resizes.

A batch sampler for a `DataLoader`, whose workers may draw batches ahead: what counts is what the loop was given, which
the loader that `prepare_data_loader` returns counts (`loaders`). The arithmetic is in `holdfast.train.elastic`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

from holdfast.errors import ConfigError
from holdfast.train import checks
from holdfast.train.elastic import Order, Pass, Progress

__all__ = ["ElasticSampler"]


class ElasticSampler:
    """Give it to a loader as `batch_sampler`, and the loader to `prepare_data_loader`.

    `batch_size` is each rank's; `global_batch_size`, that of all ranks together, stays the same in a world of any
    size. The last round of an epoch may be smaller (`drop_last` leaves it out). Where it has fewer samples than there
    are ranks, a rank without a share gets one of the samples all the same, with a `loss_weight` of 0.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        if (batch_size is None) == (global_batch_size is None):
            raise ConfigError("ElasticSampler() needs either batch_size, of each rank, or global_batch_size, of all.")
        here, world = _place()
        self._rank = here if rank is None else rank
        self._world_size = world if num_replicas is None else num_replicas
        if batch_size is not None:
            checks.whole_number("ElasticSampler(batch_size)", batch_size, least=1)
            self.round_size = batch_size * self._world_size
        else:
            assert global_batch_size is not None
            checks.whole_number("ElasticSampler(global_batch_size)", global_batch_size, least=1)
            self.round_size = global_batch_size
        if self.round_size < self._world_size:
            raise ConfigError(
                f"global_batch_size={self.round_size} is less than one sample for each of the {self._world_size} "
                "workers: raise it, or use fewer workers."
            )
        self._order = Order(size=len(dataset), seed=seed, shuffle=int(shuffle))
        self._drop_last = drop_last
        self.progress = Progress("The elastic loader", self._rank, self._world_size)
        self._driven: Pass | None = None
        """The pass that a loader has begun and counts itself."""

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration. Without it, each iteration is the epoch after the one before."""
        self.progress.set_epoch(epoch)

    def __len__(self) -> int:
        """How many batches a whole epoch has."""
        size = self._order.size or 0
        return size // self.round_size if self._drop_last else -(-size // self.round_size)

    def __iter__(self) -> Iterator[list[int]]:
        # A loader with workers asks twice for each of its own iterations: both are over the pass that it has begun.
        driven = self._driven if self.progress.is_current(self._driven) else None
        return self._batches(driven or self.progress.begin(self._order, self.round_size))

    def begin(self) -> Pass:
        """Begin a pass: iterations are over this one until it ends."""
        self._driven = self.progress.begin(self._order, self.round_size)
        return self._driven

    def rounds(self, over: Pass) -> int:
        """How many rounds a pass has."""
        return over.left // self.round_size if self._drop_last else -(-over.left // self.round_size)

    def _batches(self, over: Pass) -> Iterator[list[int]]:
        order = self._permutation(over.epoch)
        for number in range(self.rounds(over)):
            positions = over.positions(number) or [over.filler(number)]
            yield positions if order is None else order[positions].tolist()

    def generator(self, epoch: int) -> Any:
        """A generator of this rank's own for an epoch, which a loader seeds its processes from."""
        import torch

        seed = random.Random(f"{self._order.seed} {epoch} {self._rank}").getrandbits(63)
        return torch.Generator().manual_seed(seed)

    def _permutation(self, epoch: int) -> Any:
        if not self._order.shuffle:
            return None
        import torch

        generator = torch.Generator()
        generator.manual_seed(self._order.seed + epoch)
        return torch.randperm(self._order.size or 0, generator=generator)


def _place() -> tuple[int, int]:
    """Rank and world size: of the process group, or else of the run."""
    import torch.distributed as dist

    from holdfast.worker import session

    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if session.is_installed():
        here = session.current().assignment
        return here.rank, here.world_size
    return 0, 1
