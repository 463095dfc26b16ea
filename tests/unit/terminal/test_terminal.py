"""The terminal view: records in, exact text out, on a fake clock."""

from __future__ import annotations

import io
import json
import math
import re

import msgspec
import pytest
from tests.unit.files.shown import T0, begin, commit, generation, report, reports
from tests.unit.terminal.screen import Screen

from holdfast.core import records as r
from holdfast.core.curve import Row
from holdfast.core.summary import Summary
from holdfast.views.terminal.layouts import worker_lines
from holdfast.views.terminal.live_line import LiveLine

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
    screen = Screen(work_dir="/cache/work/finetune-1")
    running = r.GenerationRunning(at=T0, generation=1, pids={0: 671, 1: 672})
    assert screen.feed([begin(), _HERE, generation(1)[0], running]) == (
        "Run finetune started at 2023-11-14 22:13:20 with 2 workers in (local)/store/finetune\n"
        "Workers run in the directory /cache/work/finetune-1\n"
        "Started on node-a: rank 0 (pid 671) and rank 1 (pid 672)\n"
    )
    metrics = {"loss": 0.0688249, "acc": 1 / 3, "eval": {"f1": 2}}
    assert screen.feed([report(1, T0 + 6.4715449, metrics, checkpoint=True)]) == "", "its name is not known yet"
    assert screen.feed([commit(1, T0 + 7, index=9)], gap_s=0.1) == (
        "loss=0.06882 acc=0.3333 eval/f1=2  (iteration 1 at 22:13:26, 6.5 s, checkpoint_000009)\n"
    )


def test_the_start_of_an_elastic_run_names_its_bounds() -> None:
    start = r.ControllerStarted(at=T0, epoch=1, host="h", pid=1, workers=6, workers_min=2)
    assert " with 2 to 6 workers in " in Screen().feed([start])
    prior = Summary()
    prior.apply(start)
    prior.apply(r.BoundsChanged(at=T0 + 1, workers_min=3, workers_max=4, why="holdfast scale"))
    again = r.ControllerStarted(at=T0 + 60, epoch=2, host="h", pid=1, workers=6, workers_min=2)
    assert " with 3 to 4 workers in " in Screen(prior=prior).feed([again])


def test_workers_of_many_hosts_are_named_up_to_a_limit() -> None:
    hosts = {rank: f"node-{rank // 20}" for rank in range(400)}
    lines = worker_lines(hosts, {rank: 1000 + rank for rank in hosts})
    assert len(lines) == 9
    assert lines[0].endswith("rank 15 (pid 1015) and 4 more")
    assert lines[-1] == "Started on 12 more hosts"


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
    assert screen.feed([report(8, T0 + 64, {}, generation=2)]) == "(iteration 8 at 22:14:24, 3.0 s)\n"


def test_a_resumed_run_without_a_checkpoint_says_so() -> None:
    shown = Screen().feed([begin(2), *generation(3)])
    assert shown.splitlines()[1] == "There was no checkpoint to restore: training starts from the beginning"


def test_fast_reports_are_throttled_after_the_first_few() -> None:
    screen = Screen()
    screen.feed([begin(), *generation(1)])
    shown = screen.feed((report(n, T0 + n / 128, {"n": n}) for n in range(1, 1001)), gap_s=1 / 128)
    shown += screen.flush(0.0, final=True)
    lines = shown.splitlines()
    assert [line.split("  ")[0] for line in lines[:20]] == [f"n={n}" for n in range(1, 21)]
    assert len(lines) == 20 + 8, "one a second, and the last"
    assert "127 reports before it not shown" in lines[22]
    assert lines[-1].startswith("n=1000  (iteration 1000 at"), "the last one is always shown"


def test_slow_reports_are_all_shown() -> None:
    screen = Screen()
    screen.feed([begin(), *generation(1)])
    shown = screen.feed(reports(1, 200), 1.0)
    assert shown.count("(iteration ") == 200
    assert "not shown" not in shown


def test_the_newest_of_many_commits_is_shown() -> None:
    screen = Screen()
    screen.feed([begin(), *generation(1)])
    records: list[r.Record] = []
    for n in range(1, 501):
        records += [report(n, T0 + n / 50, {}, checkpoint=True), commit(n, T0 + n / 50, index=n)]
    lines = (screen.feed(records, gap_s=0.01) + screen.flush(0.0, final=True)).splitlines()
    assert 25 < len(lines) < 40
    assert all(re.search(r"\(iteration (\d+) .*, checkpoint_0*\1[,)]", line) for line in lines)


