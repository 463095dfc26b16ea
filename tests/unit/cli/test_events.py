"""`holdfast events`: the journal as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.control.history import RUN_FILE
from holdfast.core import records as r
from holdfast.journal.writer import Journal
from holdfast.storage.locate import open_store
from holdfast.views.narrative import narrate

RECORDS: tuple[r.Record, ...] = (
    r.ControllerStarted(at=1_000_000_000.0, epoch=1, host="here", pid=7, workers=1),
    r.GenerationStarted(at=1_000_000_001.0, generation=1, world_size=1, agents=("a",), iteration=0),
    r.GenerationRunning(at=1_000_000_002.0, generation=1),
    r.Reported(at=1_000_000_003.0, generation=1, iteration=1, metrics={"loss": float("nan")}),
    r.RunFinished(at=1_000_000_004.0),
)


@pytest.fixture
def run(tmp_path: Path) -> str:
    store = open_store(tmp_path / "run")
    store.put(RUN_FILE, b"{}")
    journal = Journal(store, 1, "0123456789abcdef")
    journal.append(RECORDS)
    journal.flush()
    journal.close()
    return str(tmp_path / "run")


def test_events_prints_one_line_per_event(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", run]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told == list(narrate(RECORDS))
    assert told


def test_events_json_prints_the_records(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", run, "--json"]) == 0
    shape = json.loads(capsys.readouterr().out)
    assert shape["uri"] == run
    assert [one["kind"] for one in shape["records"]] == [type(record).__name__ for record in RECORDS]
    assert shape["records"][3]["metrics"] == {"loss": {"$float": "nan"}}


def test_events_of_a_directory_without_a_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", str(tmp_path)]) == 3
    assert "is no training run" in capsys.readouterr().err


def test_events_shows_damage_and_the_remaining_records(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    (segment,) = Path(run, "journal").iterdir()
    text = segment.read_bytes()
    assert text.count(b'"iteration":1') == 1
    segment.write_bytes(text.replace(b'"iteration":1', b'"iteration":3'))
    segment.with_name("notes.txt").write_text("mine")
    assert main(["events", run]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[:-3] == list(narrate(record for record in RECORDS if not isinstance(record, r.Reported)))
    assert told[-3:] == [
        "DAMAGED  journal/notes.txt is no segment of this journal, and is left out.",
        f"DAMAGED  journal/{segment.name}: record 4 of controller 1 cannot be read, and the rest goes on without.",
        f"DAMAGED  journal/{segment.name}: 1 line is damaged and left out.",
    ]
    assert main(["events", run, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["damage"]) == 3
