"""The terminal view: records in, exact text out, on a fake clock."""

from __future__ import annotations

import io
import json
import math

import pytest
from tests.unit.files.shown import T0, begin, commit, generation, report, reports
from tests.unit.terminal.screen import Screen

from holdfast.core import records as r
from holdfast.core.summary import Summary

_HERE = r.AgentAdded(at=T0, agent="a1", host="node-a", slots=2)
_TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in loop\nValueError: bad batch\n'


def _raised(rank: int, traceback: str = _TRACEBACK) -> r.WorkerFailure:
    return r.WorkerFailure(
        rank=rank, cause="raised ValueError: bad batch", error_type="ValueError", error="bad batch", traceback=traceback
    )


def _died(at: float, iteration: int, *failures: r.WorkerFailure, generation: int = 1) -> r.GenerationEnded:
    return r.GenerationEnded(
        at=at,
        generation=generation,
        why="?",
        detected_at=at - 0.1,
        iteration=iteration,
        counted=True,
        failures=failures,
    )


def test_the_start_and_a_report_with_its_checkpoint() -> None:
    screen = Screen()
    assert screen.feed([begin(), _HERE, *generation(1)]) == (
        "Run finetune started at 2023-11-14 22:13:20 with 2 workers in (local)/store/finetune\n"
    )
    metrics = {"loss": 0.0688249, "acc": 1 / 3, "eval": {"f1": 2}}
    assert screen.feed([report(1, T0 + 6.4715449, metrics, checkpoint=True)]) == "", "its name is not known yet"
    assert screen.feed([commit(1, T0 + 7, index=9)], gap_s=0.1) == (
        "\n"
        "Training finished iteration 1 at 2023-11-14 22:13:26. Total running time: 6s\n"
        "╭─────────────────────────────────────────╮\n"
        "│ Training result                         │\n"
        "├─────────────────────────────────────────┤\n"
        "│ checkpoint_dir_name   checkpoint_000009 │\n"
        "│ time_this_iter_s                6.47154 │\n"
        "│ time_total_s                    6.47154 │\n"
        "│ training_iteration                    1 │\n"
        "│ acc                             0.33333 │\n"
        "│ eval/f1                               2 │\n"
        "│ loss                            0.06882 │\n"
        "╰─────────────────────────────────────────╯\n"
        "Training saved a checkpoint for iteration 1 at: (local)/store/finetune/checkpoint_000009\n"
    )


def test_a_resumed_run_says_from_where() -> None:
    prior = Summary()
    for record in [begin(), *generation(1), *reports(1, 7), commit(7, T0 + 8, index=6)]:
        prior.apply(record)
    screen = Screen(prior=prior, uri="s3://bucket/finetune")
    shown = screen.feed([begin(2, T0 + 60), _HERE, *generation(2, 7, T0 + 61, "checkpoint_000006")])
    assert shown == (
        "Run finetune continues at 2023-11-14 22:14:20 with 2 workers in s3://bucket/finetune\n"
        "Restored from checkpoint: s3://bucket/finetune/checkpoint_000006 (iteration 7)\n"
    )
    shown = screen.feed([report(8, T0 + 64, {}, generation=2)])
    assert "Total running time: 4s" in shown
    assert "│ time_total_s         10.0 │" in shown, "training time goes on from the checkpoint"


def test_a_resumed_run_without_a_checkpoint_says_so() -> None:
    shown = Screen().feed([begin(2), *generation(3)])
    assert shown.splitlines()[1] == "There was no checkpoint to restore: training starts from the beginning"


@pytest.mark.parametrize("interactive", [True, False])
def test_fast_reports_are_throttled(interactive: bool) -> None:
    screen = Screen(interactive=interactive)
    screen.feed([begin(), *generation(1)])
    shown = screen.feed((report(n, T0 + n / 128, {"n": n}) for n in range(1, 1001)), gap_s=1 / 128)
    shown += screen.flush(0.0, final=True)
    assert shown.count("Training finished iteration") == 9, "one a second, and the last"
    assert "(+127 reports not shown)" in shown
    assert shown.splitlines()[-2].split() == ["│", "n", "1000", "│"], "the last one is always shown"


