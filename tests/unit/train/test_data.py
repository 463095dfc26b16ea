"""Data sets of trainers: rows and batches of each rank, whatever kind of data set it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pandas
import pyarrow
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from holdfast.errors import ConfigError
from holdfast.train import DataConfig, checks
from holdfast.train.data import Datasets, DatasetShard, check_datasets

ROWS = [{"x": float(at), "y": at} for at in range(11)]


class MapStyle(Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, at: int) -> Any:
        return ROWS[at]


class Stream(IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


def shards(data: Any, world_size: int = 2, config: DataConfig | None = None) -> list[DatasetShard]:
    made = check_datasets({"train": data}, config)
    found = [made.shard(None, rank, world_size) for rank in range(world_size)]
    return [one for one in found if one is not None]


@pytest.mark.parametrize(
    "data",
    [ROWS, tuple(ROWS), MapStyle(), Stream(), pyarrow.Table.from_pylist(ROWS), pandas.DataFrame(ROWS), lambda: ROWS],
    ids=["list", "tuple", "torch", "iterable", "pyarrow", "pandas", "function"],
)
def test_each_rank_has_its_rows_and_as_many_as_the_others(data: Any) -> None:
    first, second = shards(data)
    for _ in range(2):
        assert [row["y"] for row in first] == [0, 2, 4, 6, 8]
        assert [row["y"] for row in second.iter_rows()] == [1, 3, 5, 7, 9]
    assert first.count() == 5
    assert first and not DatasetShard([], 0, 1)


def test_a_data_set_that_is_not_split_is_whole_on_every_rank() -> None:
    made = check_datasets({"train": ROWS, "val": ROWS}, DataConfig(datasets_to_split=["train"]))
    whole = made.shard("val", 1, 2)
    assert whole is not None and len(whole) == 11
    assert [len(one) for one in (made.shard(None, 1, 2), made.shard("train", 0, 3)) if one is not None] == [5, 3]


def test_names() -> None:
    assert Datasets({}, DataConfig()).shard("train", 0, 1) is None
    with pytest.raises(KeyError, match=r"get_dataset_shard\('nope'\): datasets= of the trainer has train"):
        check_datasets({"train": ROWS}, None).shard("nope", 0, 1)


def test_batches_of_columns() -> None:
    batches = list(shards(ROWS)[0].iter_batches(batch_size=2))
    assert [batch["y"].tolist() for batch in batches] == [[0, 4 - 2], [4, 6], [8]]
    assert batches[0]["x"].dtype == numpy.float64
    assert len(list(shards(ROWS)[0].iter_batches(batch_size=2, drop_last=True))) == 2
    (whole,) = shards(ROWS)[0].iter_batches(batch_size=None, drop_last=True, batch_format="pandas")
    assert list(whole.columns) == ["x", "y"] and len(whole) == 5


def test_batches_of_tuples_scalars_and_arrays() -> None:
    (pairs,) = shards([(at, [at, at]) for at in range(4)])[0].iter_batches()
    assert (pairs[0].tolist(), pairs[1].tolist()) == ([0, 2], [[0, 0], [2, 2]])
    (numbers,) = shards(range(4))[0].iter_batches()
    assert numbers.tolist() == [0, 2]
    (ragged,) = shards([numpy.zeros(at + 1) for at in range(4)])[0].iter_batches()
    assert [len(one) for one in ragged] == [1, 3]


def test_tensors() -> None:
    (batch,) = shards(ROWS)[1].iter_torch_batches(dtypes={"x": torch.float32})
    assert (batch["x"].dtype, batch["y"].tolist()) == (torch.float32, [1, 3, 5, 7, 9])
    (batch,) = shards([(at, at) for at in range(4)])[0].iter_torch_batches(dtypes=torch.int32, device="cpu")
    assert [column.dtype for column in batch] == [torch.int32, torch.int32]
    (mine,) = shards(ROWS)[0].iter_torch_batches(collate_fn=lambda columns: columns["y"].sum())
    assert mine == 20
    with pytest.raises(TypeError, match="the column 'word' holds str_ values, which are no tensor: pass a collate_fn"):
        list(shards([{"word": "a"}] * 2)[0].iter_torch_batches())


def test_local_shuffling_keeps_all_rows_and_repeats_with_its_seed() -> None:
    def order(**settings: Any) -> list[int]:
        return [int(y) for batch in shards(ROWS, 1)[0].iter_batches(batch_size=3, **settings) for y in batch["y"]]

    first = order(local_shuffle_buffer_size=4, local_shuffle_seed=1)
    assert first == order(local_shuffle_buffer_size=4, local_shuffle_seed=1) != order()
    assert sorted(first) == order()


def test_settings_that_cannot_be_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_told", set())
    with pytest.raises(ConfigError, match=r'datasets_to_split\) must be "all" or a list of names, not 3'):
        DataConfig(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"batch_size\) must be a whole number of 1 or more"):
        list(shards(ROWS)[0].iter_batches(batch_size=0))
    with pytest.warns(UserWarning, match=r"DataConfig\(enable_shard_locality\) has no effect") as told:
        DataConfig(enable_shard_locality=False)
    assert told[0].filename == __file__


def test_a_shard_is_materialized_and_becomes_a_data_frame() -> None:
    shard = shards(ROWS)[1]
    assert list(shard.materialize()) == list(shard) == list(ROWS[1:10:2])
    assert shard.materialize().to_pandas().to_dict("records") == list(ROWS[1:10:2])
    assert list(shards([3, 4])[1].to_pandas()["item"]) == [4]
