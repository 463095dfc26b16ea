"""result.json, progress.csv and the events as people and TensorBoard read them, over rollbacks and restarts."""

from __future__ import annotations

import csv
import json
import logging
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PluginAccumulator
from tests.unit.files.shown import T0, CountingStore, begin, commit, generation, report, reports

from holdfast.core import records as r
from holdfast.journal.reader import JournalReader
from holdfast.journal.writer import Journal
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.store import Store
from holdfast.views.files.results import ResultFiles

LEASES = ("", "0123456789abcdef", "fedcba9876543210", "00ff00ff00ff00ff")


def _journal(store: Store, records: Sequence[r.Record], epoch: int = 1) -> None:
    """Let the journal hold these records of a controller."""
    journal = Journal(store, epoch, LEASES[epoch])
    journal.append(records)
    journal.flush()
    journal.close()


def _files(store: Store, prior: Sequence[r.Record] = (), epoch: int = 1, **options: Any) -> ResultFiles:
    """The files of a controller that comes after one that left `prior`."""
    if prior:
        epoch = 2
        _journal(store, prior)
    return ResultFiles(store, JournalReader(store), epoch=epoch, lease=LEASES[epoch], **options)


def _write(store: Store, records: Sequence[r.Record], prior: Sequence[r.Record] = (), **options: Any) -> None:
    files = _files(store, prior, **options)
    for record in records:
        files.record(record)
    files.flush(final=True)
    files.close()


def _results(root: Path) -> list[dict[str, Any]]:
    text = (root / "result.json").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def _progress(root: Path) -> list[dict[str, str]]:
    text = (root / "progress.csv").read_text()
    assert text.endswith("\n")
    return list(csv.DictReader(text.splitlines(), strict=True))


def _losses(root: Path, tag: str = "loss") -> list[tuple[int, float]]:
    """What TensorBoard shows, by both of its readers."""
    old = EventAccumulator(str(root), size_guidance={"scalars": 0})
    old.Reload()
    found = [(event.step, round(event.value, 3)) for event in old.Scalars(tag)]
    new = PluginAccumulator(str(root), size_guidance={"tensors": 0})
    new.Reload()
    assert [event.step for event in new.Tensors(tag)] == [step for step, _ in found]
    return found


def test_a_row_holds_the_metrics_and_the_times(tmp_path: Path) -> None:
    metrics = {"loss": 0.5, "eval": {"acc": 0.25, "by": {"class": 3}}, "name": 'a "b", c', "none": None}
    records = [
        begin(),
        *generation(1, running_after_s=2.0),
        report(1, T0 + 5, metrics, checkpoint=True),
        commit(1, T0 + 5.5, index=3),
        report(2, T0 + 6.5, metrics),
    ]
    _write(PosixStore(tmp_path), records)
    first, second = _results(tmp_path)
    assert {key: first[key] for key in metrics} == metrics
    assert (first["training_iteration"], first["time_this_iter_s"], first["time_total_s"]) == (1, 3.0, 3.0)
    assert (second["training_iteration"], second["time_this_iter_s"], second["time_total_s"]) == (2, 1.5, 4.5)
    assert first["timestamp"] == int(T0 + 5)
    assert first["checkpoint_dir_name"] == "checkpoint_000003"
    assert "checkpoint_dir_name" not in second
    row = _progress(tmp_path)[0]
    assert {key: row[key] for key in ("loss", "eval/acc", "eval/by/class", "name", "none")} == {
        "loss": "0.5",
        "eval/acc": "0.25",
        "eval/by/class": "3",
        "name": 'a "b", c',
        "none": "",
    }
    assert (row["training_iteration"], row["checkpoint_dir_name"], row["date"]) == (
        "1",
        "checkpoint_000003",
        first["date"],
    )
    assert _losses(tmp_path, "eval/by/class") == [(1, 3.0), (2, 3.0)]