@pytest.mark.parametrize(("interactive", "gap_s"), [(False, 1.0), (True, 0.25)])
def test_slow_reports_are_all_shown(interactive: bool, gap_s: float) -> None:
    screen = Screen(interactive=interactive)
    screen.feed([begin(), *generation(1)])
    shown = screen.feed(reports(1, 200), gap_s)
    assert shown.count("Training finished iteration") == 200
    assert "not shown" not in shown


def test_fast_commits_are_throttled() -> None:
    screen = Screen(interactive=False)
    screen.feed([begin(), *generation(1)])
    records: list[r.Record] = []
    for n in range(1, 501):
        records += [report(n, T0 + n / 50, {}, checkpoint=True), commit(n, T0 + n / 50, index=n)]
    shown = screen.feed(records, gap_s=0.01) + screen.flush(0.0, final=True)
    lines = [line for line in shown.splitlines() if line.startswith("Training saved")]
    assert 5 < len(lines) < 15
    assert lines[1].endswith(" not shown)")
    assert lines[-1].startswith(
        "Training saved a checkpoint for iteration 500 at: (local)/store/finetune/checkpoint_000500"
    )


def test_a_result_line_waits_for_its_checkpoint_with_a_limit() -> None:
    screen = Screen()
    screen.feed([begin(), *generation(1), report(1, T0 + 1, {}, checkpoint=True)])
    assert screen.flush(0.5) == ""
    shown = screen.flush(0.6)
    assert "iteration 1 " in shown
    assert "checkpoint_dir_name" not in shown
    assert screen.feed([commit(1, T0 + 9)]) == (
        "Training saved a checkpoint for iteration 1 at: (local)/store/finetune/checkpoint_000000\n"
    )


def test_a_failure_and_the_recovery_are_shown() -> None:
    screen = Screen()
    screen.feed([begin(), _HERE, *generation(1), *reports(1, 9), commit(7, T0 + 8, index=6)])
    killed = r.WorkerFailure(rank=1, cause="killed by SIGKILL", host="node-b", signal=9)
    echo = r.WorkerFailure(
        rank=0,
        cause="raised RuntimeError: Connection closed by peer",
        error_type="RuntimeError",
        error="Connection closed by peer",
    )
    assert screen.feed([_died(T0 + 10, 9, echo, killed)]) == (
        "\nRank 1 on node-b was killed by SIGKILL, at 2023-11-14 22:13:29, iteration 9; rank 0 failed after it\n"
    )
    assert screen.feed(generation(2, 7, T0 + 10, "checkpoint_000006", running_after_s=0.02)) == (
        "╭────────────────────────────────────────────────────────────╮\n"
        "│ Recovered                                                  │\n"
        "├────────────────────────────────────────────────────────────┤\n"
        "│ what died      rank 1 on node-b was killed by SIGKILL      │\n"
        "│ lost           2 iterations (8 to 9)                       │\n"
        "│ goes on from   checkpoint_000006, iteration 7              │\n"
        "│ workers        2, generation 2                             │\n"
        "│ took           0.12 s from detection until all workers ran │\n"
        "╰────────────────────────────────────────────────────────────╯\n"
    )


def test_a_traceback_is_shown_once() -> None:
    screen = Screen()
    screen.feed([begin(), _HERE, *generation(1)])
    assert screen.feed([_died(T0 + 10, 0, _raised(1), _raised(0))]) == (
        "\nRank 1 on node-a raised ValueError: bad batch, at 2023-11-14 22:13:29, iteration 0 (same on rank 0)\n"
        "  Traceback (most recent call last):\n"
        '    File "train.py", line 3, in loop\n'
        "  ValueError: bad batch\n"
    )
    shown = screen.feed([*generation(2, at=T0 + 10), _died(T0 + 20, 0, _raised(0))])
    assert shown.endswith("iteration 0\n  (the same error as above, 2 times now)\n")
    other = _raised(0, _TRACEBACK.replace("line 3", "line 4"))
    shown = screen.feed([*generation(3, at=T0 + 20), _died(T0 + 30, 0, other)])
    assert "line 4" in shown


def test_a_long_traceback_loses_its_middle() -> None:
    traceback = "\n".join(f"line {n}" for n in range(1000))
    screen = Screen()
    shown = screen.feed([begin(), *generation(1), _died(T0 + 10, 0, _raised(0, traceback))])
    assert len(shown.splitlines()) < 70
    assert "  line 0\n" in shown
    assert "  ... 940 lines ...\n" in shown
    assert shown.endswith("  line 999\n")


