"""Configurations of a space: grids crossed with draws, functions in order, points given by the user."""

from __future__ import annotations

import random
from typing import Any

import pytest

from holdfast import tune
from holdfast.errors import ConfigError
from holdfast.tune.search import BasicVariantGenerator, Searcher
from holdfast.tune.search.variant_generator import Space, has_unresolved_values, merge_configs


def resolve(space: dict[str, Any], at: int = 0, seed: int = 0) -> dict[str, Any]:
    return Space(space).resolve(random.Random(seed), at)


def variants(space: dict[str, Any], num_samples: int = 1, seed: int = 1, **arguments: Any) -> list[dict[str, Any]]:
    searcher = BasicVariantGenerator(**arguments)
    assert searcher.set_search_properties("loss", "min", space, num_samples=num_samples, seed=seed)
    found: list[dict[str, Any]] = []
    while (suggestion := searcher.suggest(f"trial_{len(found)}")) != Searcher.FINISHED:
        assert isinstance(suggestion, dict)
        found.append(suggestion)
    assert len(found) == searcher.total_samples
    return found


def test_grids_are_crossed_and_the_first_varies_fastest() -> None:
    space = {"x": tune.grid_search([10, 20]), "y": {"z": [tune.grid_search(["a", "b", "c"])]}}
    assert [(config["x"], config["y"]["z"][0]) for config in variants(space)] == [
        *((10, "a"), (20, "a"), (10, "b"), (20, "b"), (10, "c"), (20, "c")),
    ]


def test_values_are_drawn_anew_for_each_place_in_the_grid_unless_told_otherwise() -> None:
    space = {"x": tune.grid_search([1, 2, 3]), "y": tune.uniform(0, 1)}
    found = variants(space, num_samples=2)
    assert [config["x"] for config in found] == [1, 2, 3, 1, 2, 3]
    assert len({config["y"] for config in found}) == 6
    constant = variants(space, num_samples=2, constant_grid_search=True)
    assert [config["x"] for config in constant] == [1, 2, 3, 1, 2, 3]
    assert len({config["y"] for config in constant[:3]}) == len({config["y"] for config in constant[3:]}) == 1
    assert constant[0]["y"] != constant[3]["y"]


def test_domains_are_found_in_dicts_lists_tuples_and_in_drawn_values() -> None:
    space = {
        "nested": {"list": [1, tune.choice([2])], "tuple": (tune.randint(3, 4), "x")},
        "drawn": tune.choice([{"inner": tune.randint(5, 6)}]),
        "grid": tune.grid_search([tune.randint(7, 8)]),
    }
    expected = {"nested": {"list": [1, 2], "tuple": (3, "x")}, "drawn": {"inner": 5}, "grid": 7}
    assert resolve(space) == expected
    assert not has_unresolved_values(expected) and has_unresolved_values(space)


def test_functions_see_what_is_drawn_and_each_other() -> None:
    space = {
        "late": tune.sample_from(lambda config: config["early"] + 1),
        "early": tune.sample_from(lambda spec: spec.config.x * 10),
        "deep": {"d": tune.sample_from(lambda config: config.get("grid", 0) + config.nested.y)},
        "nothing": tune.sample_from(lambda: 4),
        "x": tune.randint(2, 3),
        "nested": {"y": tune.randint(3, 4)},
        "grid": tune.grid_search([100]),
    }
    assert resolve(space) == {
        **{"late": 21, "early": 20, "deep": {"d": 103}, "nothing": 4},
        **{"x": 2, "nested": {"y": 3}, "grid": 100},
    }


def test_points_to_evaluate_replace_samples_and_the_grid_they_name() -> None:
    """The example of Ray's documentation: four samples give six trials."""
    space = {"a": tune.grid_search([1, 2]), "b": tune.randint(0, 3)}
    found = variants(space, 4, points_to_evaluate=[{"a": 2, "b": 2}, {"a": 1}, {"b": 2}])
    assert [config["a"] for config in found] == [2, 1, 1, 2, 1, 2]
    assert [found[at]["b"] for at in (0, 2, 3)] == [2, 2, 2]


def test_a_point_may_be_nested_or_written_with_slashes() -> None:
    space = {"a": {"b": tune.uniform(0, 1), "c": [tune.uniform(0, 1)]}, "d": 1}
    assert variants(space, points_to_evaluate=[{"a": {"b": 0.5}, "a/c/0": 0.25, "d": 2}])[0] == {
        **{"a": {"b": 0.5, "c": [0.25]}, "d": 2},
    }
    with pytest.warns(UserWarning, match=r"a/b=7 is outside of uniform\(0, 1\)"):
        variants(space, points_to_evaluate=[{"a": {"b": 7}}])


