"""Retention: by example, and compared with a simple model."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.checkpoint_types import StoredCheckpoint
from holdfast.core.retention import RetentionRule, ranked, to_delete
from holdfast.errors import ConfigError


def stored(name: str, index: int, metrics: dict[str, Any] | None = None) -> StoredCheckpoint:
    return StoredCheckpoint(name=name, index=index, iteration=index + 1, generation=1, metrics=metrics or {})


def scored(*scores: Any, key: str = "loss") -> list[StoredCheckpoint]:
    return [stored(f"c{index}", index, {key: score}) for index, score in enumerate(scores)]


def test_without_num_to_keep_everything_is_kept() -> None:
    assert to_delete(scored(1, 2, 3), RetentionRule()) == []


def test_without_a_score_the_latest_are_kept() -> None:
    assert to_delete(scored(9, 8, 7, 6), RetentionRule(2)) == ["c0", "c1"]


def test_the_best_and_the_latest_are_kept() -> None:
    assert to_delete(scored(5, 9, 8, 1), RetentionRule(2, "loss")) == ["c0"]
    assert to_delete(scored(5, 9, 8, 1), RetentionRule(2, "loss", "min")) == ["c1", "c2"]


@pytest.mark.parametrize("order", ["max", "min"])
@pytest.mark.parametrize("bad", [math.nan, None, "0.1", True, [1], {"x": 1}])
def test_scores_that_are_no_numbers_rank_worst(bad: Any, order: Literal["max", "min"]) -> None:
    rule = RetentionRule(1, "loss", order)
    assert to_delete(scored(bad, 3, bad), rule) == ["c0"]
    assert to_delete([stored("none", -1), *scored(3, 3)], rule) == ["none", "c0"]
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


def test_nested_metric_names_with_literal_names_first() -> None:
    rule = RetentionRule(1, "eval/acc")
    nested = stored("nested", 0, {"eval": {"acc": 5}})
    both = stored("both", 1, {"eval": {"acc": 9}, "eval/acc": 4})
    last = stored("last", 2, {"eval": {"acc": 0}})
    assert to_delete([nested, both, last], rule) == ["both"]
    deep = RetentionRule(1, "a/b/c")
    mixed = [
        stored("x", 0, {"a/b": {"c": 2}}),
        stored("y", 1, {"a": {"b/c": 1}}),
        stored("z", 2, {"a": 1}),
    ]
    assert [one.name for one in ranked(mixed, deep)] == ["z", "y", "x"]


def test_pinned_checkpoints_are_kept_and_do_not_count() -> None:
    four = [stored(name, index) for index, name in enumerate("abcd")]
    assert to_delete(four, RetentionRule(1), pinned={"a", "c"}) == ["b"]
    assert to_delete(four[:3], RetentionRule(1), pinned={"c"}) == ["a"]


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "3"])
def test_a_bad_num_to_keep_is_refused(number: Any) -> None:
    with pytest.raises(ConfigError, match="num_to_keep"):
        RetentionRule(number)


def test_a_bad_score_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="checkpoint_score_order"):
        RetentionRule(1, "loss", "down")  # type: ignore[arg-type]


values = st.one_of(
    st.sampled_from([None, True, "1", math.nan, math.inf, -math.inf]), st.integers(-3, 3), st.floats(-2, 2)
)


@st.composite
def populations(draw: st.DrawFn) -> tuple[list[StoredCheckpoint], set[str]]:
    """Checkpoints, and the names of those that are pinned."""
    drawn = draw(st.lists(st.tuples(values, st.booleans()), max_size=10))
    checkpoints = [stored(f"c{index}", index, {"m": score}) for index, (score, _) in enumerate(drawn)]
    return checkpoints, {f"c{index}" for index, (_, pinned) in enumerate(drawn) if pinned}


def model(checkpoints: list[StoredCheckpoint], pinned: set[str], rule: RetentionRule) -> set[str]:
    """Who stays, by counting the betters of each one."""

    def number(one: StoredCheckpoint) -> float | None:
        value: Any = one.metrics.get(rule.score_attribute or "")
        fine = type(value) in (int, float) and not math.isnan(value)
        return (value if rule.score_order == "max" else -value) if fine else None

    def beats(one: StoredCheckpoint, other: StoredCheckpoint) -> bool:
        mine, theirs = number(one), number(other)
        if mine == theirs:
            return one.index > other.index
        return mine is not None and (theirs is None or mine > theirs)

    assert rule.num_to_keep is not None
    free = [one for one in checkpoints if one.name not in pinned]
    stay = {one.name for one in free if sum(beats(other, one) for other in free) < rule.num_to_keep}
    newest = max((one.index for one in checkpoints), default=-1)
    return stay | pinned | {one.name for one in checkpoints if one.index == newest}


@given(populations(), st.integers(1, 5), st.sampled_from([None, "m"]), st.sampled_from(["max", "min"]))
def test_retention_agrees_with_a_simple_model(
    population: tuple[list[StoredCheckpoint], set[str]], keep: int, attribute: str | None, order: Literal["max", "min"]
) -> None:
    checkpoints, pinned = population
    rule = RetentionRule(keep, attribute, order)
    gone = to_delete(checkpoints, rule, pinned)
    assert {one.name for one in checkpoints} - set(gone) == model(checkpoints, pinned, rule)
    assert len(gone) == len(set(gone))
    assert len(checkpoints) - len(pinned) - len(gone) <= keep + 1
