"""An experiment's journal as sentences for people: which trials there were, who stopped them, and how they ended. What
happened within a trial is `views.narrative`'s, which is given that trial's records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from holdfast.core import records as r
from holdfast.journal.format import Line
from holdfast.printable import printable
from holdfast.views.formatting import count_text, utc_time

__all__ = ["narrate_experiment"]


def narrate_experiment(lines: Iterable[Line], format_time: Callable[[float], str] = utc_time) -> Iterator[str]:
    """One line for each record that is about a trial as a whole. `format_time` gets seconds since 1970."""
    directories: dict[str, str] = {}
    for line in lines:
        record = line.record
        if isinstance(record, r.TrialCreated):
            directories[record.trial] = record.directory
        if text := _sentence(record, directories, directories.get(line.run, line.run)):
            yield f"{format_time(record.at)}  {printable(text)}"


def _sentence(record: r.Record, directories: dict[str, str], run: str) -> str:
    """`run` is the trial's directory, if the record is a trial's own."""
    match record:
        case r.ExperimentStarted(host=host, pid=pid):
            return f"The experiment is taken on by process {pid} on {host}."
        case r.ExperimentEnded(why=why):
            return f"The experiment ends{f': {why}' if why else ''}."
        case r.TrialCreated(directory=directory, donor=None):
            return f"{directory} is created."
        case r.TrialCreated(directory=directory, donor=donor, checkpoint=checkpoint):
            return f"{directory} is created, and goes on from {checkpoint} of {directories.get(donor or '', donor)}."
        case r.TrialStopped(trial=trial, by=by, iteration=iteration, paused=paused):
            done = f"after {count_text(iteration, 'report')}"
            return f"{directories.get(trial, trial)} is {'paused' if paused else 'stopped'} {done} by the {_who(by)}."
        case r.TrialReset(trial=trial, restart=restart):
            return f"{directories.get(trial, trial)} {'starts over' if restart else 'goes on'}."
        case r.TrialCloned(trial=trial, donor=donor, checkpoint=checkpoint):
            source = directories.get(donor, donor)
            return f"{directories.get(trial, trial)} goes on from {checkpoint} of {source}, with another configuration."
        case r.RunFailed(error=error):
            return f"{run} fails: {error}"
        case r.RunInterrupted(why=why):
            return f"{run} is interrupted: {why}."
        case r.RunFinished():
            return f"{run} ends."
        case _:
            return ""


def _who(by: str) -> str:
    return "user" if by == "stop_trial" else by
