"""What workers take of an agent's offer: exact amounts, devices, fractions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.resources import FreeResources, Offer, Taken, find_problem


def test_a_worker_takes_what_it_wants_and_gives_it_back() -> None:
    free = FreeResources(Offer(resources={"CPU": 2, "memory": 100}))
    taken = free.take({"CPU": 1.5, "memory": 60})
    assert taken == Taken(amounts={"CPU": 15_000, "memory": 600_000})
    assert free.take({"CPU": 1}) is None
    assert free.take({"memory": 50}) is None
    free.give_back(taken)
    assert free.take({"CPU": 2, "memory": 100}) is not None


def test_nothing_is_taken_where_one_of_several_resources_is_short() -> None:
    free = FreeResources(Offer(resources={"CPU": 4}, gpus=("0",)))
    assert free.take({"CPU": 1, "GPU": 2}) is None
    assert free.take({"CPU": 5, "GPU": 1}) is None
    assert free.take({"CPU": 4, "GPU": 1}) is not None


def test_what_an_agent_does_not_name_it_does_not_have() -> None:
    assert FreeResources(Offer(resources={"CPU": 1})).take({"licence": 0.1}) is None


def test_workers_that_want_nothing_are_limited_by_slots_only() -> None:
    assert all(FreeResources(Offer()).take({}) == Taken() for _ in range(1000))
    free = FreeResources(Offer(slots=2))
    assert [free.take({}) for _ in range(3)] == [Taken(), Taken(), None]


def test_a_worker_without_a_slot_fits_where_all_are_taken_and_gives_none_back() -> None:
    free = FreeResources(Offer(slots=1))
    assert free.take({}) == Taken()
    extra = free.take({}, slots=0)
    assert extra == Taken(slots=0)
    free.give_back(extra)
    assert free.take({}) is None


def test_several_gpus_are_whole_devices() -> None:
    free = FreeResources(Offer(gpus=("0", "1", "2")))
    assert free.take({"GPU": 2}) == Taken(gpus=("0", "1"), gpu_units=10_000)
    assert free.take({"GPU": 2}) is None
    assert free.take({"GPU": 1}) == Taken(gpus=("2",), gpu_units=10_000)


def test_fractions_share_a_device_and_leave_whole_ones_whole() -> None:
    free = FreeResources(Offer(gpus=("0", "1")))
    shares = [free.take({"GPU": 0.5}) for _ in range(2)]
    assert [one.gpus for one in shares if one] == [("0",), ("0",)]
    assert free.take({"GPU": 1}) == Taken(gpus=("1",), gpu_units=10_000)
    assert free.take({"GPU": 0.1}) is None


def test_a_fraction_goes_where_the_least_is_left_that_is_enough() -> None:
    free = FreeResources(Offer(gpus=("a", "b")))
    free.take({"GPU": 0.3})  # a: 0.7 left
    free.take({"GPU": 0.8})  # b: 0.2 left
    assert free.take({"GPU": 0.2}) == Taken(gpus=("b",), gpu_units=2_000)
    assert free.take({"GPU": 0.7}) == Taken(gpus=("a",), gpu_units=7_000)


def test_ten_tenths_are_one() -> None:
    free = FreeResources(Offer(resources={"CPU": 1}, gpus=("0",)))
    assert sum(free.take({"CPU": 0.1, "GPU": 0.1}) is not None for _ in range(11)) == 10


@pytest.mark.parametrize(
    ("resources", "told"),
    [
        ({"CPU": 0.5, "GPU": 1}, None),
        ({"GPU": 3}, None),
        ({"GPU": 0.25}, None),
        ({"CPU": 1.5}, None),
        ({"GPU": 1.5}, "'GPU': 1.5 is neither a whole number nor a part of one GPU"),
        ({"CPU": 0.00001}, "'CPU': 1e-05 is less than 0.0001, the smallest share that is counted"),
    ],
)
def test_amounts_that_nobody_can_be_given_are_named(resources: dict[str, float], told: str | None) -> None:
    assert find_problem(resources) == told


@given(
    st.lists(st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.9, 1.0, 2.0]), max_size=12),
    st.lists(st.integers(0, 11), max_size=12),
)
def test_no_device_is_given_out_more_than_once(wanted: list[float], returned: list[int]) -> None:
    free = FreeResources(Offer(gpus=("0", "1", "2")))
    held = {n: taken for n, amount in enumerate(wanted) if (taken := free.take({"GPU": amount})) is not None}
    for n in returned:
        if n in held:
            free.give_back(held.pop(n))
    held |= {100 + n: taken for n, amount in enumerate(wanted) if (taken := free.take({"GPU": amount})) is not None}
    for gpu in ("0", "1", "2"):
        assert sum(one.gpu_units for one in held.values() if gpu in one.gpus) <= 10_000


_AMOUNTS = st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0, 2.0, 3.0])


@given(
    st.dictionaries(st.sampled_from(["CPU", "GPU", "disk"]), _AMOUNTS),
    st.lists(_AMOUNTS, max_size=4),
    st.sampled_from([None, 0, 1, 5]),
    st.integers(0, 2),
)
def test_the_number_of_workers_that_fit_is_how_many_can_take_one_after_the_other(
    wanted: dict[str, float], before: list[float], slots: int | None, slots_per_worker: int
) -> None:
    free = FreeResources(Offer(resources={"CPU": 4}, gpus=("0", "1", "2"), slots=slots))
    for amount in before:
        free.take({"GPU": amount})
    most = 20
    fitting = free.count(wanted, slots_per_worker, most)
    taken = 0
    while taken < most and free.take(wanted, slots_per_worker) is not None:
        taken += 1
    assert fitting == taken
