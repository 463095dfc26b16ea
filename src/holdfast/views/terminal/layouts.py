"""The blocks that the terminal shows: a result, a death, a recovery, the end. Pure text from records.

`terminal` decides when to show which; `box` draws.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from holdfast.core.curve import Row
from holdfast.core.metrics import flatten_metrics
from holdfast.core.records import GenerationEnded, GenerationStarted, WorkerFailure
from holdfast.core.root_cause import root_cause, signature
from holdfast.core.summary import Summary
from holdfast.printable import printable
from holdfast.views.formatting import (
    brief_duration,
    cell,
    count_text,
    local_time,
    place,
    ranks_text,
    running_time,
    trim,
)
from holdfast.views.terminal.box import box

__all__ = ["death", "recovery", "result", "resume_command", "short_traceback", "summary", "summary_line"]

_METRICS_MAX = 40
_TRACEBACK_LINES = 60
_STALL_SHARE = 0.02
"""Of the wall time: more than this gets advice."""


def result(row: Row, began: float, skipped: int, *, fine: bool) -> str:
    """One report: when, and a boxed table of its metrics."""
    head = (
        f"Training finished iteration {row.iteration} at {local_time(row.at)}. "
        f"Total running time: {running_time(row.at - began)}"
    )
    if skipped:
        head += f" (+{count_text(skipped, 'report')} not shown)"
    rows = [("checkpoint_dir_name", row.checkpoint)] if row.checkpoint else []
    rows += [
        ("time_this_iter_s", cell(row.this_s)),
        ("time_total_s", cell(row.total_s)),
        ("training_iteration", str(row.iteration)),
    ]
    flat = sorted(flatten_metrics(row.metrics).items())
    rows += [(trim(printable(key), 40), cell(value)) for key, value in flat[:_METRICS_MAX]]
    if len(flat) > _METRICS_MAX:
        rows.append((f"... {count_text(len(flat) - _METRICS_MAX, 'metric')} more", ""))
    return f"{head}\n{box('Training result', rows, fine=fine, right=True)}"


def death(ended: GenerationEnded, hosts: Mapping[int, str]) -> str:
    """What died and why, in one line; and which other ranks went with it."""
    where = f"at {local_time(ended.detected_at)}, iteration {ended.iteration}"
    if not ended.failures:
        return f"The workers stopped {where}: {ended.why}"
    cause = root_cause(ended.failures)
    text = f"{_rank_and_host(cause, hosts)} {_verb_phrase(cause.cause)}, {where}"
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
    ended: GenerationEnded, started: GenerationStarted, running_at: float, hosts: Mapping[int, str], *, fine: bool
) -> str:
    """The workers run again: what died, what that cost."""
    if ended.failures:
        cause = root_cause(ended.failures)
        what = trim(f"{_rank_and_host(cause, hosts, first='rank')} {_verb_phrase(cause.cause)}", 70)
    else:
        what = trim(printable(ended.why), 70)
    lost = ended.iteration - started.iteration
    if lost <= 0:
        lost_text = "nothing"
    else:
        span = f"{ended.iteration}" if lost == 1 else f"{started.iteration + 1} to {ended.iteration}"
        lost_text = f"{count_text(lost, 'iteration')} ({span})"
    source = f"{started.checkpoint}, iteration {started.iteration}" if started.checkpoint else "the beginning"
    rows = [
        ("what died" if ended.failures else "why", what),
        ("lost", lost_text),
        ("goes on from", source),
        ("workers", f"{started.world_size}, generation {started.generation}"),
        ("took", f"{brief_duration(running_at - ended.detected_at)} from detection until all workers ran"),
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


def resume_command(command: Sequence[str]) -> str | None:
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
    share = run.account.stall_s / run.account.wall_s if run.account.wall_s > 0 else 0.0
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


def _verb_phrase(cause: str) -> str:
    """The cause as the rest of a sentence."""
    text = trim(printable(cause), 300)
    return f"was {text}" if text.startswith("killed") else text