def test_nan_and_infinity_are_written_as_python_does(tmp_path: Path) -> None:
    metrics = {"loss": math.nan, "deep": {"up": math.inf}, "list": [1.0, math.nan]}
    _write(PosixStore(tmp_path), [begin(), *generation(1), report(1, T0 + 1, metrics)])
    text = (tmp_path / "result.json").read_text()
    assert '"loss":NaN' in text
    assert '"deep":{"up":Infinity}' in text
    row = _progress(tmp_path)[0]
    assert (row["loss"], row["deep/up"], row["list"]) == ("nan", "inf", "[1.0, NaN]")
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert math.isnan(accumulator.Scalars("loss")[0].value)


def test_a_reported_date_is_kept_but_training_iteration_is_ours(tmp_path: Path) -> None:
    metrics = {"date": "Monday", "training_iteration": 99, "loss": 1.0}
    _write(PosixStore(tmp_path), [begin(), *generation(1), report(1, T0 + 1, metrics)])
    assert _results(tmp_path)[0]["date"] == _progress(tmp_path)[0]["date"] == "Monday"
    assert _results(tmp_path)[0]["training_iteration"] == 1
    assert next(iter(_progress(tmp_path)[0].values())) == "1"


def test_text_with_newlines_stays_on_one_line(tmp_path: Path) -> None:
    _write(PosixStore(tmp_path), [begin(), *generation(1), report(1, T0 + 1, {"note": "two\nlines"})])
    assert _results(tmp_path)[0]["note"] == "two\nlines"
    assert _progress(tmp_path)[0]["note"] == "two lines"


def test_columns_may_grow(tmp_path: Path) -> None:
    files = ResultFiles(PosixStore(tmp_path))
    for record in [begin(), *generation(1), report(1, T0 + 1, {"a": 1}), report(2, T0 + 2, {"a": 2})]:
        files.record(record)
    files.flush()
    header = (tmp_path / "progress.csv").read_text().splitlines()[0]
    files.record(report(3, T0 + 3, {"b,c": 5.0, "a": 3}))
    files.record(report(4, T0 + 4, {"d": "x"}))
    files.flush(final=True)
    files.close()
    assert (tmp_path / "progress.csv").read_text().splitlines()[0] == header + ',"b,c",d'
    rows = _progress(tmp_path)
    assert [(row["a"], row["b,c"], row["d"]) for row in rows] == [
        ("1", "", ""),
        ("2", "", ""),
        ("3", "5.0", ""),
        ("", "", "x"),
    ]


def test_a_rollback_shows_the_effective_curve_only(tmp_path: Path) -> None:
    files = ResultFiles(PosixStore(tmp_path))
    for record in [begin(), *generation(1), *reports(1, 5)]:
        files.record(record)
    files.flush()
    assert [row["n"] for row in _results(tmp_path)] == [1, 2, 3, 4, 5]
    for record in [*generation(2, iteration=3, at=T0 + 20), *reports(4, 6, at=T0 + 20, generation=2)]:
        files.record(record)
    files.flush(final=True)
    files.close()
    curve = [1.1, 2.1, 3.1, 4.2, 5.2, 6.2]
    assert [row["loss"] for row in _results(tmp_path)] == curve
    assert [row["time_total_s"] for row in _results(tmp_path)] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert [float(row["loss"]) for row in _progress(tmp_path)] == curve
    assert [loss for _, loss in _losses(tmp_path)] == curve


def test_reports_rolled_back_before_they_were_written_do_not_appear(tmp_path: Path) -> None:
    records = [begin(), *generation(1), *reports(1, 3), *generation(2, at=T0 + 9), *reports(1, 2, T0 + 9, 2)]
    _write(PosixStore(tmp_path), records)
    assert [row["loss"] for row in _results(tmp_path)] == [1.2, 2.2]
    assert _losses(tmp_path) == [(1, 1.2), (2, 2.2)]


