"""What an experiment prints: a table on a terminal, lines elsewhere, JSON on request."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from tests.unit.tune.experiment_lines import ExperimentLines

from holdfast.core import records as r
from holdfast.errors import ConfigError
from holdfast.tune import CLIReporter, RunConfig
from holdfast.tune.experiment.trial import Trial
from holdfast.tune.objective import Objective
from holdfast.tune.progress import JsonLines, Progress
from holdfast.tune.trial_table import TrialTable, estimate_left_s

LOSS = Objective("loss", "min")


def make_progress(**options: Any) -> tuple[ExperimentLines, io.StringIO]:
    stream = io.StringIO()
    now = iter(range(1000))
    settings: dict[str, Any] = {"quiet": False, "total_trials": 4, "interactive": False, "clock": lambda: next(now)}
    machine = options.pop("machine", None)
    progress = Progress("tuning", "/place", TrialTable(LOSS, total_trials=4), stream=stream, **(settings | options))
    return ExperimentLines(progress, machine=machine), stream


def run_three_trials(lines: ExperimentLines) -> None:
    for number, loss in enumerate((3.0, 0.5, 1.0)):
        lines.create(str(number), lr=0.1 * number, depth=2)
        lines.start(str(number))
        lines.report(str(number), 1, loss=loss)
    lines.finish("0")
    lines.fail("1")


@pytest.mark.parametrize("quiet", [False, True])
def test_elsewhere_than_on_a_terminal_each_trial_that_ends_is_a_line(
    monkeypatch: pytest.MonkeyPatch, quiet: bool
) -> None:
    monkeypatch.delenv("HOLDFAST_QUIET", raising=False)
    lines, stream = make_progress(quiet=quiet)
    run_three_trials(lines)
    lines.end("Ctrl+C")
    last = "1 RUNNING, 1 TERMINATED, 1 ERROR (Ctrl+C); best: name_1, loss 0.5, "
    told = stream.getvalue().splitlines()
    assert told[-1].startswith(f"Experiment tuning: {last}") and told[-1].endswith("Results: (local)/place")
    trials = ["Trial name_0 ended after 1 report, loss 3", "Trial name_1 failed after 1 report, loss 0.5"]
    assert told[:-1] == ([] if quiet else ["Experiment tuning in (local)/place", *trials])


def test_trials_of_a_driver_that_died_are_not_shown_as_running() -> None:
    """One was stopped, which its workers had not heard of; the other goes on when there is room."""
    before = ExperimentLines()
    for trial in ("0", "1"):
        before.create(trial)
        before.start(trial)
    before.add("e", r.TrialStopped, trial="0", iteration=0, by="scheduler")
    lines, stream = make_progress(machine=before.observer._machine)
    lines.end()
    assert "Experiment tuning: 1 PENDING, 1 TERMINATED, " in stream.getvalue()


def test_values_that_cannot_be_compared_are_in_the_table_all_the_same() -> None:
    """What shows the table also calls users' callbacks."""

    class Unlike:
        def __eq__(self, other: object) -> bool:
            raise AttributeError("no such thing")

        __hash__ = None  # type: ignore[assignment]

    table = TrialTable(LOSS)
    trials = [Trial(str(number), {"model": Unlike()}) for number in range(2)]
    for trial in trials:
        table.add(trial)
    assert "model" in table.lines(trials, elapsed_s=1.0)[1]


def test_paused_trials_that_go_on_one_after_the_other_are_counted_once() -> None:
    lines, stream = make_progress()
    for trial in ("0", "1"):
        lines.create(trial)
        lines.start(trial)
        lines.report(trial, 1, loss=1.0)
        lines.add("e", r.TrialStopped, trial=trial, iteration=1, by="x", paused=True)
        lines.finish(trial)
    lines.add("e", r.TrialReset, trial="1", idle=True)
    lines.add("e", r.TrialReset, trial="0")
    lines.end()
    assert "Experiment tuning: 2 PENDING; best: " in stream.getvalue()


