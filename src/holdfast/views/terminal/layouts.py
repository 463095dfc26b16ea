"""The texts that the terminal shows: a report, a death, a recovery, the end. Pure text from records.

`terminal` decides when to show which; `box` draws.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from holdfast.core.curve import Row
from holdfast.core.metrics import flatten_metrics
from holdfast.core.records import CheckpointCommitted, GenerationEnded, GenerationStarted, RunFailed, WorkerFailure
from holdfast.core.root_cause import is_bug, root_cause, signature
from holdfast.core.summary import Summary
from holdfast.printable import printable
from holdfast.views.formatting import (
    brief_duration,
    count_text,
    list_text,
    local_time,
    metric_text,
    place,
    ranks_text,
    trim,
)
from holdfast.views.terminal.box import box

__all__ = [
    "commit_line",
    "death",
    "how_to_continue",
    "recovery",
    "report_line",
    "short_traceback",
    "summary",
    "summary_line",
    "tensorboard_hint",
    "worker_lines",
]

_METRICS_MAX = 12
_HOSTS_MAX = 8
_RANKS_MAX = 16
_VALUE_MAX = 60
"""So wide may a value in the box of a recovery be for 80 columns."""
_TRACEBACK_LINES = 60
_STALL_SHARE = 0.02
"""Of the wall time: more than this gets advice."""
_ADVICE_AFTER_S = 60.0
"""A shorter run says nothing about how its storage keeps up."""


def report_line(row: Row, skipped: int, commit: CheckpointCommitted | None) -> str:
    """One report: the user's metrics, then which it is."""
    flat = list(flatten_metrics(row.metrics).items())
    metrics = [f"{trim(printable(key), 40)}={metric_text(value)}" for key, value in flat[:_METRICS_MAX]]
    if len(flat) > _METRICS_MAX:
        metrics.append(f"and {count_text(len(flat) - _METRICS_MAX, 'metric')} more")
    facts = [f"iteration {row.iteration} at {local_time(row.at)[-8:]}", brief_duration(row.this_s)]
    if commit is not None:
        facts.append(commit.name if commit.iteration == row.iteration else f"{commit.name} of {commit.iteration}")
    if skipped:
        facts.append(f"{count_text(skipped, 'report')} before it not shown")
    return f"{' '.join(metrics)}{'  ' if metrics else ''}({', '.join(facts)})"


def commit_line(commit: CheckpointCommitted) -> str:
    """A commit that came later than the line of its report."""
    return f"{commit.name} of iteration {commit.iteration} is committed"


def worker_lines(hosts: Mapping[int, str], pids: Mapping[int, int]) -> list[str]:
    """Where the workers are: a line for each host."""
    by_host: dict[str, list[int]] = {}
    for rank in sorted(pids):
        by_host.setdefault(hosts.get(rank, ""), []).append(rank)
    lines = []
    for host, ranks in list(by_host.items())[:_HOSTS_MAX]:
        named = [f"rank {rank} (pid {pids[rank]})" for rank in ranks[:_RANKS_MAX]]
        if len(ranks) > _RANKS_MAX:
            named.append(f"{len(ranks) - _RANKS_MAX} more")
        lines.append(f"Started on {host or 'this machine'}: {list_text(named)}")
    if len(by_host) > _HOSTS_MAX:
        lines.append(f"Started on {count_text(len(by_host) - _HOSTS_MAX, 'more host')}")
    return lines


def death(ended: GenerationEnded, hosts: Mapping[int, str]) -> str:
    """What died and why, in one line; and which other ranks went with it."""
    where = f"at {local_time(ended.detected_at)}, iteration {ended.iteration}"
    if not ended.failures:
        return f"The workers stopped {where}: {ended.why}"
    cause = root_cause(ended.failures)
    text = f"{_rank_and_host(cause, hosts)} {_short_cause(cause)}, {where}"
    same = [other.rank for other in ended.failures if other is not cause and signature(other) == signature(cause)]
    others = [other.rank for other in ended.failures if other is not cause and other.rank not in same]
    if same:
        text += f" (same on {ranks_text(same)})"
    if others:
        text += f"; {ranks_text(others)} failed after it"
    return text


def short_traceback(failure: WorkerFailure) -> str:
    """The traceback, or else what was printed last, indented; of a very long one the middle is left out."""
    lines = (failure.traceback or "\n".join(failure.last_lines)).rstrip().splitlines()
    if len(lines) > _TRACEBACK_LINES:
        half = _TRACEBACK_LINES // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} lines ...", *lines[-half:]]
    return "\n".join(f"  {line}" for line in lines)


