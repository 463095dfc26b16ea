"""`OptunaSearch` with the real Optuna: samplers repeat after a restart, spaces convert, the history is bounded."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

from holdfast import tune
from holdfast.errors import ConfigError
from holdfast.tune.search import ConcurrencyLimiter, Searcher, create_searcher
from holdfast.tune.search.searcher import configure_searcher
from holdfast.tune.serialization import from_json, to_json

optuna = pytest.importorskip("optuna")

from holdfast.tune.search.optuna import OptunaSearch  # noqa: E402

SPACE: dict[str, Any] = {
    "x": tune.uniform(-5, 5),
    "deep": {"lr": tune.loguniform(1e-4, 1), "units": tune.qrandint(8, 64, 8)},
    "kind": tune.choice(["a", "b"]),
    "constant": 3,
}
NUMBERS = {"x": tune.uniform(-5, 5), "y": tune.uniform(-5, 5)}


def ready(searcher: Searcher, space: dict[str, Any] = SPACE, seed: int = 1) -> Searcher:
    configure_searcher(
        searcher, None if searcher.metric else "loss", None if searcher.mode else "min", space, num_samples=9, seed=seed
    )
    return searcher


def loss(config: dict[str, Any]) -> float:
    return float((config["x"] - 1) ** 2 + (config.get("y", 0) + 2) ** 2)


def run(searcher: Searcher, count: int, seed: int = 0, events: list[Any] | None = None) -> list[dict[str, Any]]:
    """Trials that overlap: each time one starts or one of those that run ends."""
    rng = random.Random(seed)
    configs: list[dict[str, Any]] = []
    running: dict[str, dict[str, Any]] = {}
    while len(configs) < count:
        if len(running) < 3 and (not running or rng.random() < 0.5):
            trial_id = f"t{len(configs)}"
            config = searcher.suggest(trial_id)
            assert isinstance(config, dict)
            configs.append(config)
            running[trial_id] = config
            if events is not None:
                events.append(("replay_suggestion", trial_id, config))
        else:
            trial_id = rng.choice(list(running))
            value = loss(running.pop(trial_id))
            failed = rng.random() < 0.1
            result = None if failed else {"loss": value, "other": -value}
            searcher.on_trial_complete(trial_id, result, error=failed)
            if events is not None:
                events.append(("on_trial_complete", trial_id, result, failed))
    return configs


def samplers() -> dict[str, Any]:
    made = optuna.samplers
    return {
        "tpe": lambda: made.TPESampler(n_startup_trials=5),
        "random": made.RandomSampler,
        "cma-es": lambda: made.CmaEsSampler(n_startup_trials=3),
        "gp": lambda: made.GPSampler(n_startup_trials=5),
        "qmc": made.QMCSampler,
        "nsga-ii": lambda: made.NSGAIISampler(population_size=5),
    }


NEEDS = {"cma-es": "cmaes", "gp": "torch", "qmc": "scipy"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "gp" else []) for name in samplers()]
)
@pytest.mark.filterwarnings("ignore")
def test_a_sampler_that_is_made_again_suggests_what_the_other_would_have(name: str) -> None:
    pytest.importorskip(NEEDS.get(name, "optuna"))
    make = samplers()[name]
    count = 10 if name == "gp" else 24
    events: list[Any] = []
    first = ready(OptunaSearch(sampler=make()), NUMBERS)
    whole = run(first, count, events=events)
    cuts = (7,) if name == "gp" else (3, 12, 25)
    for cut in cuts:
        again = ready(OptunaSearch(sampler=make()), NUMBERS)
        known = 0
        for kind, *arguments in events[:cut]:
            getattr(again, kind)(*arguments)
            known += kind == "replay_suggestion"
        restored = ready(OptunaSearch(sampler=make()), NUMBERS)
        restored.set_state(again.get_state())
        for kind, *arguments in events[cut:]:
            if kind == "replay_suggestion":
                assert again.suggest(arguments[0]) == restored.suggest(arguments[0]) == whole[known]
                known += 1
            else:
                again.on_trial_complete(*arguments)
                restored.on_trial_complete(*arguments)


@pytest.mark.parametrize("name", ["tpe", "qmc"])
@pytest.mark.filterwarnings("ignore")
def test_suggestions_depend_on_the_experiments_seed_unless_the_searcher_has_one(name: str) -> None:
    pytest.importorskip(NEEDS.get(name, "optuna"))

    def found(seed: int, own: int | None = None) -> list[dict[str, Any]]:
        return run(ready(OptunaSearch(sampler=samplers()[name](), seed=own), NUMBERS, seed), 6)

    assert found(1) == found(1) != found(2)
    assert found(1, own=5) == found(2, own=5)


def test_tpe_finds_better_values_than_random_search() -> None:
    found: dict[str, list[float]] = {"tpe": [], "random": []}
    for name, values in found.items():
        for seed in range(3):
            values.append(min(map(loss, run(ready(OptunaSearch(sampler=samplers()[name]()), NUMBERS, seed), 40, seed))))
    assert statistics.mean(found["tpe"]) < statistics.mean(found["random"])


@pytest.mark.filterwarnings("ignore")
def test_every_kind_of_domain_is_searched_within_its_bounds() -> None:
    space: dict[str, Any] = {
        "floats": [tune.uniform(0, 1), tune.quniform(0, 1, 0.25), tune.loguniform(1, 9), tune.qloguniform(1, 9, 0.5)],
        "integers": [tune.randint(1, 4), tune.qrandint(3, 9, 3), tune.lograndint(1, 9), tune.qlograndint(3, 9, 3)],
        "normal": [tune.randn(5, 0.1), tune.qrandn(0, 1, 0.5)],
        "choice": tune.choice([None, (1, 2), {"inner": tune.uniform(2, 3)}]),
        "function": tune.sample_from(lambda config: config["floats"][0] + 1),
        "constant": "c",
    }
    searcher = ready(OptunaSearch(), space)
    seen = []
    for number in range(25):
        config = searcher.suggest(f"t{number}")
        assert isinstance(config, dict)
        for group in ("floats", "integers"):
            for value, domain in zip(config[group], space[group], strict=True):
                assert domain.is_valid(value) and domain.cast(value) == pytest.approx(value)
        assert 4 < config["normal"][0] < 6 and config["normal"][1] % 0.5 == 0
        assert config["function"] == config["floats"][0] + 1 and config["constant"] == "c"
        seen.append(config["choice"])
        searcher.on_trial_complete(f"t{number}", {"loss": config["floats"][0]})
    inner = [one["inner"] for one in seen if isinstance(one, dict)]
    assert inner and all(2 <= value <= 3 for value in inner) and None in seen and (1, 2) in seen


def test_points_come_first_and_what_they_leave_out_is_searched() -> None:
    searcher = ready(
        OptunaSearch(points_to_evaluate=[{"x": 2.0, "kind": "b", "deep": {"lr": 0.5}}, {"deep/units": 16}])
    )
    first, second = searcher.suggest("a"), searcher.suggest("b")
    assert isinstance(first, dict) and isinstance(second, dict)
    assert (first["x"], first["kind"], first["deep"]["lr"], first["constant"]) == (2.0, "b", 0.5, 3)
    assert second["deep"]["units"] == 16 and second["constant"] == 3


def test_points_with_rewards_are_not_run() -> None:
    rewarded = ready(OptunaSearch(points_to_evaluate=[{"x": 1.0, "y": -2.0}], evaluated_rewards=[0.0]), NUMBERS)
    plain = ready(OptunaSearch(), NUMBERS)
    assert rewarded.suggest("a") == plain.suggest("a") != {"x": 1.0, "y": -2.0}
    plain.add_evaluated_point({"x": 1.0, "y": -2.0}, 0.0)
    restored = ready(OptunaSearch(), NUMBERS)
    restored.set_state(plain.get_state())
    for searcher in (plain, restored):
        searcher.suggest("b")
        assert isinstance(searcher, OptunaSearch)
        assert [trial.values for trial in searcher._study.get_trials(deepcopy=False)] == [None, [0.0], None]


@pytest.mark.filterwarnings("ignore")
def test_several_objectives_are_optimised_at_once() -> None:
    searcher = OptunaSearch(metric=["loss", "other"], mode=["min", "max"], sampler=samplers()["nsga-ii"]())
    assert configure_searcher(searcher, None, None, NUMBERS, num_samples=9, seed=1) == {}
    assert len(run(searcher, 15)) == 15


def test_a_space_of_optunas_own_may_be_given() -> None:
    by_dict = OptunaSearch({"a": optuna.distributions.FloatDistribution(6, 8)}, metric="loss", mode="min")

    def define(trial: Any) -> dict[str, Any]:
        trial.suggest_float("a", 6, 8)
        return {"constant": 1}

    by_function = OptunaSearch(define, metric="loss", mode="min")
    for searcher, keys in ((by_dict, {"a"}), (by_function, {"a", "constant"})):
        space = by_dict._distributions if searcher is by_dict else define
        assert configure_searcher(searcher, None, None, {"outer": 2}, num_samples=1, seed=0) == {"outer": 2}
        config = searcher.suggest("t")
        assert isinstance(config, dict) and set(config) == keys and 6 <= config["a"] <= 8
        again = OptunaSearch(space, metric="loss", mode="min")
        configure_searcher(again, None, None, {"outer": 2}, num_samples=1, seed=0)
        again.replay_suggestion("t", config)
        for one in (searcher, again):
            one.on_trial_complete("t", {"loss": 1.0})
        assert again.suggest("next") == searcher.suggest("next")


def test_the_history_that_tpe_sees_is_bounded_and_keeps_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OptunaSearch, "history_limit", 10)
    events: list[Any] = []
    searcher = ready(OptunaSearch(), NUMBERS)
    assert isinstance(searcher, OptunaSearch)
    configs = run(searcher, 60, events=events)
    results = {event[1]: event[2] for event in events if event[0] == "on_trial_complete"}
    best = min(result["loss"] for result in results.values() if result)
    seen = searcher._study.get_trials(deepcopy=False)
    assert len(seen) <= 2 * 10 + 3
    assert best in [trial.value for trial in seen if trial.state.name == "COMPLETE"]
    again = ready(OptunaSearch(), NUMBERS)
    for kind, *arguments in events:
        getattr(again, kind)(*arguments)
    assert again.suggest("next") == searcher.suggest("next")
    assert len(configs) == 60


def test_a_searcher_is_stored_unless_it_was_given_a_sampler() -> None:
    made = ConcurrencyLimiter(create_searcher("optuna", metric="loss", mode="min", seed=3), 2)
    again = from_json(to_json(made), "search_alg")
    assert run(ready(again, NUMBERS), 1) == run(ready(made, NUMBERS), 1)
    with pytest.raises(ConfigError, match=r"holds an object of optuna\.samplers.*TPESampler.*call Tuner"):
        from_json(to_json(OptunaSearch(sampler=optuna.samplers.TPESampler())), "search_alg")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: OptunaSearch(sampler="tpe"), r"sampler\) must be one of optuna\.samplers"),
        (lambda: OptunaSearch(3), r"space\) must be a dict of optuna\.distributions"),  # type: ignore[arg-type]
        (lambda: OptunaSearch({"a": 1}), r"space\)\['a'\] must be one of optuna\.distributions"),
        (lambda: OptunaSearch(points_to_evaluate=[1]), r"points_to_evaluate\) must be a list of dicts"),  # type: ignore[list-item]
        (lambda: OptunaSearch(points_to_evaluate=[{}], evaluated_rewards=[]), r"must have an entry for each of the 1"),
        (lambda: OptunaSearch(mode="least"), r'mode\) must be "min" or "max"'),
        (lambda: ready(OptunaSearch(), {"g": tune.grid_search([1])}), r"grid_search, which OptunaSearch cannot search"),
        (lambda: OptunaSearch().suggest("t"), r"OptunaSearch needs a metric and a mode"),
        (lambda: OptunaSearch(metric="a", mode="min").suggest("t"), r"OptunaSearch has nothing to search"),
        (
            lambda: ready(OptunaSearch(points_to_evaluate=[{"kind": "z"}])).suggest("t"),
            r"points_to_evaluate: kind='z' is outside of choice",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:points_to_evaluate")
def test_bad_settings_get_one_sentence(make: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()
