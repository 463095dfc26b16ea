"""Hooks of callbacks are called once each, in the order of the journal, with the trial as it was then."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from tests.unit.tune.experiment_lines import ExperimentLines

from holdfast.errors import ConfigError, TuneError
from holdfast.storage.locate import open_store
from holdfast.train import UserCallback
from holdfast.tune import Callback, ProgressReporter, RunConfig, Tuner
from holdfast.tune.callback_view import CallbackView, ReporterCallback
from holdfast.tune.logger import LoggerCallback

HOOKS = [name for name in vars(Callback) if name.startswith("on_") and not name.startswith("on_step")]


class Recorder(Callback):
    """Notes each call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def setup(self, *arguments: Any, **info: Any) -> None:
        self.calls.append(("setup", info["num_samples"]))


def _make_hook(name: str) -> Any:
    def hook(self: Recorder, **info: Any) -> None:
        trial = info.get("trial")
        seen = (trial.trial_id, trial.status) if trial is not None else len(info["trials"])
        extra = [info["result"]["loss"]] if "result" in info else []
        extra += [info["checkpoint"].path] if "checkpoint" in info else []
        self.calls.append((name, seen, *extra))

    return hook


for _name in HOOKS:
    setattr(Recorder, _name, _make_hook(_name))


def feed(lines: ExperimentLines) -> None:
    for trial in ("0", "1"):
        lines.create(trial, x=1)
        lines.start(trial)
    lines.report("0", 1, loss=2.0)
    lines.commit("0", "checkpoint_000000", 1)
    lines.fail_generation("0", 1)
    lines.generation("0", 2, 1, "checkpoint_000000")
    lines.report("0", 2, 2, loss=1.0)
    lines.finish("0")
    lines.fail("1")
    lines.end()


def make_view(tmp_path: Path, *callbacks: Callback) -> CallbackView:
    return CallbackView(callbacks, {"num_samples": 2, "stop": None}, open_store(tmp_path))


def test_each_hook_is_called_for_what_it_names(tmp_path: Path) -> None:
    recorder = Recorder()
    feed(ExperimentLines(make_view(tmp_path, recorder)))
    assert recorder.calls == [
        ("setup", 2),
        ("on_trial_start", ("0", "RUNNING")),
        ("on_trial_start", ("1", "RUNNING")),
        ("on_trial_result", ("0", "RUNNING"), 2.0),
        ("on_trial_save", ("0", "RUNNING")),
        ("on_checkpoint", ("0", "RUNNING"), str(tmp_path / "dir_0" / "checkpoint_000000")),
        ("on_trial_recover", ("0", "RUNNING")),
        ("on_trial_restore", ("0", "RUNNING")),
        ("on_trial_result", ("0", "RUNNING"), 1.0),
        ("on_trial_complete", ("0", "TERMINATED")),
        ("on_trial_error", ("1", "ERROR")),
        ("on_experiment_end", 2),
    ]


def test_a_logger_is_told_of_results_and_ends(tmp_path: Path) -> None:
    logged: list[Any] = []

    class Logger(LoggerCallback):
        def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
            logged.append((iteration, trial.path, result["loss"], result["training_iteration"], result["config"]))

        def log_trial_end(self, trial: Any, failed: bool = False) -> None:
            logged.append((trial.trial_id, failed))

    feed(ExperimentLines(make_view(tmp_path, Logger())))
    results = [(1, "/place/dir_0", 2.0, 1, {"x": 1}), (2, "/place/dir_0", 1.0, 2, {"x": 1})]
    assert logged == [*results, ("0", False), ("1", True)]


def test_what_a_hook_raises_is_told_once_and_ends_the_calls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Raises(Callback):
        def on_trial_result(self, *arguments: Any, **info: Any) -> None:
            raise KeyError("no such table")

    recorder = Recorder()
    told: list[TuneError] = []
    view = make_view(tmp_path, Raises(), recorder)
    view.on_error = told.append
    with caplog.at_level(logging.CRITICAL, "holdfast"):
        feed(ExperimentLines(view))
    assert isinstance(view.error, TuneError) and told == [view.error]
    assert "Raises.on_trial_result raised KeyError" in str(view.error)
    assert recorder.calls[-1] == ("on_experiment_end", 2) and len(recorder.calls) == 4


def test_every_callback_is_told_the_end_whatever_another_raises_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Raises(Callback):
        def on_experiment_end(self, *arguments: Any, **info: Any) -> None:
            raise SystemExit(3)

    recorder = Recorder()
    view = make_view(tmp_path, Raises(), recorder)
    with caplog.at_level(logging.CRITICAL, "holdfast"):
        feed(ExperimentLines(view))
    assert "Raises.on_experiment_end raised SystemExit: 3" in str(view.error)
    assert recorder.calls[-1] == ("on_experiment_end", 2)


def test_a_reporter_of_the_users_is_asked_at_each_step_and_at_the_end(tmp_path: Path) -> None:
    shown: list[Any] = []

    class Reporter(ProgressReporter):
        def setup(self, *arguments: Any, **info: Any) -> None:
            shown.append(info["metric"])

        def should_report(self, trials: list[Any], done: bool = False) -> bool:
            return done or bool(trials[0].last_result.get("loss") == 1.0)

        def report(self, trials: list[Any], done: bool, *sys_info: str) -> None:
            shown.append(([trial.status for trial in trials], done))

    feed(ExperimentLines(make_view(tmp_path, ReporterCallback(Reporter(), metric="loss"))))
    assert shown[0] == "loss" and shown[-1] == (["TERMINATED", "ERROR"], True)
    assert shown[1] == (["RUNNING", "RUNNING"], False)


def test_callbacks_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"holds a PosixPath: derive it from holdfast\.tune\.Callback"):
        RunConfig(callbacks=[Path()])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"holds a UserCallback: derive it from holdfast\.tune\.Callback"):
        Tuner(lambda config: None, run_config=RunConfig(callbacks=[UserCallback()]))  # type: ignore[list-item]
