"""The result files of several trials, fed with the lines of their experiment."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from holdfast.core import records as r
from holdfast.journal.format import Line
from holdfast.storage.posix.store import PosixStore
from holdfast.tune.trial_files import TrialFiles
from holdfast.views.files.results import ResultFiles

pytestmark = pytest.mark.timeout(30)


def _started(at: float = 1.0) -> r.ControllerStarted:
    return r.ControllerStarted(at=at, epoch=1, host="h", pid=1, workers=1)


def _report(iteration: int, y: float) -> r.Reported:
    return r.Reported(at=2.0, generation=1, iteration=iteration, metrics={"y": y})


def _feed(files: TrialFiles, *lines: tuple[str, r.Record]) -> None:
    for n, (run, record) in enumerate(lines, 1):
        files.record(Line(n, run, 0, record))


def _rows(directory: Path) -> list[Any]:
    return [json.loads(line)["y"] for line in (directory / "result.json").read_text().splitlines()]


def test_each_trial_gets_its_own_rows_when_it_ends(tmp_path: Path) -> None:
    files = TrialFiles()
    for trial in ("t1", "t2"):
        files.expect(trial, ResultFiles(PosixStore(tmp_path / trial)))
    lines: list[tuple[str, r.Record]] = [("t1", _started()), ("t2", _started())]
    lines += [("t2", _report(1, 2.0)), ("t1", _report(1, 1.0)), ("t1", r.RunFinished(at=3.0))]
    _feed(files, *lines)
    assert _rows(tmp_path / "t1") == [1.0]
    assert (tmp_path / "t1" / "progress.csv").read_text().splitlines()[0].split(",")[-1] == "y"
    assert not (tmp_path / "t2" / "result.json").exists()
    assert files.flush()
    assert _rows(tmp_path / "t2") == [2.0]
    files.close()


def test_a_trial_that_is_started_again_before_its_first_end_was_written_uses_the_next_files(tmp_path: Path) -> None:
    files = TrialFiles()
    for place in ("first", "second"):
        files.expect("t1", ResultFiles(PosixStore(tmp_path / place)))
    lines: list[tuple[str, r.Record]] = [("t1", _started()), ("t1", _report(1, 1.0)), ("t1", r.RunFinished(at=3.0))]
    lines += [("t1", _started()), ("t1", _report(1, 2.0))]
    _feed(files, *lines)
    files.close()
    assert _rows(tmp_path / "first") == [1.0]
    assert _rows(tmp_path / "second") == [2.0]


def test_files_that_cannot_be_written_do_not_keep_others_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class _Broken(ResultFiles):
        def flush(self, final: bool = False) -> bool:
            raise ValueError("broken")

    files = TrialFiles()
    files.expect("t1", _Broken(PosixStore(tmp_path / "t1")))
    files.expect("t2", ResultFiles(PosixStore(tmp_path / "t2")))
    with caplog.at_level(logging.ERROR):
        _feed(files, ("t1", _started()), ("t2", _started()), ("t2", _report(1, 2.0)), ("t1", _report(1, 1.0)))
        assert files.flush()
        _feed(files, ("t1", r.RunFinished(at=3.0)), ("t2", r.RunFinished(at=3.0)))
    assert _rows(tmp_path / "t2") == [2.0]
    assert len([one for one in caplog.records if "of trial t1" in one.message]) == 1
