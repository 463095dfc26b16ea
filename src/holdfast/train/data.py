"""`datasets=` of trainers: any sequence or iterable, sharded by rank, and what `get_dataset_shard` gives of it.

A data set travels with the training function, by value; where it is large, give a function without arguments that
opens it: that is called once in each worker. `DataConfig` says which data sets are split; the others are whole on every
rank. Rows are what the data set gives: dicts of columns (Hugging Face, pyarrow), tuples, numbers, arrays.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from holdfast.errors import ConfigError
from holdfast.train import checks

if TYPE_CHECKING:
    import pandas
    import torch

__all__ = [
    "TRAIN_DATASET_KEY",
    "DataConfig",
    "DatasetShard",
    "Datasets",
    "check_datasets",
    "collate",
    "is_sequence",
    "rows_of",
    "shuffled",
]

TRAIN_DATASET_KEY = "train"
"""Which data set `get_dataset_shard()` means where several are given and none is named."""


class DataConfig:
    """Which data sets are split among the workers: all, or those that are named. The others are whole on every rank.

    Splitting gives each rank the same number of rows, so that no rank waits for another at the end: up to
    `world size - 1` rows at the end are left out. The other settings are Ray Data's and have no effect.
    """

    def __init__(
        self,
        datasets_to_split: Literal["all"] | Sequence[str] = "all",
        execution_options: Any = None,
        enable_shard_locality: bool = True,
    ) -> None:
        names = isinstance(datasets_to_split, list | tuple | set) and all(isinstance(n, str) for n in datasets_to_split)
        if datasets_to_split != "all" and not names:
            raise ConfigError(
                f'DataConfig(datasets_to_split) must be "all" or a list of names, not {datasets_to_split!r}.'
            )
        no_effect = "it is a setting of Ray Data."
        if execution_options is not None:
            checks.warn_of_no_effect("DataConfig(execution_options)", no_effect, stacklevel=3)
        if not enable_shard_locality:
            checks.warn_of_no_effect("DataConfig(enable_shard_locality)", no_effect, stacklevel=3)
        self._split = datasets_to_split

    def splits(self, name: str) -> bool:
        return self._split == "all" or name in self._split


def check_datasets(datasets: Any, config: Any) -> Datasets:
    """What a trainer was given; a `ConfigError` names what cannot be iterated over."""
    if datasets is not None and not isinstance(datasets, Mapping):
        raise ConfigError(f'datasets must be a dict such as {{"train": rows}}, not {type(datasets).__name__}.')
    if config is not None and not isinstance(config, DataConfig):
        raise ConfigError(f"dataset_config must be a DataConfig, not {type(config).__name__}.")
    for name, data in (datasets or {}).items():
        if type(data).__module__.startswith("ray.data"):
            raise ConfigError(
                f"datasets[{name!r}] is a Ray data set, which needs a Ray cluster: pass a list, a torch, Hugging Face "
                "or pyarrow data set, or a function that opens one."
            )
        if isinstance(data, Mapping):
            raise ConfigError(f"datasets[{name!r}] is a dict of data sets: give each of them a name of its own.")
        if not (callable(data) or is_sequence(data) or isinstance(data, Iterable) or hasattr(data, "to_batches")):
            raise ConfigError(
                f"datasets[{name!r}] is a {type(data).__name__}, which gives no rows: pass a sequence, an iterable, or "
                "a function that opens one."
            )
    return Datasets(dict(datasets or {}), config or DataConfig())


class Datasets:
    """All data sets of a run; in each worker they are opened when their shard is first asked for."""

    def __init__(self, data: dict[str, Any], config: DataConfig) -> None:
        self._data = data
        self._config = config

    def __bool__(self) -> bool:
        return bool(self._data)

    def unopened(self) -> Datasets:
        """The same as they were given, whatever is opened here."""
        return Datasets(dict(self._data), self._config)

    def shard(self, name: str | None, rank: int, world_size: int) -> DatasetShard | None:
        """This rank's rows of `name`; None where the trainer was given no data sets at all."""
        found = self.open(name)
        if found is None:
            return None
        name, data = found
        return DatasetShard(data, rank, world_size) if self._config.splits(name) else DatasetShard(data, 0, 1)

    def open(self, name: str | None) -> tuple[str, Any] | None:
        """The data set of this name, and its name where none is given; None where there are no data sets at all."""
        if not self._data:
            return None
        if name is None:
            name = next(iter(self._data)) if len(self._data) == 1 else TRAIN_DATASET_KEY
        if name not in self._data:
            raise KeyError(f"get_dataset_shard({name!r}): datasets= of the trainer has {', '.join(self._data)}.")
        data = self._data[name]
        if callable(data) and not is_sequence(data) and not isinstance(data, Iterable):
            data = self._data[name] = data()
        return name, data


