"""The commands of `holdfast` by name; each command's module is imported only when that command is run.

So `holdfast --help` imports none of them, and a command pays for itself alone. A new command is one line in a table,
with the short help that its group shows; a test compares that with the command's own. `holdfast ckpt` also documents
the exit codes (`exit_codes`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

import click

from holdfast import __version__

__all__ = ["LazyCommand", "LazyGroup", "root"]


class LazyCommand(NamedTuple):
    """Where a command is: `module:attribute`, and the line that the group's help shows for it."""

    target: str
    short_help: str


class LazyGroup(click.Group):
    """Commands by name, none of them imported yet."""

    def __init__(self, *args: Any, places: Mapping[str, LazyCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.places = dict(places)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = self.places.get(cmd_name)
        if place is None:
            return None
        module, _, attribute = place.target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and name not in self.places:
            near = get_close_matches(name, self.places, n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else "."
            raise click.UsageError(f"`{ctx.command_path}` has no command {name!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, place.short_help) for name, place in self.places.items()])


# ------------------------------------------------------------ the commands

_CKPT_COMMANDS = {
    "put": LazyCommand("holdfast.cli.ckpt_move:put", "Commit a directory as a run's next checkpoint."),
    "ls": LazyCommand("holdfast.cli.ckpt_read:ls", "List a run's committed checkpoints."),
    "show": LazyCommand("holdfast.cli.ckpt_read:show", "Show a checkpoint's manifest and files."),
    "verify": LazyCommand(
        "holdfast.cli.ckpt_verify:verify", "Check every committed byte; find what crashed writers left."
    ),
    "get": LazyCommand("holdfast.cli.ckpt_move:get", "Fetch a checkpoint into a directory, verified."),
    "rm": LazyCommand("holdfast.cli.ckpt_keep:rm", "Remove checkpoints."),
    "pin": LazyCommand("holdfast.cli.ckpt_keep:pin", "Keep checkpoints from retention and removal."),
    "unpin": LazyCommand("holdfast.cli.ckpt_keep:unpin", "Lift the pin of checkpoints."),
}

_EXIT_CODES = """\b
Exit codes:
  0    done
  1    damage was found, or the command failed
  2    usage: an argument, a URI or an extra that is not installed
  3    not found: no such run or checkpoint, or it was never committed
  4    refused: pinned, newest, name taken, target not empty
  5    the storage failed: no answer, access denied, no space
  130  interrupted
"""


@click.command(cls=LazyGroup, places=_CKPT_COMMANDS, epilog=_EXIT_CODES)
def ckpt() -> None:
    """Commit, list, verify, fetch and remove checkpoints.

    A run's URI is the directory that holds its checkpoints, such as ~/holdfast_results/my_run or
    s3://bucket/runs/my_run; a checkpoint's URI is that with /checkpoint_000042 at its end. `show` and `get` take a
    run's URI too and mean its newest checkpoint.
    """


_COMMANDS = {
    "agent": LazyCommand("holdfast.cli.agent:agent", "Run workers of a driver on another machine here."),
    "launch": LazyCommand("holdfast.cli.launch:launch", "Run a script on many hosts."),
    "ckpt": LazyCommand("holdfast.cli.commands:ckpt", "Commit, list, verify, fetch and remove checkpoints."),
    "events": LazyCommand("holdfast.cli.events:events", "Show what happened in a run."),
    "status": LazyCommand("holdfast.cli.control:status", "Show how a run stands."),
    "logs": LazyCommand("holdfast.cli.logs:logs", "Show what a run's workers print."),
    "stop": LazyCommand("holdfast.cli.control:stop", "Stop a run, as Ctrl+C in its terminal does."),
    "drain": LazyCommand("holdfast.cli.control:drain", "Take a driver's runs off a node."),
    "scale": LazyCommand("holdfast.cli.control:scale", "Change how many workers a run may have."),
    "join": LazyCommand("holdfast.cli.control:join", "Print what an agent needs in order to join a run."),
}


@click.command(cls=LazyGroup, places=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="holdfast %(version)s")
def root() -> None:
    """Training that survives: checkpoints that are whole or invisible, on any storage.

    A URI is a directory, or s3://, gs://, az:// or hdfs:// with a path. HOLDFAST_DEBUG=1 shows the traceback behind an
    error.
    """
