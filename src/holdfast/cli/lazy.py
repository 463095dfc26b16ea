"""A click group that imports a command's module only when that command is run.

So `holdfast --help` imports none of them, and a command pays for itself alone. Short helps stand in the table; a test
holds them to what the commands say themselves.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

import click

__all__ = ["LazyCommand", "LazyGroup"]


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