def test_warnings_are_shown_at_once() -> None:
    screen = Screen()
    screen.feed([begin(), *generation(1)])
    shown = screen.feed(
        [
            r.RanksLagging(at=T0, generation=1, number=12, ranks=(2, 3, 4, 7)),
            r.CheckpointDamaged(at=T0, name="checkpoint_000009", why="model.pt is 10 bytes short"),
            r.AgentRemoved(at=T0, agent="a1", host="node-a", why="its connection closed"),
            r.CheckpointAbandoned(at=T0, generation=1, iteration=9, why="a rank died first"),
        ]
    )
    assert shown == (
        "Warning: a checkpoint waits for ranks 2-4 and 7, which called report() fewer than 12 times\n"
        "WARNING: the checkpoint (local)/store/finetune/checkpoint_000009 is DAMAGED and is no longer used:"
        " model.pt is 10 bytes short\n"
        "Warning: agent a1 on node-a is gone: its connection closed\n"
        "Warning: the checkpoint of iteration 9 was not kept: a rank died first\n"
    )


def test_the_summary_of_a_finished_run() -> None:
    screen = Screen()
    screen.feed([begin(), *generation(1), *reports(1, 9), commit(8, T0 + 9, index=7)])
    screen.feed([_died(T0 + 10, 9, _raised(0)), *generation(2, 8, T0 + 10, "checkpoint_000007", 0.4)])
    screen.feed([report(9, T0 + 20.4, {}, generation=2)])
    stalled = r.Reported(at=T0 + 60.4, generation=2, iteration=10, metrics={}, checkpoint=True, stall_s=0.25)
    screen.feed([stalled, commit(10, T0 + 61, index=9, generation=2)])
    shown = screen.feed([r.RunFinished(at=T0 + 69)])
    assert shown == (
        "\n"
        "Training completed after 10 iterations at 2023-11-14 22:14:29. Total running time: 1min 9s\n"
        "╭───────────────────────────────────────────────────────╮\n"
        "│ Run finetune                                          │\n"
        "├───────────────────────────────────────────────────────┤\n"
        "│ status       finished                                 │\n"
        "│ iterations   10                                       │\n"
        "│ checkpoint   (local)/store/finetune/checkpoint_000009 │\n"
        "│ recoveries   1 (0.50 s in all)                        │\n"
        f"│ goodput      {screen.goodput():<40} │\n"
        "│ wall time    1min 9s                                  │\n"
        "│ stall        0.25 s                                   │\n"
        "╰───────────────────────────────────────────────────────╯\n"
    )


def test_checkpoints_that_keep_training_waiting_get_advice() -> None:
    screen = Screen()
    screen.feed([begin(), *generation(1)])
    stalled = r.Reported(at=T0 + 9, generation=1, iteration=1, metrics={}, checkpoint=True, stall_s=0.3)
    screen.feed([stalled, commit(1, T0 + 9)])
    assert screen.feed([r.RunFinished(at=T0 + 10)]).endswith(
        "╯\nCheckpoints kept training waiting for 3.0 % of the time: report them less often, let "
        "train.should_checkpoint() decide when, or use faster storage.\n"
    )


def test_a_path_too_long_for_the_box_is_named_below_it() -> None:
    uri = "/" + "deep/" * 30 + "run"
    screen = Screen(uri=uri, interactive=True)
    screen.feed([begin(), *generation(1), *reports(1, 1), commit(1, T0 + 2)])
    lines = screen.feed([r.RunFinished(at=T0 + 3)]).splitlines()
    assert lines[-1] == f"Checkpoint: (local){uri}/checkpoint_000000"
    assert any(line.startswith("│ checkpoint   checkpoint_000000 ") for line in lines)


def test_a_stopped_run_says_how_to_go_on() -> None:
    screen = Screen(command=["train.py", "--name", "two words"])
    screen.feed([begin(), *generation(1), *reports(1, 3), commit(3, T0 + 4, index=2)])
    shown = screen.feed([r.RunInterrupted(at=T0 + 5, why="Ctrl+C")])
    assert "Training was stopped after 3 iterations at 2023-11-14 22:13:25 (Ctrl+C). Total running time: 5s\n" in shown
    assert shown.endswith("To continue from checkpoint_000002, run this again:\n  python train.py --name 'two words'\n")


