"""`holdfast events`: what happened in a run, from its journal. Reads only, so it works while the run goes on."""

from __future__ import annotations

import click
import msgspec

from holdfast.cli.output import json_option, print_json, print_line
from holdfast.cli.uri_args import find_run
from holdfast.control.history import open_journal
from holdfast.errors import NotFound
from holdfast.views.narrative import narrate

__all__ = ["events"]


@click.command(short_help="Show what happened in a run.")
@click.argument("uri", metavar="RUN")
@click.option("--all", "show_all", is_flag=True, help="Show every line, also where many say the same.")
@json_option
def events(uri: str, show_all: bool, as_json: bool) -> None:
    """Show what happened in RUN: who started it, what failed, from where it went on, what was committed.

    Many commits in a row, and generations that fail in the same way, are one line. What the journal holds that
    cannot be read is named at the end. --json prints the journal's records themselves, each with its `kind` and
    `at` (seconds since 1970), and what is damaged.
    """
    store = find_run(uri)
    damage: list[str] = []
    try:
        reader, _ = open_journal(store, damage.append)
    except NotFound:
        raise NotFound(f"{store.uri} is no training run (it has no run.json): check the path.") from None
    records = (line.record for _, line in reader.read())
    if as_json:
        records_json = [msgspec.to_builtins(record) for record in records]
        print_json({"uri": store.uri, "records": records_json, "damage": damage})
        return
    for line in narrate(records, fold=not show_all):
        print_line(line)
    for sentence in damage:
        print_line(f"DAMAGED  {sentence}")