def test_a_report_without_a_checkpoint_names_the_commit_before_it() -> None:
    screen = Screen()
    screen.feed([begin(), *generation(1), *reports(1, 21)], gap_s=0.001)  # more than the first few
    screen.feed([report(22, T0 + 22, {}, checkpoint=True), commit(22, T0 + 22, index=3)], gap_s=0.001)
    shown = screen.feed([report(23, T0 + 23, {})], gap_s=0.001) + screen.flush(2.0)
    assert shown == "(iteration 23 at 22:13:43, 1.0 s, checkpoint_000003 of 22, 2 reports before it not shown)\n"


def test_a_report_waits_for_its_checkpoint_with_a_limit_and_others_behind_it() -> None:
    screen = Screen()
    screen.feed([begin(), *generation(1), report(1, T0 + 1, {}, checkpoint=True)])
    screen.feed([report(2, T0 + 2, {})], gap_s=0.0)
    assert screen.flush(0.5) == ""
    assert screen.flush(0.6) == "(iteration 1 at 22:13:21, 1.0 s)\n(iteration 2 at 22:13:22, 1.0 s)\n"
    assert screen.feed([commit(1, T0 + 9)]) == ""
    assert screen.flush(1.0) == "checkpoint_000000 of iteration 1 is committed\n"


def test_a_terminal_shows_reports_in_one_live_line() -> None:
    screen = Screen(interactive=True, config={"epochs": 30})
    assert screen.feed([begin(), _HERE, *generation(1)]).endswith("\r\x1b[2K2 workers running, 0s\r")
    rows = [report(n, T0 + n / 4, {"epoch": n - 1, "loss": 1 / n, "tag": "a"}) for n in range(1, 11)]
    shown = screen.feed(rows, gap_s=0.25)
    assert "\n" not in shown
    assert _last_drawn(shown) == "loss=0.1 epoch=9 | it 10 | 4 it/s | ETA 5s | 2 workers"
    screen.feed([commit(10, T0 + 3)])
    assert _last_drawn(screen.flush(7.0)) == "loss=0.1 epoch=9 | it 10 | 4 it/s | ETA 0s | 2 workers | saved 7s ago"
    shown = screen.feed([r.RunFinished(at=T0 + 9)], gap_s=0.0)
    assert shown.startswith("\r\x1b[2Kepoch=9 loss=0.1 tag=a  (iteration 10 at"), "the last report stays"
    assert shown.endswith("finetune\n"), "no line is left behind the summary"
    screen.terminal.close()
    assert screen.seen() == ""


def test_a_slow_report_stays_on_the_terminal() -> None:
    screen = Screen(interactive=True)
    screen.feed([begin(), _HERE, *generation(1)])
    shown = screen.feed([report(1, T0 + 60, {"loss": 0.5}), report(2, T0 + 61, {"loss": 0.4})])
    assert "loss=0.5  (iteration 1 at 22:14:20, 1min 0s)\n" in shown
    assert "iteration 2" not in shown
    assert _last_drawn(shown) == "loss=0.4 | it 2 | 1 it/s | 2 workers"


def test_the_live_line_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    screen = Screen(interactive=True)
    screen.feed([begin(), _HERE, *generation(1)])
    shown = screen.feed([report(1, T0 + 1, {"loss": 0.5, "名漢字" * 3: 1, "accuracy": 0.25})])
    assert _last_drawn(shown) == "loss=0.5 | it 1 | 2 workers"
    assert len(_last_drawn(screen.feed([report(2, T0 + 2, {"loss" * 20: 0.5})]))) == 39


@pytest.mark.parametrize(
    ("config", "metrics", "eta"),
    [
        ({"num_epochs": 10}, [{"epoch": 0}, {"epoch": 1}], "ETA 8s"),
        ({"num_epochs": 10}, [{"epoch": 1}, {"epoch": 2}], "ETA 8s"),
        ({"max_steps": 1000}, [{"step": 100}, {"step": 200}], "ETA 8s"),
        ({"epochs": 10}, [{"epoch": 3}, {"epoch": 3}], ""),
        ({"epochs": "ten"}, [{"epoch": 1}, {"epoch": 2}], ""),
        ({}, [{"epoch": 1}, {"epoch": 2}], ""),
    ],
    ids=["from 0", "from 1", "steps", "no change", "no number", "unknown"],
)
def test_the_time_left_is_shown_where_it_can_be_known(
    config: dict[str, object], metrics: list[dict[str, object]], eta: str
) -> None:
    line = LiveLine(config)
    for n, one in enumerate(metrics, 1):
        line.report(Row(n, T0 + n, one, 1.0, n), now=float(n))
    shown = line.text(2.0, 100)
    assert eta in shown if eta else "ETA" not in shown