def test_on_a_terminal_a_table_is_drawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_QUIET", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    lines, stream = make_progress(interactive=True, resources=lambda running: f"{running} of 2 CPU")
    run_three_trials(lines)
    lines.observer.flush()
    drawn = stream.getvalue().rpartition("\x1b[J")[2].partition("\r")[0].splitlines()
    assert drawn[0].startswith("1 RUNNING, 1 TERMINATED, 1 ERROR of 4 trials, ")
    assert " left, 1 of 2 CPU" in drawn[0]
    assert drawn[1] == "best so far: name_1, loss 0.5 with lr=0.1"
    assert drawn[2].split() == ["trial", "status", "lr", "loss", "iter", "time"]
    assert [row.split()[:4] for row in drawn[3:]] == [
        ["name_2", "RUNNING", "0.2", "1"],
        ["name_0", "TERMINATED", "0", "3"],
        ["*", "name_1", "ERROR", "0.1"],
    ]
    assert "Trial name_1 failed" in stream.getvalue() and "Trial name_0 ended" not in stream.getvalue()
    lines.end()


def test_records_are_printed_as_json() -> None:
    stream = io.StringIO()
    lines = ExperimentLines(JsonLines(stream))
    lines.create("0", x=1)
    lines.start("0")
    lines.end()
    records = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(one["run"], one["kind"]) for one in records] == [
        ("e", "TrialCreated"),
        ("0", "ControllerStarted"),
        ("0", "GenerationStarted"),
        ("e", "ExperimentEnded"),
    ]


def make_trials(count: int) -> list[Trial]:
    return [
        Trial(f"t{n:03d}", {"x": n, "same": 7, "deep": {"y": -n}}, "TERMINATED", {"loss": (n - 3) ** 2, "acc": n})
        for n in range(count)
    ]


def test_the_best_is_among_few_rows_of_many() -> None:
    table, trials = TrialTable(LOSS), make_trials(500)
    for trial in trials:
        table.add(trial)
    text = table.lines(trials, elapsed_s=75, rows_max=10)
    assert text[0] == "500 TERMINATED, 1min 15s" and text[1] == "best so far: t003, loss 0 with x=3 y=-3"
    assert text[2].split() == ["trial", "status", "x", "y", "loss", "iter", "time"]
    assert len(text) == 14 and text[-1] == "and 490 more trials"
    assert [row.split()[0] for row in text[3:-1]] == [*(f"t{n}" for n in range(499, 490, -1)), "*"]
    narrow = table.lines(trials, elapsed_s=1, rows_max=2, width=30)
    assert max(map(len, narrow)) <= 30


def test_a_reporter_chooses_columns_and_rows(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = CLIReporter(
        metric_columns={"acc": "accuracy"}, parameter_columns=["same"], max_progress_rows=2, sort_by_metric=True
    )
    reporter.add_metric_column("loss")
    reporter.setup(metric="loss", mode="min", total_samples=9)
    assert reporter.should_report([]) and not reporter.should_report([]) and reporter.should_report([], done=True)
    reporter.report(make_trials(5), True, "and so on")
    text = capsys.readouterr().out.splitlines()
    assert text[2].split() == ["trial", "status", "same", "accuracy", "loss", "iter", "time"]
    assert [row.split()[:2] for row in text[3:5]] == [["*", "t003"], ["t004", "TERMINATED"]]
    assert text[5:7] == ["and 3 more trials", "and so on"]
    with pytest.raises(ConfigError, match="must be a CLIReporter or another"):
        RunConfig(progress_reporter="table")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be a list of names"):
        CLIReporter(metric_columns="loss")


def test_the_time_left_is_known_where_the_number_of_trials_is() -> None:
    assert estimate_left_s(5, 20, 10.0) == 30.0
    assert estimate_left_s(0, 20, 10.0) is None and estimate_left_s(5, None, 10.0) is None
