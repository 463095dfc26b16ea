"""The distributions of a search space: bounds, quantization, repeatability, and what bad bounds are told."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import tune
from holdfast.errors import ConfigError
from holdfast.tune.search.sample import Categorical, Domain, Float, Integer


def draws(domain: Domain, count: int = 2_000) -> list[Any]:
    rng = random.Random(0)
    return [domain.draw(rng) for _ in range(count)]


@given(st.integers(-50, 50), st.integers(1, 50), st.integers(), st.integers(1, 7))
def test_integers_lie_within_bounds_as_ray_documents_them(lower: int, width: int, seed: int, q: int) -> None:
    upper = lower + width
    rng = random.Random(seed)
    assert lower <= tune.randint(lower, upper).draw(rng) < upper
    if width >= q:
        value = tune.qrandint(lower, upper, q).draw(rng)
        assert value % q == 0 and lower <= value <= upper and (q > 1 or value < upper)
    if lower >= 1:
        assert lower <= tune.lograndint(lower, upper).draw(rng) < upper
        if width >= q:
            value = tune.qlograndint(lower, upper, q).draw(rng)
            assert value % q == 0 and lower <= value <= upper


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.integers())
def test_floats_lie_within_bounds(one: float, other: float, seed: int) -> None:
    if one == other:
        return
    lower, upper = sorted((one, other))
    rng = random.Random(seed)
    assert lower <= tune.uniform(lower, upper).draw(rng) <= upper
    assert lower <= tune.loguniform(lower, upper).draw(rng) <= upper


def test_every_value_that_a_domain_has_is_drawn() -> None:
    assert set(draws(tune.randint(0, 3))) == {0, 1, 2}
    assert set(draws(tune.qrandint(5, 15, 5))) == {5, 10, 15}
    assert set(draws(tune.qrandint(0, 3, 1))) == {0, 1, 2}
    assert set(draws(tune.qlograndint(5, 20, 5))) == {5, 10, 15, 20}
    assert {round(value, 6) for value in draws(tune.quniform(0.2, 1.0, 0.2))} == {0.2, 0.4, 0.6, 0.8, 1.0}
    assert set(draws(tune.choice(["a", "b"]))) == {"a", "b"}
    assert all(value % 0.5 == 0 for value in draws(tune.qrandn(0, 1, 0.5)))


def test_logarithmic_domains_draw_each_order_of_magnitude_alike() -> None:
    for domain in (tune.loguniform(1, 1_000), tune.lograndint(1, 1_000)):
        orders = Counter(len(str(int(value))) for value in draws(domain, 3_000))
        assert all(800 < orders[digits] < 1_200 for digits in (1, 2, 3)), orders


def test_normal_values_have_the_mean_and_deviation_asked_for() -> None:
    values = draws(tune.randn(10, 2), 4_000)
    mean = sum(values) / len(values)
    assert abs(mean - 10) < 0.2
    assert abs((sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5 - 2) < 0.2


def test_sample_repeats_with_a_seed_and_gives_lists() -> None:
    numpy = pytest.importorskip("numpy")
    domain = tune.uniform(0, 1)
    assert domain.sample(random_state=3) == domain.sample(random_state=3) != domain.sample(random_state=4)
    assert domain.sample(size=4, random_state=3)[0] == domain.sample(random_state=3)
    for make in (numpy.random.RandomState, numpy.random.default_rng):
        assert domain.sample(random_state=make(1)) == domain.sample(random_state=make(1))


def test_a_function_is_given_the_configuration_if_it_takes_one() -> None:
    assert tune.sample_from(lambda: 3).sample() == 3
    assert tune.sample_from(lambda config: config["a"] + 1).sample({"a": 1}) == 2


def test_domains_are_values() -> None:
    assert tune.uniform(0, 1) == tune.uniform(0, 1) != tune.uniform(0, 2)
    assert repr(tune.qloguniform(0.01, 1, 0.01)) == "qloguniform(0.01, 1, 0.01)"
    assert Float(0, 1).loguniform().quantized(0.1).q == 0.1
    assert Integer(1, 9).loguniform() == tune.lograndint(1, 9)
    assert Categorical((1, 2)).grid() == tune.grid_search([1, 2])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: tune.uniform(2, 1), r"tune\.uniform\(lower, upper\): lower must be below upper"),
        (lambda: tune.uniform(0, float("inf")), r"tune\.uniform.* two finite numbers"),
        (lambda: tune.uniform("0", 1), r"tune\.uniform.* two finite numbers"),  # type: ignore[arg-type]
        (lambda: tune.loguniform(0, 1), r"tune\.loguniform\(lower\) must be above 0.* not their logarithms"),
        (lambda: tune.quniform(0.1, 1, 0.2), r"tune\.quniform: the bound 0\.1 must be a multiple of q"),
        (lambda: tune.quniform(0, 1, 0), r"tune\.quniform\(q\) must be a number above 0"),
        (lambda: tune.qrandn(0, 1, -1), r"tune\.qrandn\(q\) must be a number above 0"),
        (lambda: tune.randn(0, -1), r"tune\.randn\(sd\) must be a number of 0 or more"),
        (lambda: tune.randint(5, 5), r"tune\.randint\(lower, upper\): there is no whole number from 5 to 5"),
        (lambda: tune.randint(1.5, 3), r"tune\.randint\(lower\) must be a whole number, not 1\.5"),  # type: ignore[arg-type]
        (lambda: tune.qrandint(6, 9, 5), r"tune\.qrandint.*there is no multiple of 5 from 6 to 9"),
        (lambda: tune.lograndint(0, 3), r"tune\.lograndint\(lower\) must be 1 or more"),
        (lambda: tune.choice([]), r"tune\.choice\(\[\]\) has nothing to choose from"),
        (lambda: tune.choice(3), r"tune\.choice\(categories\) must be a list"),  # type: ignore[arg-type]
        (lambda: tune.grid_search([]), r"tune\.grid_search\(\[\]\) has nothing to search"),
        (lambda: tune.grid_search(5), r"tune\.grid_search\(values\) must be a list"),
        (lambda: tune.grid_search("abc"), r"tune\.grid_search\(values\) must be a list of values, not 'abc'"),
        (lambda: tune.sample_from(3), r"tune\.sample_from\(func\) must be a function"),  # type: ignore[arg-type]
    ],
)
def test_bad_bounds_get_one_sentence(make: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()
