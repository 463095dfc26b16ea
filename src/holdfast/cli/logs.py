"""`holdfast logs`: what the workers of a run print, from its driver, or from the log files in its directory."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from holdfast.cli.named_run import find_named_run
from holdfast.cli.output import print_line
from holdfast.control.client import follow
from holdfast.control.history import read_history
from holdfast.errors import ConfigError, NotFound, WireError
from holdfast.storage.store import Store
from holdfast.views.formatting import count_text, ranks_brief
from holdfast.wire import control_messages as cm

__all__ = ["logs"]

_GENERATION = re.compile(r"logs/generation_([0-9]+)/")
_RANK = re.compile(r"rank_([0-9]+)\.log")


@click.command(short_help="Show what a run's workers print.")
@click.argument("run", metavar="RUN")
@click.option("-f", "--follow", "follows", is_flag=True, help="Go on until the run ends.")
@click.option("--rank", type=click.IntRange(0), help="Of this rank only.")
def logs(run: str, follows: bool, rank: int | None) -> None:
    """Show what the workers of RUN print.

    While it runs, its driver gives the last lines, and with -f what comes. Otherwise the log files in its directory are
    shown, which are complete: those of its last generation.
    """
    named = find_named_run(run)
    store, driver = named.store, named.find_driver()
    if named.is_experiment:
        raise ConfigError(f"{store.uri} is an experiment: name one of its trials, which `holdfast status` shows.")
    if driver is not None:
        try:
            follow(driver, cm.ReadLogs(rank=rank, follow=follows), _Printer(store).show)
            return
        except WireError as error:
            if not named.trial:  # which has ended
                print_line(f"warning: {error}", err=True)
    for number, text in _stored_lines(store, rank):
        print_line(f"({ranks_brief([number])}) {text}")


class _Printer:
    """Prints what the driver sends."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def show(self, reply: cm.ControlReply) -> None:
        if not isinstance(reply, cm.LogLines):
            return
        if reply.left_out:
            lines = count_text(reply.left_out, "line")
            print_line(f"[{lines} before these are not shown: see {self._store.uri}/logs]", err=True)
        for line in reply.lines:
            who = "imports" if line.rank < 0 else ranks_brief([line.rank])
            print_line(f"({who}) {line.text}")


def _last_generation(store: Store) -> int:
    """Of a trial, whose journal is its experiment's, the last that printed something."""
    if generation := read_history(store).durable.generation:
        return generation
    found = (_GENERATION.match(entry.key) for entry in store.list("logs"))
    return max((int(one[1]) for one in found if one), default=0)


def _stored_lines(store: Store, rank: int | None) -> Iterator[tuple[int, str]]:
    """The lines of the last generation, rank by rank. Only keys of the form that agents write are read."""
    prefix = f"logs/generation_{_last_generation(store):06d}"
    names = (entry.key.removeprefix(f"{prefix}/") for entry in store.list(prefix))
    found = {int(one[1]): one[0] for name in names if (one := _RANK.fullmatch(name))}
    if not found:
        raise NotFound(f"{store.uri}/{prefix} has no log files: no worker has printed anything, or none was stored.")
    for number in sorted(found) if rank is None else [rank]:
        if number not in found:
            raise NotFound(f"{store.uri}/{prefix} has no log of rank {number}.")
        for line in store.get(f"{prefix}/{found[number]}").decode("utf-8", "replace").splitlines():
            yield number, line