def test_a_new_controller_continues_the_same_files(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    prior = [begin(), *generation(1), *reports(1, 4)]
    _write(store, prior)
    later = [begin(2, T0 + 50), *generation(2, iteration=2, at=T0 + 51), *reports(3, 4, T0 + 51, 2)]
    _write(store, later, prior)
    curve = [1.1, 2.1, 3.2, 4.2]
    assert [row["loss"] for row in _results(tmp_path)] == curve
    assert [row["time_total_s"] for row in _results(tmp_path)] == [1.0, 2.0, 3.0, 4.0]
    assert [float(row["loss"]) for row in _progress(tmp_path)] == curve
    assert [loss for _, loss in _losses(tmp_path)] == curve
    assert len(list(tmp_path.glob("events.out.tfevents.*.node-a.*"))) == 2


@pytest.mark.parametrize("damage", ["lost tail", "torn", "gone", "foreign", "longer", "one gone"])
def test_files_that_disagree_with_the_journal_are_rewritten(tmp_path: Path, damage: str) -> None:
    store = PosixStore(tmp_path)
    prior = [begin(), *generation(1), *reports(1, 4)]
    _write(store, prior[:-2] if damage == "lost tail" else prior)
    results = tmp_path / "result.json"
    match damage:
        case "torn":
            results.write_bytes(results.read_bytes()[:-7])
        case "gone":
            results.unlink()
            (tmp_path / "progress.csv").unlink()
        case "foreign":
            results.write_text("what is this\n" * 4)
        case "longer":
            results.write_bytes(results.read_bytes() * 2)
        case "one gone":
            (tmp_path / "progress.csv").unlink()
    _write(store, [begin(2, T0 + 50)], prior)
    assert [row["n"] for row in _results(tmp_path)] == [1, 2, 3, 4]
    assert [row["n"] for row in _progress(tmp_path)] == ["1", "2", "3", "4"]
    assert [step for step, _ in _losses(tmp_path)] == [1, 2, 3, 4]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp")] == []


def test_a_row_waits_a_little_for_the_name_of_its_checkpoint(tmp_path: Path) -> None:
    now = [100.0]
    files = ResultFiles(PosixStore(tmp_path), clock=lambda: now[0])
    for record in [begin(), *generation(1), report(1, T0 + 1, {"a": 1}, checkpoint=True), report(2, T0 + 2, {"a": 2})]:
        files.record(record)
    files.flush()
    assert _results(tmp_path) == []
    files.record(commit(1, T0 + 2))
    files.flush()
    assert [row.get("checkpoint_dir_name") for row in _results(tmp_path)] == ["checkpoint_000000", None]
    files.record(report(3, T0 + 3, {"a": 3}, checkpoint=True))
    files.flush()
    now[0] += 2.0
    files.flush()
    assert [row.get("checkpoint_dir_name") for row in _results(tmp_path)] == ["checkpoint_000000", None, None]
    files.close()


def test_uploads_to_an_object_store_become_rarer_as_files_grow(tmp_path: Path) -> None:
    now = [0.0]
    store = CountingStore(tmp_path)
    files = ResultFiles(store, clock=lambda: now[0])
    files.record(begin())
    for record in generation(1):
        files.record(record)
    iteration = 0
    for _ in range(300):
        for _ in range(20):
            iteration += 1
            files.record(report(iteration, T0 + now[0], {"loss": 1.0}))
        now[0] += 1.0
        files.flush()
    sent = store.sent("result.json")
    assert sent == sorted(sent)
    assert 3 < len(sent) < 60
    assert sum(sent) < 100_000 * 300
    files.record(report(iteration + 1, T0 + now[0], {"loss": 2.0}))
    files.flush(final=True)
    files.close()
    assert len(_results(tmp_path)) == iteration + 1
    assert len(_losses(tmp_path)) == iteration + 1


def test_a_resumed_run_on_an_object_store(tmp_path: Path) -> None:
    prior = [begin(), *generation(1), *reports(1, 4)]
    _write(CountingStore(tmp_path), prior)
    store = CountingStore(tmp_path)
    files = _files(store, prior)
    files.record(begin(2, T0 + 50))
    files.flush()
    for record in [*generation(2, iteration=2, at=T0 + 51), *reports(3, 5, T0 + 51, 2)]:
        files.record(record)
    files.flush(final=True)
    files.close()
    curve = [1.1, 2.1, 3.2, 4.2, 5.2]
    assert [row["loss"] for row in _results(tmp_path)] == curve
    assert [float(row["loss"]) for row in _progress(tmp_path)] == curve
    assert [loss for _, loss in _losses(tmp_path)] == curve


def test_failing_storage_is_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CountingStore(tmp_path)
    store.failing = True
    now = [0.0]
    files = ResultFiles(store, clock=lambda: now[0], params={"lr": 0.1})
    with caplog.at_level(logging.WARNING):
        for record in [begin(), *generation(1), *reports(1, 2)]:
            files.record(record)
        for _ in range(5):
            now[0] += 60.0
            files.flush()
    assert len(caplog.records) == 1
    assert "tried again" in caplog.text
    store.failing = False
    now[0] += 60.0
    files.flush()
    assert [row["n"] for row in _results(tmp_path)] == [1, 2]
    assert store.text("params.json") == '{\n  "lr": 0.1\n}\n'
    files.close()


def test_writing_to_an_unwritable_directory_is_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "run"
    root.write_text("a file is in the way")
    files = ResultFiles(PosixStore(root))
    for record in [begin(), *generation(1), *reports(1, 3)]:
        files.record(record)
    files.flush()
    files.flush()
    assert len([entry for entry in caplog.records if entry.levelno == logging.WARNING]) == 1
    root.unlink()
    files.record(report(4, T0 + 4, {"n": 4}))
    files.flush(final=True)
    files.close()
    assert [row["n"] for row in _results(root)] == [1, 2, 3, 4]
    assert [row["n"] for row in _progress(root)] == ["1", "2", "3", "4"]


def test_params_and_errors_are_plain_text(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    cause, traceback = "raised ValueError: bad", "Traceback ...\nValueError: bad"
    failure = r.WorkerFailure(rank=1, cause=cause, host="node-b", error_type="ValueError", traceback=traceback)
    twin = r.WorkerFailure(rank=0, cause=cause, traceback=traceback)
    failed = r.RunFailed(at=T0 + 3, error="rank 1 raised ValueError: bad", failures=(failure, twin))
    prior = [begin(), *generation(1), failed]
    _write(store, prior, params={"lr": 0.1, "layers": (1, 2), "model": Path, 3: math.inf})
    assert json.loads((tmp_path / "params.json").read_text()) == {
        "lr": 0.1,
        "layers": [1, 2],
        "model": "<class 'pathlib.Path'>",
        "3": math.inf,
    }
    assert (tmp_path / "error.txt").read_text() == (
        "TrainingFailedError: rank 1 raised ValueError: bad\n\n"
        "Rank 1 on node-b raised ValueError: bad\nTraceback ...\nValueError: bad\n\n"
        "Rank 0 raised ValueError: bad\n(the same traceback as rank 1)\n"
    )
    _write(store, [begin(2, T0 + 9)], prior)
    assert not (tmp_path / "error.txt").exists(), "the run goes on"


def test_nothing_is_written_before_the_controller_started(tmp_path: Path) -> None:
    _write(PosixStore(tmp_path / "run"), [])
    assert not (tmp_path / "run").exists()


def test_records_may_come_while_files_are_written(tmp_path: Path) -> None:
    files = ResultFiles(PosixStore(tmp_path))
    for record in [begin(), *generation(1)]:
        files.record(record)
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            files.flush()

    writer = threading.Thread(target=write)
    writer.start()
    for n in range(1, 5001):
        files.record(report(n, T0 + n, {"n": n}))
    done.set()
    writer.join()
    files.flush(final=True)
    files.close()
    assert [row["n"] for row in _results(tmp_path)] == list(range(1, 5001))
    assert [row["n"] for row in _progress(tmp_path)] == [str(n) for n in range(1, 5001)]
