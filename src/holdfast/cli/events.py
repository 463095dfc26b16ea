"""`holdfast events`: what happened in a run, from its journal. Reads only, so it works while the run goes on."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from holdfast.cli.named_run import find_named_run
from holdfast.cli.output import json_option, print_json, print_line
from holdfast.control.history import RUN_FILE, run_id
from holdfast.control.lease import read_cuts
from holdfast.journal.format import Line
from holdfast.journal.reader import JournalReader
from holdfast.views.narrative import narrate

__all__ = ["events"]


@click.command(short_help="Show what happened in a run.")
@click.argument("uri", metavar="RUN")
@click.option("--all", "show_all", is_flag=True, help="Show every line, also where many say the same.")
@json_option
def events(uri: str, show_all: bool, as_json: bool) -> None:
    """Show what happened in RUN: who started it, what failed, from where it went on, what was committed.

    RUN may be a tuning experiment, whose trials are told of as wholes, or the directory of one of its trials.

    Many commits in a row, and generations that fail in the same way, are one line. What the journal holds that
    cannot be read is named at the end. --json prints the journal's records themselves, each with its `kind` and
    `at` (seconds since 1970), and what is damaged.
    """
    named, damage = find_named_run(uri), list[str]()
    journal_of = named.experiment or named.store
    run = "" if named.is_experiment else named.trial or run_id(journal_of.get(RUN_FILE))
    reader = JournalReader(journal_of, read_cuts(journal_of), run, damage.append, shared=bool(named.trial))
    lines = (line for _, line in reader.read())
    if as_json:
        records = [_as_json(line, named.is_experiment) for line in lines]
        print_json({"uri": named.store.uri, "records": records, "damage": damage})
        return
    if named.is_experiment:
        from holdfast.tune.experiment_narrative import narrate_experiment

        told = narrate_experiment(lines)
    else:
        told = narrate((line.record for line in lines), fold=not show_all)
    for text in told:
        print_line(text)
    for sentence in damage:
        print_line(f"DAMAGED  {sentence}")


def _as_json(line: Line, with_run: bool) -> dict[str, Any]:
    record: dict[str, Any] = msgspec.to_builtins(line.record)
    return {"run": line.run, **record} if with_run else record