class DatasetShard:
    """One rank's rows. May be iterated over again and again, as often as the data set itself may."""

    def __init__(self, data: Any, rank: int, world_size: int) -> None:
        self._data = data
        self._rank = rank
        self._world_size = world_size

    def __iter__(self) -> Iterator[Any]:
        return self.iter_rows()

    @property
    def loss_weight(self) -> float:
        """What the loss of the last batch counts; other than 1 in elastic shards only."""
        return 1.0

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration: an elastic shard must know it, and the others are the same in each."""

    def __bool__(self) -> bool:
        """Whether there are rows; a data set that does not know its length counts as one that has some."""
        return not hasattr(self._data, "__len__") or len(self) > 0

    def __len__(self) -> int:
        """How many rows this rank has, for data sets that know their length."""
        return len(self._data) // self._world_size

    def count(self) -> int:
        return len(self) if is_sequence(self._data) else sum(1 for _ in self)

    def materialize(self) -> DatasetShard:
        """This rank's rows, all of them in memory."""
        return DatasetShard(list(self), 0, 1)

    def to_pandas(self) -> pandas.DataFrame:
        """This rank's rows as a data frame; a column for each key where rows are dicts, otherwise the column "item"."""
        import pandas

        rows = list(self)
        return pandas.DataFrame(rows if rows and isinstance(rows[0], Mapping) else {"item": rows})

    def iter_rows(self) -> Iterator[Any]:
        """Row by row, in the order of the data set."""
        if is_sequence(self._data):
            for at in range(len(self)):
                yield self._data[at * self._world_size + self._rank]
            return
        # A row counts once every rank has one of its round: all ranks see the same number of rows.
        mine: Any = None
        for at, row in enumerate(rows_of(self._data)):
            place = at % self._world_size
            if place == self._rank:
                mine = row
            if place == self._world_size - 1:
                yield mine

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
        """Batches as numpy arrays, by column where rows are dicts ("pandas" gives data frames of those). None is one
        batch of all rows. `prefetch_batches` has no effect."""
        checks.one_of("iter_batches(batch_format)", batch_format or "default", ("default", "numpy", "pandas"))
        if batch_size is not None:
            checks.whole_number("iter_batches(batch_size)", batch_size, least=1)
        rows = shuffled(self.iter_rows(), local_shuffle_buffer_size, random.Random(local_shuffle_seed))
        batch: list[Any] = []
        for row in rows:
            batch.append(row)
            if len(batch) == batch_size:
                yield collate(batch, batch_format)
                batch = []
        if batch and not (drop_last and batch_size is not None):
            yield collate(batch, batch_format)

    def iter_torch_batches(
        self,
        *,
        batch_size: int | None = 256,
        dtypes: Any = None,
        device: Any = "auto",
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        prefetch_batches: int = 1,
        pin_memory: bool = False,
    ) -> Iterator[Any]:
        """The same as tensors, on this worker's device ("auto"). A `collate_fn` gets the batch as numpy arrays."""
        import torch

        from holdfast.train.torch.devices import get_device

        where = get_device() if device == "auto" else torch.device(device or "cpu")
        for batch in self.iter_batches(
            batch_size=batch_size,
            drop_last=drop_last,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
        ):
            yield collate_fn(batch) if collate_fn is not None else _tensors(batch, dtypes, where)

    def __repr__(self) -> str:
        return f"DatasetShard({type(self._data).__name__}, rank {self._rank} of {self._world_size})"


def is_sequence(data: Any) -> bool:
    """Whether rows can be asked for by number; data frames and tables are indexed by something else."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not _is_table(data)


def _is_table(data: Any) -> bool:
    return hasattr(data, "to_batches") or hasattr(data, "itertuples")


def rows_of(data: Any) -> Iterator[Any]:
    if hasattr(data, "to_batches"):  # a pyarrow table or data set
        for batch in data.to_batches():
            yield from batch.to_pylist()
    elif hasattr(data, "itertuples"):  # a data frame
        yield from data.to_dict(orient="records")
    else:
        yield from data


def shuffled(rows: Iterator[Any], size: int | None, dice: random.Random) -> Iterator[Any]:
    """In the order of a buffer of so many rows from which one is taken at random."""
    if not size:
        yield from rows
        return
    buffer = []
    for row in rows:
        buffer.append(row)
        if len(buffer) >= size:
            at = dice.randrange(len(buffer))
            buffer[at], buffer[-1] = buffer[-1], buffer[at]
            yield buffer.pop()
    dice.shuffle(buffer)
    yield from buffer


def collate(rows: list[Any], batch_format: str | None) -> Any:
    if batch_format == "pandas":
        import pandas

        return pandas.DataFrame(rows)
    return _stack(rows)


def _stack(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {name: _stack([value[name] for value in values]) for name in first}
    if isinstance(first, tuple):
        return tuple(_stack(list(column)) for column in zip(*values, strict=True))
    import numpy

    arrays = [numpy.asarray(value) for value in values]
    if len({array.shape for array in arrays}) == 1:
        return numpy.stack(arrays)
    ragged: Any = numpy.empty(len(arrays), dtype=object)
    ragged[:] = arrays
    return ragged


def _tensors(batch: Any, dtypes: Any, device: torch.device, name: str | None = None) -> Any:
    import torch

    if isinstance(batch, Mapping):
        return {key: _tensors(column, dtypes, device, key) for key, column in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_tensors(column, dtypes, device) for column in batch)
    if batch.dtype == object or batch.dtype.kind in "US":
        raise TypeError(
            f"iter_torch_batches(): the column {name!r} holds {batch.dtype.type.__name__} values, which are no tensor: "
            "pass a collate_fn that converts them."
        )
    dtype = dtypes.get(name) if isinstance(dtypes, Mapping) else dtypes
    return torch.as_tensor(batch, dtype=dtype, device=device)
