"""`TuneReportCallback` by itself: which reports of a run its trial is told of, and in which order; and what is said
where there is no trial, or no framework."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.worker.fake_agent import make_assignment

from holdfast.control.callbacks import CallbackObserver
from holdfast.core import records as r
from holdfast.errors import MissingExtra
from holdfast.storage.locate import open_store
from holdfast.tune.integration import ray_train
from holdfast.tune.integration.ray_train import TuneReportCallback
from holdfast.worker import session as sessions


class Trial:
    """The session of a trial's worker."""

    def __init__(self) -> None:
        self.assignment = make_assignment()
        self.told: list[dict[str, Any]] = []

    def report(self, metrics: dict[str, Any]) -> None:
        self.told.append(metrics)
        if metrics == {"n": -1}:
            raise sessions.TrainingStopped


@pytest.fixture
def trial() -> Iterator[Trial]:
    found: Any = Trial()
    sessions.install(found)
    yield found
    sessions.install(None)


def observe(tmp_path: Path, callback: TuneReportCallback) -> CallbackObserver:
    context: Any = SimpleNamespace(storage_path=str(tmp_path), name="run", run_config=None)
    return CallbackObserver([callback], context, open_store(tmp_path / "run"))


def started(iteration: int) -> r.GenerationStarted:
    return r.GenerationStarted(at=0.0, generation=1, world_size=2, agents=(), iteration=iteration)


def reported(iteration: int, checkpoint: bool = False, n: int | None = None) -> r.RanksReported:
    metrics = {"n": n or iteration}, {"n": 100}
    return r.RanksReported(at=0.0, generation=1, iteration=iteration, metrics=metrics, checkpoint=checkpoint)


def committed(iteration: int) -> r.CheckpointCommitted:
    return r.CheckpointCommitted(at=0.0, name=f"c{iteration}", index=0, iteration=iteration, generation=1, metrics={})


def tell(observer: CallbackObserver, *records: r.Record) -> None:
    for record in records:
        observer.record(record)


def test_reports_keep_their_order_while_a_checkpoint_is_on_its_way(tmp_path: Path, trial: Trial) -> None:
    observer = observe(tmp_path, TuneReportCallback())
    tell(observer, started(0), reported(1), reported(2, checkpoint=True), reported(3))
    assert trial.told == [{"n": 1}]
    tell(observer, committed(2))
    path = str(tmp_path / "run" / "c2")
    assert trial.told == [{"n": 1}, {"n": 2, ray_train.CHECKPOINT_PATH_KEY: path}, {"n": 3}]
    tell(observer, reported(4, checkpoint=True), r.CheckpointAbandoned(at=0.0, generation=1, iteration=4, why="full"))
    assert trial.told[-1] == {"n": 4}


def test_what_is_done_again_is_told_once_and_what_was_not_told_is_forgotten(tmp_path: Path, trial: Trial) -> None:
    observer = observe(tmp_path, TuneReportCallback())
    tell(observer, started(0), reported(1, checkpoint=True), committed(1), reported(2))
    tell(observer, reported(3, checkpoint=True), reported(4), started(1))
    assert [one["n"] for one in trial.told] == [1, 2]
    tell(observer, reported(2, n=12), reported(3, n=13), reported(4, n=14))
    assert [one["n"] for one in trial.told] == [1, 2, 13, 14]


@pytest.mark.parametrize(("own", "told"), [(None, [1, 2, 3]), ("checkpoint_000000", [3])])
def test_a_trial_without_a_checkpoint_is_told_what_came_before(
    tmp_path: Path, trial: Trial, monkeypatch: pytest.MonkeyPatch, own: str | None, told: list[int]
) -> None:
    def read(context: Any, after: int, until: int) -> Sequence[dict[str, Any]]:
        return [{"n": n} for n in range(after + 1, until + 1)]

    monkeypatch.setattr(ray_train, "_reported", read)
    trial.assignment = make_assignment(checkpoint=own)
    observer = observe(tmp_path, TuneReportCallback())
    tell(observer, started(2), reported(3))
    assert [one["n"] for one in trial.told] == told


def test_a_trial_that_ends_at_a_report_is_told_of_no_other(tmp_path: Path, trial: Trial) -> None:
    observer = observe(tmp_path, TuneReportCallback())
    left: list[BaseException] = []
    observer.on_exit = left.append
    tell(observer, started(0))
    observer.record(r.RanksReported(at=0.0, generation=1, iteration=1, metrics=({"n": -1},)))
    tell(observer, reported(2))
    assert trial.told == [{"n": -1}]
    assert [type(one) for one in left] == [sessions.TrainingStopped]


def test_there_must_be_a_trial() -> None:
    with pytest.raises(RuntimeError, match="works only in a trial"):
        TuneReportCallback()


@pytest.mark.parametrize("framework", ["xgboost", "lightgbm", "pytorch_lightning"])
def test_a_framework_that_is_missing_is_named(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = "lightning" if framework == "pytorch_lightning" else framework
    for name in ("lightning", "pytorch_lightning", "xgboost", "lightgbm"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, f"holdfast.tune.integration.{name}", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=rf"pip install 'holdfast\[{package}\]'"):
        importlib.import_module(f"holdfast.tune.integration.{framework}")
