"""`ResultGrid` over trials in memory: indexing, the best by every scope, the data frame, the plot."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import ConfigError
from holdfast.tune import Callback, ResultGrid
from holdfast.tune.experiment import Trial
from holdfast.tune.logger import CSVLoggerCallback, JsonLoggerCallback, LoggerCallback, TBXLoggerCallback

HISTORY: dict[str, list[dict[str, Any]]] = {
    "a": [{"loss": 0.1, "timestamp": 10}, *({"loss": 5.0, "timestamp": 20 + at} for at in range(10))],
    "b": [{"loss": 4.0, "timestamp": 12}, {"loss": 3.0, "timestamp": 33, "eval": {"acc": 0.5}}],
    "c": [{"loss": float("nan"), "timestamp": 14}, {"loss": float("-inf"), "timestamp": 15}],
}


def grid(*names: str, metric: str | None = "loss", mode: str | None = "min") -> Any:
    trials = [
        Trial(name, {"lr": at, "deep": {"x": at}}, Trial.TERMINATED, (HISTORY.get(name) or [{}])[-1], path=f"/e/{name}")
        for at, name in enumerate(names)
    ]
    opened: list[str] = []

    def open_result(trial: Trial) -> Any:
        assert trial.trial_id not in opened, "a result is opened once"
        opened.append(trial.trial_id)
        return f"result of {trial.trial_id}"

    return ResultGrid(
        trials, open_result, lambda: HISTORY, experiment_path="/e", filesystem="files", metric=metric, mode=mode
    )


def test_results_are_opened_when_they_are_asked_for() -> None:
    results = grid("a", "b", "c")
    assert len(results) == 3
    assert (results[0], results[-1], results[0]) == ("result of a", "result of c", "result of a")
    assert list(results) == ["result of a", "result of b", "result of c"]
    with pytest.raises(IndexError):
        results[3]
    assert (results.experiment_path, results.filesystem) == ("/e", "files")
    assert repr(results) == "ResultGrid<3 trials, 3 terminated, 0 failed>"
    assert repr([Trial("a", {"lr": 1})]) == "[<Trial a, PENDING>]"


def test_errors_are_counted() -> None:
    failed = Trial("f", status=Trial.ERROR, error=ValueError("no"))
    results = ResultGrid([failed, Trial("p")], lambda trial: None, dict, experiment_path="")  # type: ignore[arg-type,return-value]
    assert (results.num_errors, results.num_terminated) == (1, 0)
    assert [str(error) for error in results.errors] == ["no"]


@pytest.mark.parametrize(
    ("scope", "mode", "best"),
    [
        ("last", "min", "b"),
        ("last", "max", "a"),
        ("all", "min", "a"),
        ("avg", "min", "b"),
        ("avg", "max", "a"),
        ("last-5-avg", "min", "b"),
        ("last-10-avg", "max", "a"),
    ],
)
def test_the_best_trial_by_each_scope(scope: str, mode: str, best: str) -> None:
    assert grid("a", "b", "c").get_best_result(mode=mode, scope=scope) == f"result of {best}"


def test_infinity_wins_only_if_asked_for_and_nan_never() -> None:
    assert grid("a", "c").get_best_result(filter_nan_and_inf=False) == "result of c"
    assert grid("a", "c").get_best_result(scope="avg", filter_nan_and_inf=False) == "result of a"


def test_a_nested_metric_is_named_with_a_slash() -> None:
    assert grid("a", "b").get_best_result("eval/acc", "max") == "result of b"


def test_the_last_report_that_has_the_metric_counts() -> None:
    """As in Ray: a function may end with a report of something else."""
    history: dict[str, list[dict[str, Any]]] = {"d": [{"loss": 3.0}, {"loss": 2.0}, {"done": 1}], "e": [{"loss": 2.5}]}
    trials = [Trial(name, {}, Trial.TERMINATED, reports[-1]) for name, reports in history.items()]
    results: Any = ResultGrid(
        [*trials, Trial("f", {}, Trial.ERROR)],
        lambda trial: trial.trial_id,  # type: ignore[arg-type,return-value]
        lambda: history,
        experiment_path="/e",
    )
    assert results.get_best_result("loss", "min") == "d"
    assert results.get_best_result("loss", "max") == "e"


def test_one_trial_needs_no_metric() -> None:
    assert grid("a", metric=None, mode=None).get_best_result() == "result of a"


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (lambda: grid("a", "b", metric=None).get_best_result(), ValueError, r"\(metric\) is needed to compare trials"),
        (lambda: grid("a", "b", mode=None).get_best_result(), ValueError, r"\(mode\) is needed to compare trials"),
        (lambda: grid("a", "b").get_best_result(mode="least"), ConfigError, r'mode\) must be "min" or "max"'),
        (lambda: grid("a", "b").get_best_result(scope="first"), ConfigError, r"scope\) must be one of all, last"),
        (
            lambda: grid("a").get_best_result("acc"),
            RuntimeError,
            r'No best trial found.*"acc".*reported: loss, timestamp',
        ),
        (lambda: grid("a").plot("plot.png"), RuntimeError, r'"plot.png".*reported: loss, timestamp'),
        (lambda: grid("c").get_best_result(), RuntimeError, r"No best trial found.*not a finite number"),
        (lambda: grid("a").get_dataframe("loss"), ConfigError, r"which filter_metric needs"),
    ],
)
def test_a_best_that_cannot_be_found_is_one_sentence(call: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        call()


def test_the_data_frame_has_a_row_for_each_trial() -> None:
    pytest.importorskip("pandas")
    frame = grid("a", "b").get_dataframe()
    assert list(frame["trial_id"]) == ["a", "b"]
    assert list(frame["loss"]) == [5.0, 3.0]
    assert list(frame["config/deep/x"]) == [0, 1]
    assert list(frame["logdir"]) == ["/e/a", "/e/b"]
    assert frame["eval/acc"][1] == 0.5
    assert list(grid("a", "b").get_dataframe("loss", "min")["loss"]) == [0.1, 3.0]


def test_the_best_value_over_time() -> None:
    results = grid("a", "b", "c")
    assert results.best_over_time() == [(0.0, 0.1)]
    assert results.best_over_time(mode="max") == [(0.0, 0.1), (2.0, 4.0), (10.0, 5.0)]


def test_the_plot_shows_each_improvement() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    axes = grid("a", "b").plot(mode="max")
    [line] = axes.get_lines()
    assert list(line.get_ydata()) == [0.1, 4.0, 5.0]
    assert axes.get_ylabel() == "highest loss"
    assert grid("a").plot(ax=axes) is axes
    matplotlib.pyplot.close(axes.figure)


def test_a_logger_gets_each_trials_start_results_and_end() -> None:
    class Noting(LoggerCallback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def log_trial_start(self, trial: Trial) -> None:
            self.seen.append(("start", trial.trial_id))

        def log_trial_result(self, iteration: int, trial: Trial, result: dict[str, Any]) -> None:
            self.seen.append((iteration, result))

        def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
            self.seen.append(("end", failed))

    noting, trial = Noting(), Trial("a")
    noting.setup()
    noting.on_trial_start(0, [trial], trial)
    noting.on_trial_result(1, [trial], trial, {"loss": 1})
    noting.on_trial_complete(2, [trial], trial)
    noting.on_trial_error(2, [trial], trial)
    assert noting.seen == [("start", "a"), (1, {"loss": 1}), ("end", False), ("end", True)]


@pytest.mark.parametrize("kind", [Callback, CSVLoggerCallback, JsonLoggerCallback, TBXLoggerCallback])
def test_every_hook_of_a_callback_may_be_called(kind: type[Callback]) -> None:
    callback, trial = kind(), Trial("a")
    for hook in ("on_trial_start", "on_trial_restore", "on_trial_save", "on_trial_complete", "on_trial_error"):
        getattr(callback, hook)(iteration=1, trials=[trial], trial=trial, later="info")
    callback.on_trial_result(1, [trial], trial, {})
    callback.on_experiment_end([trial])
    assert callback.get_state() is None
