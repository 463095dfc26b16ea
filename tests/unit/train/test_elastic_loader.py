"""Elastic loaders and shards: what was prefetched is not counted, and what is saved is what comes back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch
from tests.unit.worker.fake_agent import FakeAgent
from torch.utils.data import DataLoader

from holdfast.checkpoint.commit import commit
from holdfast.checkpoint.reserve import reserve
from holdfast.checkpoint.worker_states import put_worker_states
from holdfast.errors import ConfigError
from holdfast.storage.locate import open_store
from holdfast.train.elastic_shard import ElasticShard
from holdfast.train.torch import ElasticSampler, prepare_data_loader
from holdfast.worker import session as sessions

SIZE = 23
_iterators: list[Any] = []


class Generation:
    """Ranks of one generation in this process, one after the other: each has a session of its own."""

    def __init__(self, storage: Path, world_size: int, checkpoint: str | None) -> None:
        self.storage, self.world_size, self.checkpoint = storage, world_size, checkpoint
        self.states: dict[int, bytes] = {}

    def run(self, rank: int, function: Any) -> Any:
        """Call `function` as this rank, and keep what it saves with a report at its end."""
        with FakeAgent(
            rank=rank, world_size=self.world_size, storage=str(self.storage), checkpoint=self.checkpoint
        ) as agent:
            sessions.install(agent.session)
            try:
                found = function()
                agent.session.report({})
            finally:
                sessions.install(None)
                _iterators.clear()  # and with them the loaders' processes, which hold the agent's socket too
            self.states[rank] = agent.next().report.worker_state
        return found

    def commit(self) -> str:
        """Commit a checkpoint of all ranks' states."""
        store = open_store(str(self.storage))
        draft = reserve(store)
        entry = put_worker_states(store, draft.name, self.world_size, self.states)
        return commit(store, draft, [], worker_states=entry, world_size=self.world_size).name


def batches(loader: Any, count: int) -> list[int]:
    """The samples of so many batches, while the loop goes on: its iterator is kept until the rank has reported."""
    iterator = iter(loader)
    _iterators.append(iterator)
    found: list[int] = []
    for _ in range(count):
        batch = next(iterator)
        found += [int(one) for one in batch] if loader.loss_weight else []
    return found


def test_prefetched_batches_are_not_counted_and_another_world_goes_on(tmp_path: Path) -> None:
    def first() -> list[int]:
        loader = DataLoader(range(SIZE), batch_size=2, shuffle=True, num_workers=1, prefetch_factor=4)
        return batches(prepare_data_loader(loader, elastic=True, global_batch_size=4), 3)

    def second() -> list[int]:
        loader = prepare_data_loader(DataLoader(range(SIZE), shuffle=True), elastic=True, global_batch_size=4)
        loader.set_epoch(0)
        found = [int(one) for batch in loader if loader.loss_weight for one in batch]
        again = [int(one) for batch in loader for one in batch if loader.loss_weight]
        assert len(again) > len(found)  # the next epoch is whole
        return found

    two = Generation(tmp_path, 2, None)
    seen = [one for rank in range(2) for one in two.run(rank, first)]
    assert len(seen) == 12
    three = Generation(tmp_path, 3, two.commit())
    seen += [one for rank in range(3) for one in three.run(rank, second)]
    assert sorted(seen) == list(range(SIZE))


def test_the_order_depends_on_the_seed_and_the_epoch_alone() -> None:
    def order(world_size: int, seed: int, epoch: int) -> list[int]:
        ranks = [
            ElasticSampler(range(SIZE), global_batch_size=6, seed=seed, num_replicas=world_size, rank=rank)
            for rank in range(world_size)
        ]
        for one in ranks:
            one.set_epoch(epoch)
        return [at for step in zip(*ranks, strict=True) for batch in step for at in batch][:SIZE]

    assert order(1, 0, 0) == order(2, 0, 0) == order(3, 0, 0)
    assert len({tuple(order(1, seed, epoch)) for seed in (0, 9) for epoch in (0, 1)}) == 4


