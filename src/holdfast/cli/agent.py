"""`holdfast agent`: starts the agent of this machine, in place of this process.

The agent's own command (`holdfast.agent.__main__`) reads the options; a fresh process has imported nothing that an
agent does not need.
"""

from __future__ import annotations

import os
import sys

import click

__all__ = ["agent"]


@click.command(
    add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def agent(options: tuple[str, ...]) -> None:
    """Run workers of a driver on another machine here."""
    os.execv(sys.executable, [sys.executable, "-m", "holdfast.agent", *options])
