"""The command `holdfast` itself: its groups, by name. A new group is one line in the table."""

from __future__ import annotations

import click

from holdfast import __version__
from holdfast.cli.lazy import LazyCommand, LazyGroup

__all__ = ["root"]

_GROUPS = {
    "ckpt": LazyCommand("holdfast.cli.ckpt:ckpt", "Commit, list, verify, fetch and remove checkpoints."),
    "events": LazyCommand("holdfast.cli.events:events", "Tell the story of a run."),
}


@click.command(cls=LazyGroup, places=_GROUPS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="holdfast %(version)s")
def root() -> None:
    """Training that survives: checkpoints that are whole or invisible, on any storage.

    A URI is a directory, or s3://, gs://, az:// or hdfs:// with a path. HOLDFAST_DEBUG=1 shows the traceback behind an
    error.
    """