def recovery(
    ended: GenerationEnded,
    started: GenerationStarted,
    running_at: float,
    reported_at: float | None,
    hosts: Mapping[int, str],
    *,
    fine: bool,
) -> str:
    """Training goes on: what died, and what that cost until the first report (None: the run ended without one)."""
    if ended.failures:
        cause = root_cause(ended.failures)
        what = f"{_rank_and_host(cause, hosts, first='rank')} {_short_cause(cause)}"
    else:
        what = printable(ended.why)
    lost = ended.iteration - started.iteration
    if lost <= 0:
        lost_text = "nothing"
    else:
        span = f"{ended.iteration}" if lost == 1 else f"{started.iteration + 1} to {ended.iteration}"
        lost_text = f"{count_text(lost, 'iteration')} ({span})"
    source = f"{started.checkpoint}, iteration {started.iteration}" if started.checkpoint else "the beginning"
    ran = brief_duration(running_at - ended.detected_at)
    took = f"{ran} until all workers ran"
    if reported_at is not None:
        took = f"{brief_duration(reported_at - ended.detected_at)} until the first report (workers ran after {ran})"
    rows = [
        ("what died" if ended.failures else "why", trim(what, _VALUE_MAX)),
        ("lost", lost_text),
        ("goes on from", source),
        ("workers", f"{started.world_size}, generation {started.generation}"),
        ("took", took),
    ]
    return box("Recovered" if ended.failures else "Workers replaced", rows, fine=fine)


def summary(name: str, uri: str, status: str, run: Summary, *, width: int, fine: bool) -> str:
    """The box at the end. A checkpoint's path that does not fit is named below it, to be copied whole."""
    path = place(uri, run.newest_checkpoint) if run.newest_checkpoint else "none"
    fits = len(path) <= width - 20
    rows = [
        ("status", status),
        ("iterations", str(run.iteration)),
        ("checkpoint", path if fits or run.newest_checkpoint is None else run.newest_checkpoint),
        ("recoveries", _recoveries(run)),
        ("goodput", _goodput(run)),
        ("wall time", brief_duration(run.account.wall_s)),
        ("stall", brief_duration(run.account.stall_s)),
    ]
    text = box(f"Run {printable(name)}", rows, fine=fine)
    if not fits:
        text += f"\nCheckpoint: {path}"
    return text + _stall_advice(run)


def summary_line(name: str, uri: str, status: str, run: Summary) -> str:
    """The same in one line, for those who want quiet."""
    where = f"checkpoint at {place(uri, run.newest_checkpoint)}" if run.newest_checkpoint else "no checkpoint"
    took = brief_duration(run.account.wall_s)
    return (
        f"Run {printable(name)} {status} after {count_text(run.iteration, 'iteration')} in {took}: "
        f"{where}, {count_text(len(run.account.recoveries), 'recovery')}, goodput {_goodput(run)}"
    )


def tensorboard_hint(uri: str) -> str:
    return f"Curves: tensorboard --logdir {shlex.quote(uri)}"


def how_to_continue(newest: str | None, command: Sequence[str], failed: RunFailed | None) -> str:
    """What to do after a run that did not finish. An exception of the function's own would only come again."""
    resume = _resume_command(command)
    if failed is not None and is_bug(failed.failures):
        how = f"run:\n  {resume}\n" if resume else "call fit() with the same name and storage path. "
        source = f"goes on from {newest}" if newest else "starts again from the beginning"
        return f"Fix this, then {how}It {source}."
    how = f"run this again:\n  {resume}" if resume else "call fit() again with the same name and storage path."
    return f"To {f'continue from {newest}' if newest else 'start again from the beginning'}, {how}"


def _resume_command(command: Sequence[str]) -> str | None:
    """What to type to continue; None where the program was not started by a command that can be repeated."""
    bare = len(command) == 1 and not command[0].endswith(".py")
    if not command or bare or any("ipykernel" in word for word in command):
        return None
    return shlex.join(["python", *command] if command[0].endswith(".py") else command)


def _recoveries(run: Summary) -> str:
    recoveries = run.account.recoveries
    took_s = sum(one.elapsed_s for one in recoveries)
    return f"{len(recoveries)} ({brief_duration(took_s)} in all)" if recoveries else "0"


def _stall_advice(run: Summary) -> str:
    """What to do about checkpoints that keep training waiting, where they do."""
    if run.account.wall_s <= _ADVICE_AFTER_S:
        return ""
    share = run.account.stall_s / run.account.wall_s
    if share <= _STALL_SHARE:
        return ""
    return (
        f"\nCheckpoints kept training waiting for {100 * share:.1f} % of the time: report them less often, let "
        "train.should_checkpoint() decide when, or use faster storage."
    )


def _goodput(run: Summary) -> str:
    goodput = run.account.goodput
    return "unknown" if goodput is None else f"{100 * goodput:.1f} %"


def _rank_and_host(failure: WorkerFailure, hosts: Mapping[int, str], first: str = "Rank") -> str:
    host = failure.host or hosts.get(failure.rank, "")
    return f"{first} {failure.rank} on {host}" if host else f"{first} {failure.rank}"


def _short_cause(failure: WorkerFailure) -> str:
    return trim(printable(failure.cause), 300).rstrip(".")
