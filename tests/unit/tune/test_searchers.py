"""The base of searchers, `ConcurrencyLimiter` and `Repeater`, around a searcher that notes what it is told."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from holdfast import tune
from holdfast.errors import ConfigError
from holdfast.tune.search import BasicVariantGenerator, ConcurrencyLimiter, Repeater, Searcher, create_searcher
from holdfast.tune.search.repeater import TRIAL_INDEX
from holdfast.tune.search.searcher import configure_searcher


class Noting(Searcher):
    """Draws from a seeded generator, as users' searchers do, and saves nothing."""

    def __init__(self, metric: str | None = None, mode: str | None = None, count: int = 100) -> None:
        super().__init__(metric, mode)
        self.count = count
        self.rng = random.Random(0)
        self.told: list[Any] = []

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        if self.count == 0:
            return Searcher.FINISHED
        self.count -= 1
        return {"x": self.rng.random()}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        self.told.append((trial_id, result, error))

    def get_state(self) -> dict[str, Any]:
        return {"told": self.told, "count": self.count}

    def set_state(self, state: dict[str, Any]) -> None:
        self.told, self.count = state["told"], state["count"]


def test_no_more_suggestions_than_allowed_are_out() -> None:
    inner = Noting("loss", "min")
    searcher = ConcurrencyLimiter(inner, max_concurrent=2)
    assert [isinstance(searcher.suggest(name), dict) for name in "abc"] == [True, True, False]
    searcher.on_trial_complete("a", {"loss": 1})
    assert inner.told == [("a", {"loss": 1}, False)]
    assert isinstance(searcher.suggest("c"), dict)
    assert searcher.suggest("d") is None


def test_a_batch_is_told_when_all_of_it_has_ended() -> None:
    inner = Noting("loss", "min")
    searcher = ConcurrencyLimiter(inner, max_concurrent=2, batch=True)
    assert [isinstance(searcher.suggest(name), dict) for name in "ab"] == [True, True]
    searcher.on_trial_complete("b", {"loss": 2})
    assert inner.told == [] and searcher.suggest("c") is None
    searcher.on_trial_complete("a", None, error=True)
    assert inner.told == [("a", None, True), ("b", {"loss": 2}, False)]
    assert isinstance(searcher.suggest("c"), dict)


def test_a_limiter_passes_on_the_end() -> None:
    searcher = ConcurrencyLimiter(Noting("loss", "min", count=0), max_concurrent=2)
    assert searcher.suggest("a") == Searcher.FINISHED


def test_a_searcher_hears_the_mean_of_repeats() -> None:
    inner = Noting("loss", "min")
    searcher = Repeater(inner, repeat=3)
    configs = [searcher.suggest(name) for name in "abcd"]
    assert all(isinstance(config, dict) for config in configs)
    assert [config[TRIAL_INDEX] for config in configs] == [0, 1, 2, 0]  # type: ignore[index]
    assert len({config["x"] for config in configs}) == 2  # type: ignore[index]
    for name, loss in (("c", 3.0), ("a", 1.0), ("b", float("nan"))):
        searcher.on_trial_complete(name, {"loss": loss})
    assert inner.told == [("a", {"loss": 2.0}, False)]


def test_repeats_that_all_fail_are_a_failure() -> None:
    inner = Noting("loss", "min")
    searcher = Repeater(inner, repeat=2, set_index=False)
    assert searcher.suggest("a") == searcher.suggest("b")
    searcher.on_trial_complete("a", None, error=True)
    searcher.on_trial_complete("b", {"other": 1})
    assert inner.told == [("a", None, True)]


@pytest.mark.parametrize(
    "wrap", [lambda one: one, lambda one: ConcurrencyLimiter(one, 2), lambda one: Repeater(one, 2)]
)
def test_a_searcher_that_saves_nothing_goes_on_after_a_replay(wrap: Any) -> None:
    """Each prefix of what happened is replayed to a new searcher; its next suggestion is the one that was made."""

    def replay(events: list[tuple[Any, ...]]) -> Searcher:
        searcher = wrap(Noting("loss", "min"))
        assert isinstance(searcher, Searcher)
        for kind, *arguments in events:
            getattr(searcher, kind)(*arguments)
        return searcher

    searcher = wrap(Noting("loss", "min"))
    events: list[tuple[Any, ...]] = []
    for number in range(8):
        config = searcher.suggest(f"t{number}")
        assert replay(events).suggest(f"t{number}") == config
        events.append(("replay_suggestion", f"t{number}", config))
        events.append(("on_trial_complete", f"t{number}", {"loss": number}))
        searcher.on_trial_complete(f"t{number}", {"loss": number})


@pytest.mark.parametrize("wrap", [lambda one: ConcurrencyLimiter(one, 3, True), lambda one: Repeater(one, 3)])
def test_the_state_of_wrappers_survives_a_file(wrap: Any, tmp_path: Path) -> None:
    first = wrap(Noting("loss", "min"))
    for name in "ab":
        first.suggest(name)
    first.on_trial_complete("a", {"loss": 1.0})
    first.save(str(tmp_path / "state"))
    second = wrap(Noting("loss", "min"))
    second.restore(str(tmp_path / "state"))
    assert second.get_state() == first.get_state()
    for name in "b":
        first.on_trial_complete(name, {"loss": 3.0})
        second.on_trial_complete(name, {"loss": 3.0})
    assert second.get_state() == first.get_state()


def test_a_searcher_takes_what_the_experiment_says() -> None:
    searcher = Noting()
    assert configure_searcher(searcher, "loss", "min", {"lr": 1}, num_samples=3, seed=5) == {"lr": 1}
    assert (searcher.metric, searcher.mode, searcher.seed) == ("loss", "min", 5)
    basic = ConcurrencyLimiter(BasicVariantGenerator(), 2)
    space = {"a": tune.grid_search([1, 2]), "b": 3}
    assert configure_searcher(basic, "loss", "min", space, num_samples=3, seed=5) == {"b": 3}
    assert basic.total_trials(3) == 6
    assert Noting().total_trials(-1) is None


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Noting("loss", "least"), r'Noting\(mode\) must be "min" or "max", not \'least\''),
        (lambda: Noting(3), r"Noting\(metric\) must be a metric's name"),  # type: ignore[arg-type]
        (lambda: Searcher(["a", "b"], "min"), r"must be a list with a mode for each"),
        (
            lambda: configure_searcher(Noting(), "a", "min", {"x": tune.grid_search([1])}, num_samples=1, seed=0),
            r"param_space has a grid_search, which Noting cannot search",
        ),
        (
            lambda: configure_searcher(Noting(), "a", "min", {"x": tune.uniform(0, 1)}, num_samples=1, seed=0),
            r"Noting has a search space of its own",
        ),
        (
            lambda: configure_searcher(Noting("b", "min"), "a", "min", {}, num_samples=1, seed=0),
            r"TuneConfig\(metric='a'\) and Noting\(metric='b'\) differ",
        ),
        (lambda: ConcurrencyLimiter(Noting(), 0), r"max_concurrent\) must be 1 or more"),
        (lambda: ConcurrencyLimiter("x", 1), r"searcher\) must be a Searcher"),  # type: ignore[arg-type]
        (lambda: Repeater(Noting(), 0), r"repeat\) must be 1 or more"),
        (lambda: create_searcher("hyperopt"), r'must be one of "random", .* not \'hyperopt\''),
    ],
)
def test_bad_searchers_get_one_sentence(make: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()


def test_searchers_are_made_by_name() -> None:
    assert isinstance(create_searcher("random", max_concurrent=2), BasicVariantGenerator)
