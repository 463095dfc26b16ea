"""`get_dataset_shard(elastic=True)`: one rank's rows of a data set of which an epoch consumes each row exactly once.

Every rank walks through the rows of all ranks in the same order and keeps its share of each round (`elastic`). Rows
that are shuffled are shuffled in that common order, so what was consumed is known whatever the number of ranks. Of
data sets that are indexed only the numbers of rows are walked through; iterables are read from their beginning.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

from holdfast.errors import ConfigError
from holdfast.train import checks
from holdfast.train.data import DatasetShard, collate, is_sequence, rows_of, shuffled
from holdfast.train.elastic import Order, Pass, Progress
from holdfast.train.saved_progress import keep_progress, restore_random_states, save_random_states

__all__ = ["ElasticShard"]


class ElasticShard(DatasetShard):
    """What is left of the epoch at the first iteration after a restart, and a whole epoch at each one after that."""

    def __init__(
        self, data: Any, name: str, rank: int, world_size: int, global_batch_size: int | None, rng_state: bool
    ) -> None:
        if global_batch_size is not None:
            checks.whole_number("get_dataset_shard(global_batch_size)", global_batch_size, least=world_size)
        super().__init__(data, rank, world_size)
        self._global_batch_size = global_batch_size
        self._progress = Progress(f"The elastic data set {name!r}", rank, world_size)
        self._rng_state = rng_state
        keep_progress(f"dataset {name}", self._progress)
        if rng_state:
            save_random_states()

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration. Without it, each iteration is the epoch after the one before."""
        self._progress.set_epoch(epoch)

    @property
    def loss_weight(self) -> float:
        """The factor for the loss of the batch that was given last; see `prepare_data_loader`."""
        return self._progress.weight

    def __len__(self) -> int:
        """How many rows this rank has of a whole epoch, or one less."""
        return len(self._data) // self._world_size

    def materialize(self) -> DatasetShard:
        raise ConfigError("An elastic data set cannot be materialized: rows that are in memory at once are all given.")

    def iter_rows(self) -> Iterator[Any]:
        """Row by row, one for each rank in turn. At the end of an epoch some ranks may have one row less than others,
        and get one all the same, whose `loss_weight` is 0."""
        for rows in self._rounds(self._world_size, 0, 0, drop_last=False):
            yield from rows

    def iter_batches(
        self,
        *,
        batch_size: int | None = 256,
        batch_format: str | None = "default",
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        prefetch_batches: int = 1,
    ) -> Iterator[Any]:
        """As of any shard, but: with a `global_batch_size` that of the shard counts and not `batch_size`; rows are
        shuffled in a buffer of the rows of all ranks, anew in each epoch."""
        checks.one_of("iter_batches(batch_format)", batch_format or "default", ("default", "numpy", "pandas"))
        if self._global_batch_size is None and batch_size is None:
            raise ConfigError("iter_batches(batch_size=None) of an elastic data set: one batch of all rows is no step.")
        if batch_size is not None:
            checks.whole_number("iter_batches(batch_size)", batch_size, least=1)
        round_size = self._global_batch_size or (batch_size or 0) * self._world_size
        buffer, seed = local_shuffle_buffer_size or 0, local_shuffle_seed or 0
        for rows in self._rounds(round_size, buffer, seed, drop_last=drop_last):
            yield collate(rows, batch_format)

    def _rounds(self, round_size: int, buffer: int, seed: int, *, drop_last: bool) -> Iterator[list[Any]]:
        """This rank's share of each round."""
        size = len(self._data) if is_sequence(self._data) else None
        over = self._progress.begin(Order(size=size, seed=seed, shuffle=buffer), round_size)
        if self._rng_state and not (size is None and over.consumed):
            restore_random_states()
        try:
            rest = self._rest(over, buffer, seed, knows_size=size is not None)
            while items := list(islice(rest, round_size)):
                if drop_last and len(items) < round_size:
                    return
                share = over.share(len(items))
                mine = items[share.start : share.stop] or items[:1]
                if self._rng_state:  # not before a stream has been read up to where it was
                    restore_random_states()
                rows = [self._data[item] for item in mine] if size is not None else mine
                over.give(share)
                yield rows
        finally:
            self._progress.end(over)

    def _rest(self, over: Pass, buffer: int, seed: int, *, knows_size: bool) -> Iterator[Any]:
        """What is left of the epoch, in its order: numbers of rows, or rows where these have none."""
        items: Iterator[Any] = iter(range(len(self._data))) if is_sequence(self._data) else rows_of(self._data)
        # A string seeds alike in every process, and no two pairs of seed and epoch give the same one.
        ordered = shuffled(items, buffer, random.Random(f"{seed} {over.epoch}"))
        count = 0
        for position, item in enumerate(ordered):
            count = position + 1
            if over.has(position):
                yield item
        if not knows_size:
            over.size = count
