"""The table of commands: it matches the commands' own help, and each is imported only when it is used."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from holdfast.cli.commands import LazyGroup, root
from holdfast.cli.main import main


def commands(group: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, click.Command]]:
    assert isinstance(group, LazyGroup)
    for name, place in group.places.items():
        command = group.get_command(click.Context(group), name)
        assert command is not None
        yield (*path, name), place.short_help, command
        if isinstance(command, LazyGroup):
            yield from commands(command, (*path, name))


def test_the_command_table_matches_the_commands_own_help() -> None:
    found = {" ".join(path): (told, command.get_short_help_str(200)) for path, told, command in commands(root)}
    assert {"ckpt ls", "ckpt verify", "events"} <= found.keys()
    assert {path: told for path, (told, _) in found.items()} == {path: own for path, (_, own) in found.items()}


def test_every_reading_command_has_json_output() -> None:
    speaking = {
        " ".join(path)
        for path, _, command in commands(root)
        if any("--json" in option.opts for option in command.params)
    }
    assert {"ckpt ls", "ckpt show", "ckpt verify", "ckpt get", "events"} <= speaking


@pytest.mark.parametrize(
    ("typed", "meant"), [("frobnicate", None), ("list", "ls"), ("verfy", "verify"), ("unpn", "unpin")]
)
def test_an_unknown_command_suggests_a_near_one(
    typed: str, meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", typed]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: `holdfast ckpt` has no command '{typed}'")
    assert ("did you mean" in said) == (meant is not None)
    assert meant is None or f"did you mean {meant}" in said


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], "click.testing msgspec holdfast.checkpoint holdfast.cli.ckpt_read"),
        (["ckpt", "ls", "."], "torch numpy pyarrow obstore ray asyncio holdfast.control holdfast.train"),
    ],
)
def test_a_command_imports_no_more_than_it_needs(arguments: list[str], absent: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("A directory that is there, without a checkpoint.")
    script = (
        "import sys; from holdfast.cli.main import main; assert 'click' not in sys.modules\n"
        f"assert main({arguments!r}) == 0\n"
        f"loaded = set({absent.split()!r}) & set(sys.modules); assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL, cwd=tmp_path)
