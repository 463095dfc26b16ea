"""Which samples each rank gets so that an epoch consumes each of them once, whatever becomes of the world's size.

An epoch has one order of its samples, a function of the seed and the epoch alone. Ranks take *rounds* from what is left
of it: the next `round_size` samples, split among the ranks in order of rank. What a rank was given is the number of
rounds since its pass over the epoch began, so a rank's state is a few numbers (`LoaderState`). States of all ranks of a
checkpoint make the set of positions in the order that were consumed (`merge`), also where ranks were not equally far;
a world of any other size takes its rounds from the rest.

Pure: no torch, no I/O. `torch.sampler` and `elastic_shard` use it; `worker.session` saves the states.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

__all__ = ["LoaderState", "Order", "Pass", "Progress", "Ranges", "Share", "merge"]

Ranges = tuple[tuple[int, int], ...]
"""Positions in an epoch's order as disjoint (start, stop), ascending."""

_ENDLESS = 2**62
"""More samples than any stream of unknown length has."""
_SIZES_MAX = 4
"""Of so many epochs a rank saves how long a stream was: the others are not further behind than that."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What an epoch's order is a function of, besides the epoch. Positions mean nothing in another one."""

    size: int | None = None
    """How many samples there are; None: as many as the stream gives."""
    seed: int = 0
    shuffle: int = 0
    """0: the data's own order; 1: a permutation; more: the size of the buffer that a stream is shuffled in."""


