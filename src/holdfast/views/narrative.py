"""A run told for people from its journal: who died and why, what it cost, what was decided, how it ended.

One line a record that matters; reports are told in passing, as how far training had come. Costs are
`accounting`'s. Nothing is read but records, so the story of a run that goes on is the same, only shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from holdfast.core import records as r
from holdfast.core.accounting import Accountant
from holdfast.core.root_cause import root_cause

__all__ = ["Teller", "clock_utc", "size_text", "tell"]


def tell(records: Iterable[r.Record], when: Callable[[float], str] | None = None) -> Iterator[str]:
    """The story, line by line. `when` turns seconds since 1970 into text; UTC otherwise."""
    teller = Teller(when)
    for record in records:
        yield from teller.take(record)


def clock_utc(at: float) -> str:
    """Seconds since 1970 as `2026-11-15 20:06:26`."""
    days, second = divmod(int(at // 1), 86_400)
    # Days are counted from the first of March of the year 0, so that the leap day comes last.
    era, day_of_era = divmod(days + 719_468, 146_097)
    year_of_era = (day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * shifted + 2) // 5 + 1
    month = shifted + 3 if shifted < 10 else shifted - 9
    year = year_of_era + era * 400 + (1 if month <= 2 else 0)
    return f"{year:04d}-{month:02d}-{day:02d} {second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"


def size_text(size_bytes: int) -> str:
    """Bytes as a person says them."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