def _last_drawn(shown: str) -> str:
    return shown.split("\r\x1b[2K")[-1].rstrip("\r")


def test_a_failure_and_the_recovery_are_shown() -> None:
    screen = Screen()
    screen.feed([begin(), _HERE, *generation(1), *reports(1, 9), commit(7, T0 + 8, index=6)])
    killed = r.WorkerFailure(rank=1, cause="was killed by SIGKILL", host="node-b", signal=9)
    echo = r.WorkerFailure(
        rank=0,
        cause="raised RuntimeError: Connection closed by peer",
        error_type="RuntimeError",
        error="Connection closed by peer",
    )
    assert screen.feed([_died(T0 + 10, 9, echo, killed)]) == (
        "checkpoint_000006 of iteration 7 is committed\n"
        "\nRank 1 on node-b was killed by SIGKILL, at 2023-11-14 22:13:29, iteration 9; rank 0 failed after it\n"
    )
    assert screen.feed(generation(2, 7, T0 + 10, "checkpoint_000006", running_after_s=0.02)) == ""
    assert screen.feed([report(8, T0 + 10.4, {}, generation=2)]) == (
        "╭─────────────────────────────────────────────────────────────────────────╮\n"
        "│ Recovered                                                               │\n"
        "├─────────────────────────────────────────────────────────────────────────┤\n"
        "│ what died      rank 1 on node-b was killed by SIGKILL                   │\n"
        "│ lost           2 iterations (8 to 9)                                    │\n"
        "│ goes on from   checkpoint_000006, iteration 7                           │\n"
        "│ workers        2, generation 2                                          │\n"
        "│ took           0.50 s until the first report (workers ran after 0.12 s) │\n"
        "╰─────────────────────────────────────────────────────────────────────────╯\n"
        "(iteration 8 at 22:13:30, 0.38 s)\n"
    )


def test_a_recovery_without_a_report_is_shown_at_the_end() -> None:
    screen = Screen()
    screen.feed([begin(), _HERE, *generation(1), _died(T0 + 10, 0, _raised(0))])
    assert screen.feed(generation(2, 0, T0 + 11, running_after_s=0.0)) == ""
    assert "1.1 s until all workers ran" in screen.feed([r.RunFinished(at=T0 + 12)])


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
            r.DrainStarted(at=T0, agent="a1", host="node-a", why="SIGTERM", deadline=T0 + 25),
            *_lost("a1"),
            r.AgentRefused(at=T0, agent="a3", why="Agent a3 gets no workers of this run."),
            r.AgentAdded(at=T0, agent="a2", host="node-b", slots=1, spare=True),
            r.BoundsChanged(at=T0, workers_min=2, workers_max=6, why="holdfast scale"),
            r.CheckpointAbandoned(at=T0, generation=1, iteration=9, why="a rank died first"),
        ]
    )
    assert shown == (
        "Warning: a checkpoint waits for ranks 2-4 and 7, which called report() fewer than 12 times\n"
        "WARNING: the checkpoint (local)/store/finetune/checkpoint_000009 is NOT USED any more:"
        " model.pt is 10 bytes short\n"
        "Warning: agent a1 on node-a is being drained (SIGTERM), and is gone in 25.0 s\n"
        "Warning: Agent a3 gets no workers of this run.\n"
        "Warning: agent a1 on host-a1 is gone: its connection closed\n"
        "Agent a2 on node-b is kept ready as a spare\n"
        "The run may have 2 to 6 workers from here on: holdfast scale\n"
        "Warning: the checkpoint of iteration 9 was not kept: a rank died first\n"
    )


def _lost(*names: str, why: str = "its connection closed") -> list[r.AgentRemoved]:
    return [r.AgentRemoved(at=T0, agent=name, host=f"host-{name}", why=why) for name in names]