def test_random_states_are_restored_before_the_first_batch(tmp_path: Path) -> None:
    def numbers() -> list[float]:
        return [random.random(), random.gauss(), float(numpy.random.rand()), float(torch.rand(()))]

    def first() -> list[float]:
        loader = prepare_data_loader(DataLoader(range(SIZE)), elastic=True, rng_state=True)
        random.seed(7)
        batches(loader, 2)
        random.gauss()  # which keeps a second number for the next call
        return []

    def second() -> list[float]:
        loader = prepare_data_loader(DataLoader(range(SIZE), shuffle=False), elastic=True, rng_state=True)
        torch.manual_seed(99)
        random.seed(99)
        numpy.random.seed(99)
        batches(loader, 1)
        return numbers()

    one = Generation(tmp_path, 1, None)
    one.run(0, first)
    expected = numbers()
    assert Generation(tmp_path, 1, one.commit()).run(0, second) == expected


def test_random_states_are_kept_by_a_report_before_the_first_batch(tmp_path: Path) -> None:
    def first() -> list[int]:
        loader = prepare_data_loader(DataLoader(range(SIZE)), elastic=True, rng_state=True)
        torch.manual_seed(7)
        return batches(loader, 1)

    def only_reports() -> None:
        prepare_data_loader(DataLoader(range(SIZE)), elastic=True, rng_state=True)
        torch.manual_seed(99)  # a model is made

    def third() -> float:
        loader = prepare_data_loader(DataLoader(range(SIZE)), elastic=True, rng_state=True)
        batches(loader, 1)
        return float(torch.rand(()))

    one = Generation(tmp_path, 1, None)
    one.run(0, first)
    expected = float(torch.rand(()))
    two = Generation(tmp_path, 1, one.commit())
    two.run(0, only_reports)
    assert Generation(tmp_path, 1, two.commit()).run(0, third) == expected