@pytest.mark.parametrize(
    "command", [[""], ["-c"], [], ["/usr/bin/python"], ["python", "-m", "ipykernel_launcher", "-f", "x"]]
)
def test_where_no_command_can_be_repeated_the_call_is_named(command: list[str]) -> None:
    shown = Screen(command=command).feed([begin(), r.RunInterrupted(at=T0 + 5, why="SIGTERM")])
    assert shown.endswith("To continue from the beginning, call fit() again with the same name and storage path.\n")


def test_a_failed_run_says_why_and_how_to_go_on() -> None:
    screen = Screen()
    screen.feed([begin(), *generation(1), *reports(1, 3)])
    shown = screen.feed(
        [_died(T0 + 10, 3, _raised(1)), r.RunFailed(at=T0 + 10, error="rank 1 raised ValueError: bad batch")]
    )
    assert shown.count("Traceback") == 1
    assert "Training failed after 3 iterations" in shown
    assert "│ checkpoint   none" in shown
    assert shown.endswith(
        "Error: rank 1 raised ValueError: bad batch\n"
        "To continue from the beginning, run this again:\n  python train.py --lr 0.1\n"
    )


def test_quiet_leaves_warnings_and_one_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_QUIET", "1")
    screen = Screen()
    shown = screen.feed([begin(), _HERE, *generation(1), *reports(1, 3), commit(3, T0 + 4, index=2)])
    shown += screen.say((0, "hello"))
    shown += screen.feed([_died(T0 + 10, 3, _raised(1)), *generation(2, 3, T0 + 10, "checkpoint_000002", 0.1)])
    shown += screen.flush()
    shown += screen.feed([r.RunFinished(at=T0 + 13)]) + screen.flush(final=True)
    assert shown == (
        "Warning: Rank 1 on node-a raised ValueError: bad batch, at 2023-11-14 22:13:29, iteration 3\n"
        "Run finetune finished after 3 iterations in 13 s: checkpoint at (local)/store/finetune/checkpoint_000002,"
        f" 1 recovery, goodput {screen.goodput()}\n"
    )


def test_json_lines_hold_every_record_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_JSON", "1")
    stdout = io.StringIO()
    screen = Screen(json_stream=stdout)
    records = [begin(), *generation(1), report(1, T0 + 1, {"loss": math.nan}), r.RunFinished(at=T0 + 2)]
    screen.feed(records)
    screen.say((1, "hello"))
    screen.flush(final=True)
    screen.terminal.close()
    assert screen.stream.getvalue() == ""
    told = [json.loads(line) for line in stdout.getvalue().splitlines()]
    kinds = ["ControllerStarted", "GenerationStarted", "GenerationRunning", "Reported", "RunFinished", "WorkerOutput"]
    assert [one["kind"] for one in told] == kinds
    assert told[-1] == {"kind": "WorkerOutput", "generation": 1, "rank": 1, "stream": "stdout", "text": "hello"}


def test_colours_only_for_a_terminal_that_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    died = [begin(), _HERE, *generation(1), _died(T0 + 9, 0, _raised(0))]
    assert "\x1b[31mRank 0 on node-a raised" in Screen(interactive=True).feed(died)
    assert "\x1b" not in Screen(interactive=False).feed(died)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in Screen(interactive=True).feed(died)


def test_unprintable_metrics_do_not_break_the_table() -> None:
    screen = Screen()
    screen.feed([begin(), *generation(1)])
    shown = screen.feed([report(1, T0 + 1, {"note": "a\nb\x1b[2J" + "x" * 100, "名": "漢字", "k" * 99: math.nan})])
    lines = shown.splitlines()[2:]
    assert "\x1b" not in shown
    assert "漢字" in shown
    assert all(len(line) + sum(char in "名漢字" for char in line) == len(lines[0]) for line in lines)
    many = {f"m{n:03}": n for n in range(60)}
    shown = screen.feed([report(2, T0 + 2, many)])
    assert "m039" in shown
    assert "m040" not in shown
    assert "... 20 metrics more" in shown
