"""A run's journal as sentences for people: who died and why, what it cost, what was decided, how it ended.

One line for each record that matters, and one for many that say the same; reports are not listed, but other lines name
the iteration. What counts and what it cost is `core.summary`'s. Nothing is read but records, so the lines of a run that
goes on are the same, only fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from holdfast.core import records as r
from holdfast.core.checkpoint_types import ValidationStatus
from holdfast.core.root_cause import root_cause, signature
from holdfast.core.summary import Summary
from holdfast.views.formatting import (
    bounds_text,
    count_text,
    drain_text,
    duration_text,
    list_text,
    losses_text,
    ranks_text,
    size_text,
    utc_time,
)

__all__ = ["Narrator", "narrate"]

_AT_ONCE_S = 1.0
"""Agents that are lost within this time are told of in one line."""
_FOLD_LINES = 4
"""So many lines about commits in a row are shown one by one."""


def narrate(
    records: Iterable[r.Record], format_time: Callable[[float], str] = utc_time, *, fold: bool = True
) -> Iterator[str]:
    """The lines of a journal. `format_time` gets seconds since 1970; `fold` makes one line of what repeats."""
    narrator = Narrator(format_time)
    if not fold:
        yield from filter(None, map(narrator.line, records))
        return
    commits, failures, losses, told = _Commits(format_time), _Failures(format_time), _Losses(format_time), set[object]()
    for record in records:
        line = narrator.line(record)
        if not line or _was_told(record, told):
            continue
        if not losses.goes_on(record):
            yield from losses.flush()
        if isinstance(record, r.AgentRemoved):
            yield from failures.flush()
            yield from commits.flush()
            losses.add(record, line)
            failures.begin(record)
            continue
        if failures.add(record, line):
            continue
        yield from failures.flush()
        if _is_routine(record):
            commits.add(record, line)
            continue
        yield from commits.flush()
        yield line
        failures.begin(record)
    yield from losses.flush()
    yield from failures.flush()
    yield from commits.flush()


def _was_told(record: r.Record, told: set[object]) -> bool:
    """Whether it says what a line has said already: the same ranks lag, the same checkpoint cannot be removed."""
    match record:
        case r.RanksLagging():
            key: object = (record.generation, record.ranks)
        case r.RemovalFailed():
            key = (record.name, record.why)
        case _:
            return False
    if key in told:
        return True
    told.add(key)
    return False


class _Losses:
    """Agents that were lost one after the other, at about the same time."""

    def __init__(self, format_time: Callable[[float], str]) -> None:
        self._format_time = format_time
        self._lost: list[r.AgentRemoved] = []
        self._line = ""
        """Of the first."""

    def goes_on(self, record: r.Record) -> bool:
        """Whether it may be told in one line with what was added."""
        return isinstance(record, r.AgentRemoved) and bool(self._lost) and record.at <= self._lost[0].at + _AT_ONCE_S

    def add(self, record: r.AgentRemoved, line: str) -> None:
        self._line = self._line or line
        self._lost.append(record)

    def flush(self) -> list[str]:
        lost, line = self._lost, self._line
        self._lost, self._line = [], ""
        if len(lost) > 1:
            text = losses_text([one.agent for one in lost], [one.why for one in lost])
            line = f"{self._format_time(lost[0].at)}  The run lost {text}."
        return [line] if line else []


class _Failures:
    """Generations that fail one after the other, at the same iteration and for the same reason as the one before."""

    def __init__(self, format_time: Callable[[float], str]) -> None:
        self._format_time = format_time
        self._key: tuple[int, str] | None = None
        self._lines: list[str] = []
        self._failed: list[r.GenerationEnded] = []
        self._failed_lines = 0
        """How many of the lines are about generations that have failed."""

    def begin(self, record: r.Record) -> None:
        """The line of this record was shown."""
        self._key = _failure_key(record) if isinstance(record, r.GenerationEnded) else None

    def add(self, record: r.Record, line: str) -> bool:
        """Keep the line if it may be a part of a repetition."""
        if self._key is None or not isinstance(record, r.GenerationStarted | r.GenerationRunning | r.GenerationEnded):
            return False
        if isinstance(record, r.GenerationEnded):
            if _failure_key(record) != self._key:
                return False
            self._failed.append(record)
            self._failed_lines = len(self._lines) + 1
        self._lines.append(line)
        return True

    def flush(self) -> list[str]:
        """The lines; of several generations that failed only one, and those of the generation after them."""
        lines, failed = self._lines, self._failed
        if len(failed) > 1:
            span = f"{failed[0].generation} to {failed[-1].generation}"
            at = self._format_time(failed[-1].at)
            lines = [f"{at}  Generations {span} failed in the same way.", *lines[self._failed_lines :]]
        self._key, self._lines, self._failed, self._failed_lines = None, [], [], 0
        return lines


def _failure_key(record: r.GenerationEnded) -> tuple[int, str] | None:
    """What two failures have in common that are told as one."""
    return (record.iteration, signature(root_cause(record.failures))) if record.counted and record.failures else None


class _Commits:
    """Commits, and the deletions by the retention rule between them, with nothing else in between."""

    def __init__(self, format_time: Callable[[float], str]) -> None:
        self._format_time = format_time
        self._lines: list[str] = []
        self._at = 0.0
        self._last: r.CheckpointCommitted | None = None
        self._committed = self._deleted = 0
        """How many there were after the first line."""

    def add(self, record: r.Record, line: str) -> None:
        if self._lines:
            self._committed += isinstance(record, r.CheckpointCommitted)
            self._deleted += isinstance(record, r.CheckpointDeleted)
        if len(self._lines) <= _FOLD_LINES:
            self._lines.append(line)
        self._at = record.at
        if isinstance(record, r.CheckpointCommitted):
            self._last = record

    def flush(self) -> list[str]:
        """The lines: all of them where they are few, the first and a count otherwise."""
        lines, last, deleted = self._lines, self._last, self._deleted
        if len(lines) > _FOLD_LINES:
            parts = []
            if self._committed and last is not None:
                more = count_text(self._committed, "more checkpoint")
                verb = "was" if self._committed == 1 else "were"
                parts.append(f"{more} {verb} committed, the last {last.name} of iteration {last.iteration}")
            if deleted:
                parts.append(f"{deleted} {'was' if deleted == 1 else 'were'} let go, as the retention rule says")
            lines = [lines[0], f"{self._format_time(self._at)}  {'; '.join(parts)}."]
        self._lines, self._last, self._committed, self._deleted = [], None, 0, 0
        return lines


class Narrator:
    """Fed with every record in order."""

    def __init__(self, format_time: Callable[[float], str] = utc_time) -> None:
        self._format_time = format_time
        self._run = Summary()
        self._last_at = 0.0
        self._waiting_since: tuple[float, str] = (0.0, "")
        """When the wait for the next workers began, and with what."""
        self._ended_at: float | None = None

    def line(self, record: r.Record) -> str:
        """The line for this record; "" where it is not worth one."""
        sentence = self._sentence(record)
        self._last_at = max(self._last_at, record.at)
        return f"{self._format_time(record.at)}  {sentence}" if sentence else ""

    def _sentence(self, record: r.Record) -> str:
        """Applies the record as well: some sentences are about what was before it."""
        if isinstance(record, r.ControllerStarted):
            sentence = self._controller(record)
            self._run.apply(record)
            return sentence
        change = self._run.apply(record)
        match record:
            case r.Reported():
                return ""
            case r.RunRestarted():
                return (
                    f"Training was asked to start over: checkpoints up to index {record.first_index - 1} are kept and "
                    "not resumed from."
                )
            case r.AgentAdded():
                spare = " as a spare" if record.spare else ""
                return f"Agent {record.agent} joined from {record.host} with {count_text(record.slots, 'slot')}{spare}."
            case r.AgentRemoved():
                return f"Agent {record.agent} on {record.host} was lost: {record.why}."
            case r.AgentRefused():
                return record.why
            case r.BoundsChanged():
                bounds = bounds_text(record.workers_min, record.workers_max)
                return f"The run may have {bounds} from here on: {record.why}."
            case r.DrainStarted():
                left_s = None if record.deadline is None else record.deadline - record.at
                return f"A{drain_text(record.agent, record.host, record.why, left_s)[1:]}."
            case r.ChangePlanned():
                return f"Generation {record.generation} is to end at its next checkpoint, on purpose: {record.why}."
            case r.GenerationStarted():
                return self._generation(record, change.lost_iterations)
            case r.GenerationRunning():
                since, event = self._waiting_since
                return f"Generation {record.generation} runs, {duration_text(record.at - since)} after {event}."
            case r.GenerationEnded():
                return self._generation_end(record)
            case r.RunFinished() | r.RunFailed() | r.RunInterrupted():
                return self._run_end(record)
            case _:
                return _checkpoint(record)

    def _controller(self, record: r.ControllerStarted) -> str:
        self._waiting_since = (record.at, "the controller started")
        self._ended_at = None
        who = f"on {record.host} (process {record.pid})"
        if self._run.started is None:
            return (
                f"The run began {who}, to train on {bounds_text(record.workers_min or record.workers, record.workers)}."
            )
        gap = duration_text(record.at - self._last_at)
        differs = f" What differs: {'; '.join(record.changes)}." if record.changes else ""
        match self._run.durable.outcome:
            case r.RunFailed():
                return f"The run was started again {who} {gap} after it had failed; failures are counted anew.{differs}"
            case r.RunFinished():
                return f"The run was complete, and was called again {who} after {gap}.{differs}"
            case r.RunInterrupted():
                return f"The run was continued {who} {gap} after it had ended.{differs}"
        return f"A new controller {who} took the run on, {gap} after the last word of the one before.{differs}"

    def _generation(self, record: r.GenerationStarted, lost: int) -> str:
        source = "from the beginning"
        if record.checkpoint is not None:
            source = f"from {record.checkpoint} at iteration {record.iteration}"
        text = f"Generation {record.generation} starts {source}"
        if self._ended_at is not None and record.at - self._ended_at >= 0.05:
            text += f" after a wait of {duration_text(record.at - self._ended_at)}"
        text += f": {count_text(record.world_size, 'worker')} on {list_text(record.agents)}."
        self._ended_at = None
        if lost > 0:
            first, last = record.iteration + 1, record.iteration + lost
            again = f"Iteration {first} is" if lost == 1 else f"Iterations {first} to {last} are"
            text += f" {again} done again."
        return text

    def _generation_end(self, record: r.GenerationEnded) -> str:
        text = f"Generation {record.generation}"
        if record.planned:
            self._waiting_since, self._ended_at = (record.detected_at, "the one before was stopped"), record.at
        if not record.counted and not record.failures:
            return f"{text} was stopped at iteration {record.iteration}: {record.why}."
        failures = self._run.durable.failures
        verdict = f"This is failure {failures}." if record.counted else "This does not count as a failure."
        if record.preemption is not None:
            verdict = f"This is preemption {self._run.durable.preemptions}."
        self._waiting_since = (record.detected_at, "the failure was noticed")
        self._ended_at = record.at
        text += f" failed at iteration {record.iteration}: "
        if not record.failures:
            return f"{text}{record.why}. {verdict}"
        cause = root_cause(record.failures)
        where = f" on {cause.host}" if cause.host else ""
        text += f"rank {cause.rank}{where} {cause.cause}."
        others = [one.rank for one in record.failures if one is not cause]
        if others:
            text += f" {ranks_text(others).capitalize()} failed with it."
        return f"{text} {verdict}"

    def _run_end(self, record: r.RunFinished | r.RunFailed | r.RunInterrupted) -> str:
        iterations = count_text(self._run.iteration, "iteration")
        match record:
            case r.RunFinished():
                return f"The run finished after {iterations}. {self._balance()}"
            case r.RunFailed():
                return f"The run failed after {iterations}: {record.error.rstrip('.')}."
        return f"The run was interrupted at iteration {self._run.iteration} ({record.why}); the same call continues it."

    def _balance(self) -> str:
        account = self._run.account
        text = f"Of {duration_text(account.wall_s)}, {account.goodput or 0:.0%} went into training that was kept"
        if account.lost_iterations:
            lost = count_text(account.lost_iterations, "iteration")
            text += f"; {lost} ({duration_text(account.training_lost_s)}) had to be done again"
        if account.recoveries:
            slowest_s = max(one.elapsed_s for one in account.recoveries)
            text += f"; {count_text(len(account.recoveries), 'recovery')}, the slowest {duration_text(slowest_s)}"
        return f"{text}."


def _checkpoint(record: r.Record) -> str:
    match record:
        case r.CheckpointCommitted():
            size = f" ({size_text(record.size_bytes)} in {duration_text(record.elapsed_s)})" if record.elapsed_s else ""
            return f"{record.name} of iteration {record.iteration} was committed{size}."
        case r.CheckpointAbandoned():
            return f"The checkpoint of iteration {record.iteration} was given up: {record.why.rstrip('.')}."
        case r.CheckpointDamaged():
            return f"{record.name} is not used any more: {record.why.rstrip('.')}."
        case r.CheckpointDeleted():
            return f"{record.name} was let go, {_reason(record.why)}."
        case r.CheckpointValidated(status=ValidationStatus.VALIDATED):
            return f"{record.name} was validated."
        case r.CheckpointValidated():
            return f"The validation of {record.name} failed: {record.error.rstrip('.')}."
        case r.RemovalFailed():
            return f"{record.name} could not be let go, and is tried again later: {record.why.rstrip('.')}."
        case r.RanksLagging():
            return f"A checkpoint waits for {ranks_text(record.ranks)}, still short of report {record.number}."
        case _:
            return ""


def _is_routine(record: r.Record) -> bool:
    return isinstance(record, r.CheckpointCommitted) or (isinstance(record, r.CheckpointDeleted) and not record.why)


def _reason(why: str) -> str:
    return f"since {why}" if why else "as the retention rule says"