class LoaderState(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank saves of one loader."""

    order: Order
    epoch: int
    consumed: dict[int, Ranges] = {}
    """Of each epoch that is not over: what all ranks had consumed of it when this rank's pass began."""
    rounds: int = 0
    """How many rounds of the epoch this rank was given since then."""
    round_size: int = 0
    """0: this rank has not begun a pass yet."""
    sizes: dict[int, int] = {}
    """Of a stream: how many samples the last epochs had whose end this rank has seen."""


class Share(msgspec.Struct, frozen=True):
    """One rank's samples of a round of `count`, from `start` on, and what its loss counts in a mean over ranks."""

    start: int
    stop: int
    count: int
    world_size: int

    @property
    def weight(self) -> float:
        """The factor that makes the mean over ranks of each rank's mean loss the mean over all samples of the round."""
        return (self.stop - self.start) * self.world_size / self.count


def split(count: int, rank: int, world_size: int) -> Share:
    """The share of one rank of a round: sizes differ by one at most."""
    each, more = divmod(count, world_size)
    start = rank * each + min(rank, more)
    return Share(start, start + each + (rank < more), count, world_size)


def merge(states: Mapping[int, LoaderState], world_size: int) -> tuple[int, dict[int, Ranges]]:
    """The epoch to go on with, and what was consumed of it and of later ones, from the states of all ranks.

    A rank without a state died before it sent one, and the others hold all of the checkpoint (`Report.needed_ranks`):
    it is taken to be as far as the lowest of them. A rank that is in a later epoch has had its whole share of this one.
    """
    lowest = states[min(states)]
    ranks = [states.get(rank, lowest) for rank in range(world_size)]
    furthest = _begun(states)
    first = min(state.epoch for state in ranks)
    sizes = {epoch: size for state in states.values() for epoch, size in state.sizes.items()}
    before: dict[int, Ranges] = {}
    for state in ranks:
        for epoch, ranges in state.consumed.items():
            if epoch >= first:
                before[epoch] = union((*before.get(epoch, ()), *ranges))
    consumed = dict(before)
    for epoch in range(first, max(state.epoch for state in ranks) + 1):
        size = furthest.order.size if furthest.order.size is not None else sizes.get(epoch)
        rest = _rest(before.get(epoch, ()), size)
        given = [state.rounds if state.epoch == epoch else (None if state.epoch > epoch else 0) for state in ranks]
        taken = _taken(rest, given, furthest.round_size or 1)
        consumed[epoch] = union((*before.get(epoch, ()), *taken))
    return first, {epoch: ranges for epoch, ranges in consumed.items() if ranges}


def _begun(states: Mapping[int, LoaderState]) -> LoaderState:
    """The state of a rank that has begun a pass, if any has: it knows the order and the size of rounds."""
    return max(states.values(), key=lambda state: state.round_size)


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same positions as disjoint ranges, ascending."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


def _rest(consumed: Ranges, size: int | None) -> Ranges:
    """What is left of an epoch."""
    end = _ENDLESS if size is None else size
    found, start = [], 0
    for first, stop in consumed:
        if start < min(first, end):
            found.append((start, min(first, end)))
        start = stop
    if start < end:
        found.append((start, end))
    return tuple(found)


def _length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _slice(ranges: Ranges, start: int, stop: int) -> list[tuple[int, int]]:
    """The ranges of the `start`-th to the `stop`-th position among these."""
    found, at = [], 0
    for first, last in ranges:
        begin, end = max(first, first + start - at), min(last, first + stop - at)
        if begin < end:
            found.append((begin, end))
        at += last - first
    return found


def _taken(rest: Ranges, given: list[int | None], round_size: int) -> list[tuple[int, int]]:
    """What ranks were given of the rest of an epoch, as many rounds each; None: all that there are."""
    counted = [rounds for rounds in given if rounds is not None]
    left = _length(rest)
    # Where nobody has said how long a stream is, who is done with it has had as many rounds as anybody else.
    every = -(-left // round_size) if left < _ENDLESS // 2 else max(counted, default=0)
    rounds = [every if one is None else min(one, every) for one in given]
    common = min(rounds)
    found = _slice(rest, 0, common * round_size)
    for number in range(common, max(rounds)):
        begin = number * round_size
        count = min(round_size, left - begin)
        for rank, had in enumerate(rounds):
            if had > number:
                share = split(count, rank, len(given))
                found += _slice(rest, begin + share.start, begin + share.stop)
    return found


class Pass:
    """One rank's way through what is left of one epoch."""

    def __init__(self, epoch: int, consumed: Ranges, order: Order, round_size: int, rank: int, world_size: int) -> None:
        self.epoch = epoch
        self.consumed = consumed
        self.round_size = round_size
        self.rounds = 0
        """How many the loop has been given."""
        self.weight = 1.0
        self.size: int | None = None
        """How many samples the epoch has, once the end of a stream was seen."""
        self._rest = _rest(consumed, order.size)
        self._rank = rank
        self._world_size = world_size

    @property
    def left(self) -> int:
        """How many samples were left when the pass began."""
        return _length(self._rest)

    def has(self, position: int) -> bool:
        """Whether this position of the order is part of the pass."""
        return any(start <= position < stop for start, stop in self._rest)

    def share(self, count: int | None = None, number: int = 0) -> Share:
        """This rank's share of a round that has so many samples; by default of the `number`-th of the pass."""
        if count is None:
            count = min(self.round_size, self.left - number * self.round_size)
        return split(count, self._rank, self._world_size)

    def positions(self, number: int) -> list[int]:
        """This rank's positions of the `number`-th round."""
        share = self.share(number=number)
        begin = number * self.round_size
        found = _slice(self._rest, begin + share.start, begin + share.stop)
        return [position for start, stop in found for position in range(start, stop)]

    def filler(self, number: int) -> int:
        """A position of the round for a rank whose share is empty, so that it has a batch: its weight is 0."""
        begin = number * self.round_size
        return _slice(self._rest, begin, begin + 1)[0][0]

    def give(self, share: Share) -> None:
        """The loop is being given its share of the next round."""
        self.rounds += 1
        self.weight = share.weight


class Progress:
    """How far one rank is in one loader, over epochs and restarts."""

    def __init__(self, what: str, rank: int, world_size: int) -> None:
        """`what` names the loader in warnings."""
        self._what = what
        self._rank = rank
        self._world_size = world_size
        self._epoch = 0
        self._ahead: dict[int, Ranges] = {}
        """What a checkpoint says was consumed of epochs that were not begun yet since."""
        self._sizes: dict[int, int] = {}
        self._saved_in: Order | None = None
        self._order = Order()
        self._round_size = 0
        self._pass: Pass | None = None

    def restore(self, states: Mapping[int, Any], world_size: int) -> None:
        """Go on from what all ranks saved (`save`, as JSON gave it back)."""
        if not states:
            return
        found = {
            rank: msgspec.convert(state, LoaderState, strict=False, str_keys=True) for rank, state in states.items()
        }
        self._epoch, self._ahead = merge(found, world_size)
        self._saved_in = _begun(found).order

    @property
    def epoch(self) -> int:
        """The epoch of the pass, or of the next one."""
        return self._epoch

    @property
    def weight(self) -> float:
        return 1.0 if self._pass is None else self._pass.weight

    def set_epoch(self, epoch: int) -> None:
        """Make this the epoch of the next pass."""
        self._pass = None
        self._epoch = epoch

    def begin(self, order: Order, round_size: int) -> Pass:
        """Begin a pass over an epoch: over what is left of it the first time after a restart, and all of it later."""
        if self._pass is not None:
            self.end(self._pass)
        if self._saved_in is not None and self._saved_in != order:
            if self._ahead:
                warnings.warn(
                    f"{self._what} begins epoch {self._epoch} anew: the checkpoint was made with another size of the "
                    f"data set, seed or shuffling ({self._saved_in} and now {order}).",
                    stacklevel=4,
                )
            self._ahead = {}
        self._saved_in = None
        self._order, self._round_size = order, round_size
        consumed = self._ahead.pop(self._epoch, ())
        self._pass = Pass(self._epoch, consumed, order, round_size, self._rank, self._world_size)
        return self._pass

    def is_current(self, one: Pass | None) -> bool:
        """Whether this pass was begun and has not ended."""
        return one is not None and self._pass is one

    def end(self, over: Pass) -> None:
        """The loop has left the pass: its end was reached, or the loop does not want the rest."""
        if self._pass is over:
            self._sizes = self._sizes_now()
            self._pass = None
            self._epoch = over.epoch + 1
            self._ahead = {epoch: ranges for epoch, ranges in self._ahead.items() if epoch > over.epoch}

    def save(self) -> LoaderState:
        """What to save now."""
        consumed, rounds = dict(self._ahead), 0
        if self._pass is not None:
            consumed[self._pass.epoch] = self._pass.consumed
            rounds = self._pass.rounds
        return LoaderState(
            order=self._saved_in or self._order,
            epoch=self._epoch,
            consumed={epoch: ranges for epoch, ranges in consumed.items() if ranges},
            rounds=rounds,
            round_size=self._round_size,
            sizes=self._sizes_now(),
        )

    def _sizes_now(self) -> dict[int, int]:
        """The sizes of the last epochs of a stream, this one's included if its end was seen."""
        over = self._pass
        sizes = self._sizes if over is None or over.size is None else {**self._sizes, over.epoch: over.size}
        return {epoch: sizes[epoch] for epoch in sorted(sizes)[-_SIZES_MAX:]}