def test_a_configuration_depends_on_the_seed_and_its_number_alone() -> None:
    space = {"x": tune.uniform(0, 1), "y": tune.choice(list(range(1_000)))}
    first = variants(space, 5, seed=1)
    assert first == variants(space, 9, seed=1)[:5]
    assert first != variants(space, 5, seed=2)
    assert variants(space, 3, seed=1, random_state=7) == variants(space, 3, seed=2, random_state=7)


def test_a_searcher_that_is_told_what_was_suggested_goes_on_with_the_next() -> None:
    space = {"x": tune.uniform(0, 1)}
    whole = variants(space, 4)
    for known in range(4):
        replayed, restored = BasicVariantGenerator(), BasicVariantGenerator()
        for searcher in (replayed, restored):
            searcher.set_search_properties(None, None, space, num_samples=4, seed=1)
        for number in range(known):
            replayed.replay_suggestion(f"trial_{number}", whole[number])
        restored.set_state(replayed.get_state())
        assert replayed.suggest("next") == restored.suggest("next") == whole[known]


def test_max_concurrent_limits_the_trials_that_are_out() -> None:
    searcher = BasicVariantGenerator(max_concurrent=1)
    searcher.set_search_properties(None, None, {"x": 1}, num_samples=-1)
    assert searcher.suggest("a") == {"x": 1}
    assert searcher.suggest("b") is None
    searcher.on_trial_complete("a")
    assert searcher.suggest("b") == {"x": 1}


def test_a_suggestion_lies_over_the_constants() -> None:
    space = {"a": {"b": tune.uniform(0, 1), "c": 1}, "l": [tune.uniform(0, 1), 2], "d": 3}
    constants = Space(space).constants()
    assert constants == {"a": {"c": 1}, "l": [None, 2], "d": 3}
    merged = merge_configs(constants, {"a/b": 0.5, "l/0": 0.25, "new": {"x": 1}})
    assert merged == {"a": {"b": 0.5, "c": 1}, "l": [0.25, 2], "d": 3, "new": {"x": 1}}
    assert merge_configs(constants, {"a": {"b": 1}})["a"] == {"b": 1, "c": 1}
    assert constants == {"a": {"c": 1}, "l": [None, 2], "d": 3}


def test_a_key_with_a_slash_is_one_key_if_the_space_has_it() -> None:
    space = {"a/b": tune.uniform(0, 1), "c": {"d/e": tune.uniform(0, 1), "f": 1}, "l": [{"n": tune.uniform(0, 1)}]}
    constants = Space(space).constants()
    suggested = {"a/b": 0.5, "c": {"d/e": 0.25}, "l/0/n": 0.75}
    expected = {"a/b": 0.5, "c": {"d/e": 0.25, "f": 1}, "l": [{"n": 0.75}]}
    assert merge_configs(constants, suggested, space) == expected
    assert merge_configs({}, {"a/b": 0.5}) == {"a": {"b": 0.5}}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Space([1]), r"Tuner\(param_space\) must be a dict"),  # type: ignore[arg-type]
        (lambda: resolve({"a": tune.sample_from(lambda config: config["b"])}), r"param_space\['a'\].*KeyError\('b'\)"),
        (
            lambda: resolve(
                {
                    "a": tune.sample_from(lambda config: config["b"]),
                    "b": tune.sample_from(lambda config: config["a"]),
                }
            ),
            r"the functions of a, b need each other's values",
        ),
        (lambda: resolve({"a": tune.choice([tune.grid_search([1])])}), r"param_space\['a'\]: a grid_search inside"),
        (lambda: Space({"a": tune.grid_search([tune.grid_search([1])])}), r"a grid_search inside of a grid_search"),
        (lambda: variants({"a": 1}, points_to_evaluate=[{"b": 1}]), r"points_to_evaluate names 'b'"),
        (lambda: BasicVariantGenerator({"a": 1}), r"must be a list of dicts"),  # type: ignore[arg-type]
        (lambda: BasicVariantGenerator(max_concurrent=-1), r"max_concurrent\) must be 0 or more"),
        (lambda: BasicVariantGenerator(random_state="x"), r"random_state\) must be a whole number or"),
    ],
)
def test_bad_spaces_get_one_sentence(make: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()