class Noisy:
    """Samples that are augmented at random."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, at: int) -> torch.Tensor:
        return at + torch.rand(())


@pytest.mark.parametrize(
    "steps", [1, 2, 3, 4], ids=["in an epoch", "before its last batch", "at its end", "in the next"]
)
@pytest.mark.parametrize("processes", [0, 1])
def test_random_numbers_go_on_as_if_nothing_had_happened(processes: int, steps: int, tmp_path: Path) -> None:
    def loader() -> Any:
        several = {"num_workers": 1, "persistent_workers": True} if processes else {}
        return prepare_data_loader(
            DataLoader(Noisy(), batch_size=2, **several),
            elastic=True,
            rng_state=True,
        )

    def train(count: int) -> list[float]:
        """So many steps, over as many epochs as they take, with dropout."""
        found: list[float] = []
        other = prepare_data_loader(DataLoader([0]), elastic=True, rng_state=True)
        train_loader = loader()
        torch.rand(5)  # a model that is made
        while True:
            _iterators.append(iter(train_loader))
            for batch in _iterators[-1]:
                # What a loader's processes draw is not saved.
                found.append(float(torch.rand(()) + (0 if processes else batch.sum())))
                if len(found) == count:
                    return found
            list(other)  # validation

    torch.manual_seed(1)
    whole = Generation(tmp_path / "whole", 1, None).run(0, lambda: train(8))
    torch.manual_seed(1)
    first = Generation(tmp_path, 1, None)
    found = first.run(0, lambda: train(steps))
    torch.manual_seed(99)
    found += Generation(tmp_path, 1, first.commit()).run(0, lambda: train(8 - steps))
    assert found == whole


@pytest.mark.parametrize("buffer", [0, 8])
@pytest.mark.parametrize("indexed", [True, False])
def test_shards_give_each_row_once_over_a_resize(indexed: bool, buffer: int, tmp_path: Path) -> None:
    class Rows:
        def __iter__(self) -> Iterator[int]:
            return iter(range(SIZE))

    data = list(range(SIZE)) if indexed else Rows()

    def shard(rank: int, world_size: int) -> Any:
        found: Any = ElasticShard(data, "train", rank, world_size, 5, False)
        return found

    def rows(found: Any, count: int) -> list[int]:
        seen: list[int] = []
        iterator = found.iter_batches(local_shuffle_buffer_size=buffer)
        _iterators.append(iterator)
        for _ in range(count):
            batch = next(iterator, None)
            seen += [int(one) for one in batch] if batch is not None and found.loss_weight else []
        return seen

    two = Generation(tmp_path, 2, None)
    seen = [one for rank in range(2) for one in two.run(rank, lambda rank=rank: rows(shard(rank, 2), 2))]
    assert len(seen) == 10
    four = Generation(tmp_path, 4, two.commit())
    seen += [one for rank in range(4) for one in four.run(rank, lambda rank=rank: rows(shard(rank, 4), 9))]
    assert sorted(seen) == list(range(SIZE))


@pytest.mark.parametrize("size", [10, 12])
@pytest.mark.parametrize("ahead", [1, 2, 4], ids=["its last batch", "its end", "the next epoch"])
def test_one_rank_may_reach_the_end_of_a_stream_before_others(ahead: int, size: int, tmp_path: Path) -> None:
    class Rows:
        def __iter__(self) -> Iterator[int]:
            return iter(range(size))

    def rows(rank: int, world_size: int, count: int) -> list[int]:
        shard = ElasticShard(Rows(), "train", rank, world_size, 4, False)
        seen: list[int] = []
        for _ in range(3):
            iterator = shard.iter_batches()
            _iterators.append(iterator)
            while count > 0:
                count -= 1
                if (batch := next(iterator, None)) is None:
                    break
                seen += [100 * shard._progress.epoch + int(one) for one in batch] if shard.loss_weight else []
        return seen

    rounds = 3
    two = Generation(tmp_path, 2, None)
    seen = two.run(0, lambda: rows(0, 2, rounds - 1 + ahead)) + two.run(1, lambda: rows(1, 2, rounds - 1))
    seen += Generation(tmp_path, 1, two.commit()).run(0, lambda: rows(0, 1, 7))
    assert sorted(one for one in seen if one < 100) == list(range(size))
    assert len(set(seen)) == len(seen)


def test_a_constant_global_batch_trains_the_same_weights_in_any_world() -> None:
    points = numpy.random.default_rng(0).normal(size=(SIZE, 3))
    targets = points @ numpy.array([1.0, -2.0, 0.5]) + 0.1

    def train(worlds: list[int]) -> Any:
        """Gradient descent on the mean squared error: one step in each world in turn, until three epochs are over."""
        weights, step = numpy.zeros(3), 0
        saved: tuple[dict[int, Any], int] = ({}, 0)
        while True:
            world = worlds[step % len(worlds)]
            ranks = [
                ElasticSampler(range(SIZE), global_batch_size=6, num_replicas=world, rank=rank) for rank in range(world)
            ]
            gradient = numpy.zeros(3)
            for rank in ranks:
                rank.progress.restore(*saved)
                over = rank.begin()
                batch = next(iter(rank), None)
                if batch is None:
                    rank.progress.end(over)
                    continue
                over.give(over.share(number=0))
                errors = points[batch] @ weights - targets[batch]
                gradient += rank.progress.weight * 2 * points[batch].T @ errors / len(batch) / world
            weights = weights - 0.05 * gradient
            saved = (
                {at: msgspec.json.decode(msgspec.json.encode(rank.progress.save())) for at, rank in enumerate(ranks)},
                world,
            )
            step += 1
            if ranks[0].progress.epoch == 3:
                return weights

    undisturbed, history = train([1]), [2, 4, 3, 1, 6]
    assert numpy.allclose(train(history), undisturbed, rtol=1e-6, atol=0)
    assert train(history).tobytes() == train(history).tobytes()


def test_what_cannot_be_elastic_is_refused() -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(ConfigError, match="get_dataset_shard"):
        prepare_data_loader(DataLoader(Stream()), elastic=True)
    with pytest.raises(ConfigError, match="needs elastic=True"):
        prepare_data_loader(DataLoader(range(3)), rng_state=True)
    with pytest.raises(ConfigError, match="less than one sample for each of the 4"):
        ElasticSampler(range(3), global_batch_size=3, num_replicas=4, rank=0)
    with pytest.raises(ConfigError, match="either batch_size"):
        ElasticSampler(range(3))
    subset = torch.utils.data.SubsetRandomSampler([1, 2])
    with pytest.raises(ConfigError, match=r"a loader with batch_size=None.* give it a batch_size"):
        prepare_data_loader(DataLoader(range(3), batch_size=None), elastic=True)
    with pytest.raises(ConfigError, match="SubsetRandomSampler"):
        prepare_data_loader(DataLoader(range(3), sampler=subset), elastic=True)
