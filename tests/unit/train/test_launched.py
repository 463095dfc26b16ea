"""What a leader sends to hosts that do not see the storage: as much as a rendezvous takes."""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec
import pytest

from holdfast.control.view import RunView
from holdfast.core.commands import RunStatus
from holdfast.core.records import Reported
from holdfast.errors import RunError
from holdfast.rendezvous.launcher_messages import FitResult, PublishedRun
from holdfast.storage.posix.store import PosixStore
from holdfast.train.launched import read_sent, result_for_all
from holdfast.train.remote_driver import DriverOutcome


def _result(outcome: DriverOutcome, storage_path: str = "/runs") -> FitResult:
    run = PublishedRun(storage_path=storage_path, name="run", host="a")
    result = result_for_all(run, RunStatus.FINISHED, "", "", lambda: outcome)
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


def test_nothing_is_sent_of_a_run_that_all_see(tmp_path: Path) -> None:
    outcome = DriverOutcome(view=RunView(metrics={"loss": 0.5}))
    assert _result(outcome, "s3://bucket/runs").outcome == b""
    store = PosixStore(tmp_path)
    store.put("run.json", b"{}")
    assert read_sent(store, _result(outcome)) is None
