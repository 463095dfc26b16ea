"""The group `holdfast ckpt`: its commands by name, and the exit codes that all of them keep to."""

from __future__ import annotations

import click

from holdfast.cli.lazy import LazyCommand, LazyGroup

__all__ = ["ckpt"]

_COMMANDS = {
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

_EPILOG = """\b
Exit codes:
  0    done
  1    damage was found, or the command failed
  2    usage: an argument, a URI or an extra that is not installed
  3    not found: no such run or checkpoint, or it was never committed
  4    refused: pinned, newest, name taken, target not empty
  5    the storage failed: no answer, access denied, no space
  130  interrupted
"""


@click.command(cls=LazyGroup, places=_COMMANDS, epilog=_EPILOG)
def ckpt() -> None:
    """Commit, list, verify, fetch and remove checkpoints.

    A run's URI is the directory that holds its checkpoints, such as ~/holdfast_results/my_run or
    s3://bucket/runs/my_run; a checkpoint's URI is that with /checkpoint_000042 at its end. `show` and `get` take a
    run's URI too and mean its newest checkpoint.
    """