class Teller:
    """Tells a run record by record."""

    def __init__(self, when: Callable[[float], str] | None = None) -> None:
        self._when = when or clock_utc
        self._accounts = Accountant()
        self._iteration = 0
        self._last_at = 0.0
        self._failures = 0
        self._controllers = 0
        self._since: tuple[float, str] = (0.0, "")
        """What the next workers are waited for since, and in what words."""
        self._ended_at: float | None = None
        self._outcome: r.Record | None = None

    def take(self, record: r.Record) -> list[str]:
        """The lines that this record is worth."""
        sentence = self._sentence(record)
        self._accounts.take(record)
        self._last_at = max(self._last_at, record.at)
        if isinstance(record, r.Reported):
            self._iteration = record.iteration
        elif isinstance(record, r.RunRestarted):
            self._iteration = 0
        if isinstance(record, r.RunFinished):
            sentence = f"{sentence} {self._balance()}"
        return [f"{self._when(record.at)}  {sentence}"] if sentence else []

    def _sentence(self, record: r.Record) -> str:
        match record:
            case r.Reported():
                return ""
            case r.ControllerStarted():
                return self._controller(record)
            case r.RunRestarted():
                return (
                    f"Training was asked to start over: checkpoints up to index {record.first_index - 1} are kept and "
                    "not resumed from."
                )
            case r.AgentHere():
                return f"Agent {record.agent} joined from {record.host} with {_count(record.slots, 'slot')}."
            case r.AgentGone():
                return f"Agent {record.agent} on {record.host} was lost: {record.why}."
            case r.GenerationStarted():
                return self._generation(record)
            case r.GenerationRunning():
                since, words = self._since
                return f"Generation {record.generation} runs, {_seconds(record.at - since)} after {words}."
            case r.GenerationEnded():
                return self._end(record)
            case r.RunFinished() | r.RunFailed() | r.RunInterrupted():
                self._outcome = record
                return self._last_words(record)
            case _:
                return _checkpoint(record)

    def _controller(self, record: r.ControllerStarted) -> str:
        self._controllers += 1
        self._since = (record.at, "the controller started")
        self._ended_at = None
        who = f"on {record.host} (process {record.pid})"
        if self._controllers == 1:
            return f"The run began {who}, to train on {_count(record.workers, 'worker')}."
        gap = _seconds(record.at - self._last_at)
        before, self._outcome = self._outcome, None
        differs = f" What differs: {'; '.join(record.changes)}." if record.changes else ""
        if isinstance(before, r.RunFailed):
            self._failures = 0
            return f"The run was started again {who} {gap} after it had failed; failures are counted anew.{differs}"
        if isinstance(before, r.RunFinished):
            return f"The run was complete, and was called again {who} after {gap}.{differs}"
        if before is not None:
            return f"The run was continued {who} {gap} after it had ended.{differs}"
        return f"A new controller {who} took the run on, {gap} after the last word of the one before.{differs}"

    def _generation(self, record: r.GenerationStarted) -> str:
        source = "from the beginning"
        if record.checkpoint is not None:
            source = f"from {record.checkpoint} at iteration {record.iteration}"
        text = f"Generation {record.generation} starts {source}"
        if self._ended_at is not None and record.at - self._ended_at >= 0.05:
            text += f" after a wait of {_seconds(record.at - self._ended_at)}"
        text += f": {_count(record.world_size, 'worker')} on {_list(record.agents)}."
        lost = self._iteration - record.iteration
        self._iteration, self._ended_at = record.iteration, None
        if lost > 0:
            first, last = record.iteration + 1, record.iteration + lost
            again = f"Iteration {first} is" if lost == 1 else f"Iterations {first} to {last} are"
            text += f" {again} done again."
        return text

    def _end(self, record: r.GenerationEnded) -> str:
        text = f"Generation {record.generation}"
        if not record.counted and not record.failures:
            return f"{text} was stopped at iteration {record.iteration}: {record.why}."
        self._failures += record.counted
        verdict = f"This is failure {self._failures}." if record.counted else "This does not count as a failure."
        self._since = (record.detected_at, "the failure was noticed")
        self._ended_at = record.at
        text += f" failed at iteration {record.iteration}: "
        if not record.failures:
            return f"{text}{record.why}. {verdict}"
        cause = root_cause(record.failures)
        where = f" on {cause.host}" if cause.host else ""
        text += f"rank {cause.rank}{where} {cause.cause}."
        others = sorted(one.rank for one in record.failures if one is not cause)
        if others:
            text += f" {_ranks(others).capitalize()} failed with it."
        return f"{text} {verdict}"

    def _last_words(self, record: r.RunFinished | r.RunFailed | r.RunInterrupted) -> str:
        if isinstance(record, r.RunFinished):
            return f"The run finished after {_count(self._iteration, 'iteration')}."
        if isinstance(record, r.RunFailed):
            return f"The run failed after {_count(self._iteration, 'iteration')}: {record.error.rstrip('.')}."
        return f"The run was interrupted at iteration {self._iteration} ({record.why}); the same call continues it."

    def _balance(self) -> str:
        found = self._accounts.account
        text = f"Of {_seconds(found.wall_s)}, {found.goodput or 0:.0%} went into training that was kept"
        if found.lost_iterations:
            lost = _count(found.lost_iterations, "iteration")
            text += f"; {lost} ({_seconds(found.training_lost_s)}) had to be done again"
        if found.recoveries:
            slowest = max(one.elapsed_s for one in found.recoveries)
            count = len(found.recoveries)
            text += f"; {count} {'recovery' if count == 1 else 'recoveries'}, the slowest {_seconds(slowest)}"
        return f"{text}."


def _checkpoint(record: r.Record) -> str:
    match record:
        case r.CheckpointCommitted():
            size = f" ({size_text(record.size_bytes)} in {_seconds(record.elapsed_s)})" if record.elapsed_s else ""
            return f"{record.name} of iteration {record.iteration} was committed{size}."
        case r.CheckpointAbandoned():
            return f"The checkpoint of iteration {record.iteration} was given up: {record.why.rstrip('.')}."
        case r.CheckpointDamaged():
            return f"{record.name} is not used any more: {record.why.rstrip('.')}."
        case r.CheckpointDeleted():
            return f"{record.name} was let go, {_reason(record.why)}."
        case r.RemovalFailed():
            return f"{record.name} could not be let go, and is tried again later: {record.why.rstrip('.')}."
        case r.RanksLagging():
            return f"A checkpoint waits for {_ranks(record.ranks)}, still short of report {record.number}."
        case _:
            return ""


def _reason(why: str) -> str:
    return f"since {why}" if why else "as the retention rule says"


def _seconds(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_list([str(rank) for rank in ranks])}"
