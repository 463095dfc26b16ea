"""Retention: by example, and against a model that is too simple to be wrong."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.retention import Candidate, RetentionRule, ranked, to_delete
from holdfast.errors import ConfigError


def scored(*scores: Any, key: str = "loss") -> list[Candidate]:
    return [Candidate(f"c{index}", index, {key: score}) for index, score in enumerate(scores)]


def test_everything_stays_without_a_number() -> None:
    assert to_delete(scored(1, 2, 3), RetentionRule()) == []


def test_the_latest_stay_without_a_score() -> None:
    assert to_delete(scored(9, 8, 7, 6), RetentionRule(2)) == ["c0", "c1"]


def test_the_best_stay_and_the_latest_besides() -> None:
    assert to_delete(scored(5, 9, 8, 1), RetentionRule(2, "loss")) == ["c0"]
    assert to_delete(scored(5, 9, 8, 1), RetentionRule(2, "loss", "min")) == ["c1", "c2"]


@pytest.mark.parametrize("order", ["max", "min"])
@pytest.mark.parametrize("bad", [math.nan, None, "0.1", True, [1], {"x": 1}])
def test_what_is_no_number_ranks_worst_in_both_orders(bad: Any, order: Literal["max", "min"]) -> None:
    rule = RetentionRule(1, "loss", order)
    assert to_delete(scored(bad, 3, bad), rule) == ["c0"]
    assert to_delete([Candidate("none", -1), *scored(3, 3)], rule) == ["none", "c0"]
    assert [one.name for one in ranked(scored(1, bad), rule)] == ["c1", "c0"]


def test_infinities_are_numbers() -> None:
    assert [one.name for one in ranked(scored(math.inf, 0, -math.inf, math.nan), RetentionRule(1, "loss"))] == [
        "c3",
        "c2",
        "c1",
        "c0",
    ]


def test_integers_beyond_floats_compare() -> None:
    assert to_delete(scored(10**400, 10**400 + 1, 0.5), RetentionRule(1, "loss")) == ["c0"]


def test_ties_prefer_the_later() -> None:
    assert to_delete(scored(1, 1, 1, 0), RetentionRule(1, "loss")) == ["c0", "c1"]


def test_nested_names_and_the_literal_one_first() -> None:
    rule = RetentionRule(1, "eval/acc")
    nested = Candidate("nested", 0, {"eval": {"acc": 5}})
    both = Candidate("both", 1, {"eval": {"acc": 9}, "eval/acc": 4})
    last = Candidate("last", 2, {"eval": {"acc": 0}})
    assert to_delete([nested, both, last], rule) == ["both"]
    deep = RetentionRule(1, "a/b/c")
    mixed = [
        Candidate("x", 0, {"a/b": {"c": 2}}),
        Candidate("y", 1, {"a": {"b/c": 1}}),
        Candidate("z", 2, {"a": 1}),
    ]
    assert [one.name for one in ranked(mixed, deep)] == ["z", "y", "x"]


def test_the_pinned_stay_and_do_not_count() -> None:
    candidates = [
        Candidate("a", 0, pinned=True),
        Candidate("b", 1),
        Candidate("c", 2, pinned=True),
        Candidate("d", 3),
    ]
    assert to_delete(candidates, RetentionRule(1)) == ["b"]
    newest_pinned = [Candidate("a", 0), Candidate("b", 1), Candidate("c", 2, pinned=True)]
    assert to_delete(newest_pinned, RetentionRule(1)) == ["a"]


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "3"])
def test_a_bad_number_is_named(number: Any) -> None:
    with pytest.raises(ConfigError, match="num_to_keep"):
        RetentionRule(number)


def test_a_bad_order_is_named() -> None:
    with pytest.raises(ConfigError, match="checkpoint_score_order"):
        RetentionRule(1, "loss", "down")  # type: ignore[arg-type]


values = st.one_of(
    st.sampled_from([None, True, "1", math.nan, math.inf, -math.inf]), st.integers(-3, 3), st.floats(-2, 2)
)


@st.composite
def populations(draw: st.DrawFn) -> list[Candidate]:
    drawn = draw(st.lists(st.tuples(values, st.booleans()), max_size=10))
    return [Candidate(f"c{index}", index, {"m": score}, pinned) for index, (score, pinned) in enumerate(drawn)]


def model(candidates: list[Candidate], rule: RetentionRule) -> set[str]:
    """Who stays, by counting the betters of each one."""

    def number(one: Candidate) -> float | None:
        value: Any = one.metrics.get(rule.score_attribute or "")
        fine = type(value) in (int, float) and not math.isnan(value)
        return (value if rule.score_order == "max" else -value) if fine else None

    def beats(one: Candidate, other: Candidate) -> bool:
        mine, theirs = number(one), number(other)
        if mine == theirs:
            return one.index > other.index
        return mine is not None and (theirs is None or mine > theirs)

    assert rule.num_to_keep is not None
    free = [one for one in candidates if not one.pinned]
    stay = {one.name for one in free if sum(beats(other, one) for other in free) < rule.num_to_keep}
    newest = max((one.index for one in candidates), default=-1)
    return stay | {one.name for one in candidates if one.pinned or one.index == newest}


@given(populations(), st.integers(1, 5), st.sampled_from([None, "m"]), st.sampled_from(["max", "min"]))
def test_it_agrees_with_the_model(
    candidates: list[Candidate], keep: int, attribute: str | None, order: Literal["max", "min"]
) -> None:
    rule = RetentionRule(keep, attribute, order)
    gone = to_delete(candidates, rule)
    assert {one.name for one in candidates} - set(gone) == model(candidates, rule)
    assert len(gone) == len(set(gone))
    assert sum(not one.pinned for one in candidates) - len(gone) <= keep + 1