def test_agents_that_are_lost_at_once_are_one_line() -> None:
    screen = Screen()
    screen.feed([begin(), *generation(1)])
    assert screen.feed(_lost("a", "b", "c"), gap_s=0.01) == ""
    assert screen.terminal.next_flush_s is not None
    assert screen.flush() == "Warning: lost 3 agents, a, b and c: its connection closed\n"
    assert screen.flush() == ""
    many = [*_lost(*map(str, range(100))), *_lost("x", why="killed by SIGKILL")]
    screen.feed(many, gap_s=0.0)
    shown = screen.feed([_died(T0 + 10, 3, _raised(0))], gap_s=0.0)
    assert shown.startswith(
        "Warning: lost 101 agents, 0, 1, 2, 3, 4, 5, 6, 7 and 93 more: its connection closed (so 100 of them)\n\nRank 0"
    )


def test_quiet_tells_of_agents_that_fail_a_run_in_the_line_of_the_failure() -> None:
    screen = Screen(quiet=True)
    screen.feed([begin(), *generation(1)])
    cause = r.WorkerFailure(rank=0, cause="was lost with its node (killed by SIGKILL)")
    assert screen.feed([*_lost("a", "b"), _died(T0 + 10, 3, cause)], gap_s=0.01) == ""
    assert screen.flush().count("\n") == 1


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
        "Curves: tensorboard --logdir /store/finetune\n"
    )


@pytest.mark.parametrize(("wall_s", "advised"), [(100.0, True), (50.0, False)])
def test_checkpoints_that_keep_a_long_run_waiting_get_advice(wall_s: float, advised: bool) -> None:
    screen = Screen()
    screen.feed([begin(), *generation(1)])
    stalled = r.Reported(at=T0 + 9, generation=1, iteration=1, metrics={}, checkpoint=True, stall_s=3.0)
    screen.feed([stalled, commit(1, T0 + 9)])
    advice = (
        "╯\nCheckpoints kept training waiting for 3.0 % of the time: report them less often, let "
        "train.should_checkpoint() decide when, or use faster storage.\n"
    )
    assert (advice in screen.feed([r.RunFinished(at=T0 + wall_s)])) == advised


def test_a_path_too_long_for_the_box_is_named_below_it() -> None:
    uri = "/" + "deep/" * 30 + "run"
    screen = Screen(uri=uri, interactive=True)
    screen.feed([begin(), *generation(1), *reports(1, 1), commit(1, T0 + 2)])
    lines = screen.feed([r.RunFinished(at=T0 + 3)]).splitlines()
    assert lines[-2] == f"Checkpoint: (local){uri}/checkpoint_000000"
    assert any(line.startswith("│ checkpoint   checkpoint_000000 ") for line in lines)


def test_a_stopped_run_says_how_to_go_on() -> None:
    screen = Screen(command=["train.py", "--name", "two words"])
    screen.feed([begin(), *generation(1), *reports(1, 3), commit(3, T0 + 4, index=2)])
    stopped = r.GenerationEnded(at=T0 + 5, generation=1, why="Ctrl+C", detected_at=T0 + 5, iteration=3)
    shown = screen.feed([stopped, r.RunInterrupted(at=T0 + 5, why="Ctrl+C")])
    assert "Workers replaced" not in shown
    assert "Training was stopped after 3 iterations at 2023-11-14 22:13:25 (Ctrl+C). Total running time: 5s\n" in shown
    assert shown.endswith("To continue from checkpoint_000002, run this again:\n  python train.py --name 'two words'\n")


@pytest.mark.parametrize(
    "command", [[""], ["-c"], [], ["/usr/bin/python"], ["python", "-m", "ipykernel_launcher", "-f", "x"]]
)
def test_where_no_command_can_be_repeated_the_call_is_named(command: list[str]) -> None:
    shown = Screen(command=command).feed([begin(), r.RunInterrupted(at=T0 + 5, why="SIGTERM")])
    assert shown.endswith("To start again from the beginning, call fit() again with the same name and storage path.\n")


def test_a_bug_is_to_be_fixed_before_the_run_is_continued() -> None:
    screen = Screen()
    screen.feed([begin(), *generation(1), *reports(1, 3)])
    failures = (_raised(1),)
    shown = screen.feed(
        [
            _died(T0 + 10, 3, *failures),
            r.RunFailed(at=T0 + 10, error="rank 1 raised ValueError: bad batch", failures=failures),
        ]
    )
    assert shown.count("Traceback") == 1
    assert "Training failed after 3 iterations" in shown
    assert "│ checkpoint   none" in shown
    assert shown.endswith(
        "Error: rank 1 raised ValueError: bad batch\n"
        "Fix this, then run:\n  python train.py --lr 0.1\nIt starts again from the beginning.\n"
    )


