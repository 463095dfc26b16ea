"""What a leader sends to hosts that do not see the storage, as much as a rendezvous takes, and what they make of it."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import tune
from holdfast.checkpoint.manifest import sealed
from holdfast.control.run_control import STOPPED_BY_CLIENT
from holdfast.control.view import RunView
from holdfast.core.checkpoint_types import StoredCheckpoint
from holdfast.core.commands import RunStatus
from holdfast.core.records import GenerationRunning, Reported, TrialCreated
from holdfast.errors import RunError
from holdfast.journal.format import Line
from holdfast.launch.fit import _sees
from holdfast.rendezvous.launcher_messages import FitResult, PublishedRun
from holdfast.storage.posix.store import PosixStore
from holdfast.train import DataParallelTrainer, RunConfig, launched
from holdfast.train.interrupted import Interrupted
from holdfast.train.launched import published_run, read_sent, result_for_all
from holdfast.train.remote_driver import DriverOutcome, decode_outcome, encode_outcome
from holdfast.train.request import build_request
from holdfast.tune import launched as tune_launched


def _result(outcome: DriverOutcome, run_id: str = "", *, is_directory: bool = True) -> FitResult:
    run = PublishedRun(storage_path="/runs", name="run", id=run_id, is_directory=is_directory, host="a")
    result = result_for_all(run, RunStatus.FINISHED, "", lambda: outcome)
    assert result is not None
    return msgspec.json.decode(msgspec.json.encode(result), type=FitResult)


def _reports(count: int) -> list[Reported]:
    return [
        Reported(at=1.0, generation=1, iteration=number, metrics={"id": secrets.token_hex(16), "loss": float("nan")})
        for number in range(1, count + 1)
    ]


def test_reports_are_left_out_where_they_are_too_much_and_the_result_is_refused_where_it_is(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    small = DriverOutcome(view=RunView(metrics={"loss": 0.5}), reports=_reports(3))
    sent = read_sent(store, _result(small))
    assert sent is not None and sent.view == small.view
    assert sent.reports is not None and [one.iteration for one in sent.reports] == [1, 2, 3]

    sent = read_sent(store, _result(DriverOutcome(view=small.view, reports=_reports(50_000))))
    assert sent is not None and sent.view == small.view and sent.reports is None

    large = DriverOutcome(view=RunView(metrics={"text": secrets.token_hex(500_000)}))
    with pytest.raises(RunError, match=r"has ended \(finished\) on a, but this host does not see it"):
        read_sent(store, _result(large))


def _write_run_file(store: PosixStore, run_id: str) -> None:
    store.put("run.json", sealed(msgspec.json.encode({"id": run_id})))


def test_nothing_is_sent_of_a_run_that_all_see(tmp_path: Path) -> None:
    outcome = DriverOutcome(view=RunView(metrics={"loss": 0.5}))
    assert _result(outcome, is_directory=False).outcome == b""
    store = PosixStore(tmp_path)
    _write_run_file(store, "1a2b")
    assert published_run(store, "/runs", "run") == PublishedRun(
        storage_path="/runs", name="run", id="1a2b", is_directory=True
    )
    assert read_sent(store, _result(outcome, "1a2b")) is None


def test_a_run_that_this_host_led_before_is_not_taken_for_the_one_that_has_ended(tmp_path: Path) -> None:
    """It lies in this host's own directory, under the same name."""
    store = PosixStore(tmp_path / "run")
    _write_run_file(store, "1a2b")
    outcome = DriverOutcome(view=RunView(metrics={"loss": 0.5}))
    sent = read_sent(store, _result(outcome, "3c4d"))
    assert sent is not None and sent.view == outcome.view
    for run_id, seen in (("1a2b", True), ("3c4d", False)):
        assert _sees(PublishedRun(storage_path=str(tmp_path), name="run", id=run_id, is_directory=True)) is seen
    assert _sees(PublishedRun(storage_path="bucket/runs", name="run", id="3c4d")), "not in a directory of a host's"


def test_a_run_that_was_stopped_has_no_result_whatever_this_host_sees(tmp_path: Path) -> None:
    run = PublishedRun(storage_path=str(tmp_path / "elsewhere"), name="run", id="3c4d", is_directory=True, host="a")
    result = result_for_all(run, RunStatus.INTERRUPTED, STOPPED_BY_CLIENT, DriverOutcome)
    assert result is not None
    trainer = DataParallelTrainer(print, run_config=RunConfig(storage_path=tmp_path))
    _, outcome, sent = launched._follow(build_request(trainer, False, None, ()), result)
    assert (outcome.status, outcome.interrupted_by, sent) == (RunStatus.INTERRUPTED, STOPPED_BY_CLIENT, None)


def test_an_experiment_that_was_stopped_has_none_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = PublishedRun(storage_path=str(tmp_path / "elsewhere"), name="run", id="3c4d", is_directory=True, host="a")
    result = result_for_all(run, RunStatus.INTERRUPTED, STOPPED_BY_CLIENT, DriverOutcome)
    monkeypatch.setattr(tune_launched, "lead_or_follow", lambda lead, follow, alone: follow(result))
    tuner = tune.Tuner(print, run_config=tune.RunConfig(storage_path=tmp_path))

    def lead(request: Any) -> Any:
        pytest.fail("it has been stopped")

    with pytest.raises(Interrupted, match=STOPPED_BY_CLIENT):
        tune_launched.tune_launched(tuner._request(), lead)


def test_whatever_a_journal_holds_can_be_sent() -> None:
    """Numbers of more than 64 bits, in a configuration, and those that are not finite."""
    created = TrialCreated(at=1.0, trial="t", config={"seed": 2**70, "$float": "x"}, name="n", directory="d")
    running = GenerationRunning(at=1.0, generation=1, pids={0: 123})
    lines = [Line(1, "abcd", 7, created), Line(2, "t", 8, running), Line(3, "t", 9, _reports(1)[0])]
    outcome = DriverOutcome(
        lines=lines,
        experiment_id="abcd",
        view=RunView(
            metrics={"loss": float("inf")},
            checkpoints=[StoredCheckpoint(name="c", index=1, iteration=2, generation=3, metrics={"loss": 0.5})],
            return_value={"$tuple": [1, 2**80]},
            params={"seed": 2**70},
        ),
    )
    again = decode_outcome(encode_outcome(outcome))
    assert repr(again) == repr(outcome)
