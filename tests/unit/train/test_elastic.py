"""Any sequence of failures and changes of the world's size consumes each sample exactly once an epoch."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.train.elastic import LoaderState, Order, Pass, Progress, merge, split


def through_json(progress: Progress) -> object:
    """What a rank saves, as it comes back from storage."""
    return msgspec.json.decode(msgspec.json.encode(progress.save()))


class World:
    """Ranks that train in one generation, from what the checkpoint before had saved."""

    def __init__(self, size: int, order: Order, round_size: int, saved: tuple[dict[int, object], int]) -> None:
        self.order, self.round_size = order, round_size
        self.ranks = [Progress("loader", rank, size) for rank in range(size)]
        for progress in self.ranks:
            progress.restore(*saved)
        self.passes: list[Pass | None] = [None] * size
        self.given: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        """(epoch, position) that each rank was given."""

    def step(self, rank: int) -> None:
        """The loop of this rank is given one batch, or learns that the epoch is over."""
        over = self.passes[rank]
        if over is None:
            over = self.passes[rank] = self.ranks[rank].begin(self.order, self.round_size)
        if over.rounds * self.round_size >= over.left:
            self.ranks[rank].end(over)
            self.passes[rank] = None
            return
        positions = over.positions(over.rounds)
        over.give(over.share(number=over.rounds))
        self.given[rank] += [(over.epoch, position) for position in positions]

    def checkpoint(self) -> tuple[dict[int, object], int]:
        return {rank: through_json(one) for rank, one in enumerate(self.ranks)}, len(self.ranks)


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 60),
    round_size=st.integers(1, 17),
    constant=st.booleans(),
    lockstep=st.booleans(),
    generations=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 25), st.integers(0, 10)), min_size=1, max_size=8),
    seed=st.integers(0, 2**32),
)
def test_every_sample_is_consumed_once_an_epoch(
    size: int,
    round_size: int,
    constant: bool,
    lockstep: bool,
    generations: list[tuple[int, int, int]],
    seed: int,
) -> None:
    """Each generation: so many ranks, steps until its checkpoint, and steps after it that are lost with it."""
    chance = random.Random(seed)
    order = Order(size=size)
    saved: tuple[dict[int, object], int] = ({}, 0)
    consumed: Counter[tuple[int, int]] = Counter()
    for world_size, steps, lost in generations:
        world = World(world_size, order, round_size if constant else round_size * world_size, saved)
        for _ in range(steps):
            for rank in range(world_size):
                for _ in range(1 if lockstep else chance.randint(0, 3)):
                    world.step(rank)
        saved = world.checkpoint()
        consumed.update(one for given in world.given for one in given)
        for _ in range(lost):
            for rank in range(world_size):
                world.step(rank)
    last = World(1, order, round_size, saved)
    epochs = max((epoch for epoch, _ in consumed), default=0) + 1
    while last.ranks[0].epoch < epochs:
        last.step(0)
    consumed.update(last.given[0])
    wrong = {one: times for one, times in consumed.items() if times != 1}
    assert not wrong
    assert {epoch: sum(one == epoch for one, _ in consumed) for epoch in range(epochs)} == dict.fromkeys(
        range(epochs), size
    )


@given(st.integers(1, 100), st.integers(1, 20))
def test_shares_of_a_round_are_disjoint_and_their_weights_make_the_mean(count: int, world_size: int) -> None:
    shares = [split(count, rank, world_size) for rank in range(world_size)]
    assert [at for share in shares for at in range(share.start, share.stop)] == list(range(count))
    assert max(share.stop - share.start for share in shares) - min(share.stop - share.start for share in shares) <= 1
    values = [float(at * at) for at in range(count)]
    mean_of_means = sum(
        share.weight * sum(values[share.start : share.stop]) / max(1, share.stop - share.start) for share in shares
    )
    assert mean_of_means / world_size == pytest.approx(sum(values) / count)


def test_a_pass_whose_end_the_loop_has_not_seen_goes_on_with_nothing_left() -> None:
    order = Order(size=4)
    first = Progress("loader", 0, 1)
    over = first.begin(order, 2)
    for _ in range(2):
        over.give(over.share(number=over.rounds))
    again = Progress("loader", 0, 1)
    again.restore({0: through_json(first)}, 1)
    assert again.epoch == 0
    assert again.begin(order, 2).left == 0
    first.end(over)
    after = Progress("loader", 0, 1)
    after.restore({0: through_json(first)}, 1)
    assert after.epoch == 1
    assert after.begin(order, 2).left == 4


def test_only_the_first_pass_over_an_epoch_after_a_restart_is_over_the_rest() -> None:
    order = Order(size=10)
    first = Progress("loader", 0, 1)
    first.set_epoch(3)
    first.begin(order, 4).give(split(4, 0, 1))
    again = Progress("loader", 0, 1)
    again.restore({0: through_json(first)}, 1)
    again.set_epoch(3)
    assert again.begin(order, 4).left == 6
    again.set_epoch(3)
    assert again.begin(order, 4).left == 10
    assert again.begin(order, 4).epoch == 4


def test_another_order_begins_the_epoch_anew_with_a_warning() -> None:
    first = Progress("The loader", 0, 1)
    first.begin(Order(size=10, seed=1), 4).give(split(4, 0, 1))
    again = Progress("The loader", 0, 1)
    again.restore({0: through_json(first)}, 1)
    with pytest.warns(UserWarning, match="The loader begins epoch 0 anew"):
        assert again.begin(Order(size=10, seed=2), 4).left == 10


def test_a_rank_that_died_before_it_saved_is_taken_to_be_as_far_as_the_lowest() -> None:
    state = LoaderState(order=Order(size=100), epoch=2, rounds=3, round_size=10)
    assert merge({1: state}, 4) == (2, {2: ((0, 30),)})


def test_a_stream_of_unknown_length_goes_on_where_it_was() -> None:
    order = Order(size=None, shuffle=16)
    first = Progress("loader", 0, 1)
    over = first.begin(order, 8)
    for _ in range(5):
        over.give(over.share(8))
    again = Progress("loader", 0, 1)
    again.restore({0: through_json(first)}, 1)
    rest = again.begin(order, 8)
    assert not rest.has(39) and rest.has(40) and rest.has(10**12)
