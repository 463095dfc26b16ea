"""Result files, terminal, narrative and summary show the same reports, whatever failed and was rolled back."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from tests.unit.control.histories import history
from tests.unit.terminal.screen import Screen

from holdfast.core import records as r
from holdfast.core.curve import effective_reports
from holdfast.core.summary import summarize
from holdfast.storage.posix.store import PosixStore
from holdfast.views.files.results import ResultFiles
from holdfast.views.narrative import narrate


@pytest.mark.parametrize("seed", range(12))
def test_all_views_show_the_reports_that_count(tmp_path: Path, seed: int) -> None:
    (records,) = history(seed, controllers=1, reports=60)
    records = [record for record in records if not isinstance(record, r.RunFailed | r.RunInterrupted)]
    reports = effective_reports(records)
    summary = summarize(records)
    assert (summary.curve.last.rows, summary.iteration) == (len(reports), reports[-1].iteration if reports else 0)

    files = ResultFiles(PosixStore(tmp_path))
    for n, record in enumerate(records):
        files.record(record)
        if n % 7 == seed % 7:
            files.flush()
    files.flush(final=True)
    files.close()
    rows = [json.loads(line) for line in (tmp_path / "result.json").read_text().splitlines()]
    expected = [(one.iteration, one.metrics) for one in reports]
    assert [(row["training_iteration"], {key: row[key] for key in ("loss", "n", "g")}) for row in rows] == expected
    table = list(csv.DictReader((tmp_path / "progress.csv").read_text().splitlines()))
    assert [int(row["training_iteration"]) for row in table] == [one.iteration for one in reports]

    end = r.RunFinished(at=records[-1].at + 1)
    account = summarize([*records, end]).account
    shown = Screen().feed([*records, end])
    assert f"│ iterations   {summary.iteration} " in shown
    assert f"│ goodput      {100 * (account.goodput or 0.0):.1f} %" in shown
    *_, last = narrate([*records, end])
    assert f"The run finished after {summary.iteration} iteration" in last
    lost = re.search(r"(\d+) iterations? \(.*\) had to be done again", last)
    assert (int(lost[1]) if lost else 0) == account.lost_iterations