def test_a_run_that_lost_its_workers_can_be_continued_as_it_is() -> None:
    screen = Screen()
    screen.feed([begin(), *generation(1), *reports(1, 3), commit(3, T0 + 4, index=2)])
    killed = r.WorkerFailure(rank=0, cause="was killed by SIGKILL", signal=9)
    shown = screen.feed([r.RunFailed(at=T0 + 10, error="rank 0 was killed by SIGKILL", failures=(killed,))])
    assert shown.endswith("To continue from checkpoint_000002, run this again:\n  python train.py --lr 0.1\n")


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


def test_quiet_tells_once_of_the_failure_that_ends_the_run() -> None:
    screen = Screen(quiet=True)
    failed = r.RunFailed(at=T0 + 10, error="rank 1 raised ValueError: bad batch", failures=(_raised(1),))
    shown = screen.feed([begin(), *generation(1), _died(T0 + 10, 0, _raised(1))])
    assert (shown, screen.terminal.next_flush_s is not None) == ("", True)
    assert "Warning" not in screen.feed([failed])


def test_a_metric_of_checkpoint_score_attribute_that_reports_lack_is_warned_of_once() -> None:
    screen = Screen()
    started = msgspec.structs.replace(begin(), score_attribute="eval/acc")
    screen.feed([started, *generation(1), *reports(1, 3)])
    warning = (
        "Warning: checkpoint_000000 counts as the worst: checkpoint_score_attribute is 'eval/acc', and it has {}\n"
    )
    lacks = msgspec.structs.replace(commit(1, T0 + 4, index=0), metrics={"acc": 1, "loss": 2})
    assert screen.feed([lacks]).startswith(warning.format("acc and loss"))
    assert "worst" not in screen.feed([commit(2, T0 + 5, index=1)]) + screen.flush()
    other = Screen()
    scored = msgspec.structs.replace(commit(1, T0 + 4, index=0), metrics={"eval": {"acc": 1}})
    assert "worst" not in other.feed([started, *generation(1), *reports(1, 1), scored]) + other.flush()


def test_quiet_shows_the_traceback_of_a_failure_that_ends_the_run() -> None:
    screen = Screen(quiet=True)
    failed = r.RunFailed(at=T0 + 10, error="rank 1 raised ValueError: bad batch", failures=(_raised(1),))
    shown = screen.feed([begin(), *generation(1), _died(T0 + 10, 0, _raised(1)), failed])
    assert '    File "train.py", line 3, in loop\n  ValueError: bad batch\n' in shown
    assert shown.count("Traceback") == 1


def test_json_lines_hold_every_record_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_JSON", "1")
    stdout = io.StringIO()
    screen = Screen(stdout=stdout)
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
    assert "\x1b[3" not in Screen(interactive=True).feed(died)
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in Screen(interactive=True).feed(died)


def test_unprintable_and_many_metrics_stay_on_one_line() -> None:
    screen = Screen()
    screen.feed([begin(), *generation(1)])
    shown = screen.feed([report(1, T0 + 1, {"note": "a\nb\x1b[2J" + "x" * 100, "名": "漢字", "k" * 99: math.nan})])
    assert "\x1b" not in shown
    assert "漢字" in shown
    assert shown.count("\n") == 1 and len(shown) < 200
    shown = screen.feed([report(2, T0 + 2, {f"m{n:03}": n for n in range(60)})])
    assert "m011=11 and 48 metrics more" in shown


def test_what_a_run_waits_for_is_shown_at_a_readable_rate() -> None:
    waiting = ["1 of 2 workers: 1 agent being started"]
    screen = Screen()
    screen.terminal.waiting_for = lambda: waiting[0]
    screen.feed([begin()])
    shown = "".join(screen.flush(1.0) for _ in range(100)).splitlines()
    told = [line for line in shown if line.startswith("Waiting for")]
    assert told == [f"Waiting for {waiting[0]} (for {after})" for after in ("5s", "10s", "20s", "40s", "1min 20s")]
    waiting[0] = ""
    assert screen.flush(1000.0) == ""

    live = Screen(interactive=True)
    live.terminal.waiting_for = lambda: "1 of 2 workers: other runs have the places"
    live.feed([begin()])
    assert _last_drawn(live.flush(30.0)) == "waiting for 1 of 2 workers: other runs have the places, 30s"
