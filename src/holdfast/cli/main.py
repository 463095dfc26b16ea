"""The entry point of `holdfast`: runs a command, and turns whatever goes wrong into one sentence and an exit code.

Nothing heavy is imported here, so that importing this module costs nothing; `commands` has the commands, `exit_codes`
the codes. `HOLDFAST_DEBUG=1` shows the traceback behind a sentence.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.cli import exit_codes, interrupt
from holdfast.printable import printable

if TYPE_CHECKING:
    import click

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `holdfast` with these arguments (the process's own, if none are given); returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with interrupt.watching():
        try:
            return _run(given)
        except KeyboardInterrupt:
            return exit_codes.INTERRUPTED
        except Exception as error:  # noqa: BLE001  the outermost boundary: a person gets a sentence, not a traceback
            return _report(error)


def _run(arguments: list[str]) -> int:
    import click

    from holdfast.cli.commands import root

    try:
        answer = root.main(arguments, prog_name="holdfast", standalone_mode=False)
    except click.exceptions.Abort:
        return exit_codes.INTERRUPTED
    except click.exceptions.Exit as stop:
        return int(stop.exit_code)
    except click.exceptions.ClickException as error:
        return _report_usage(error)
    return answer if isinstance(answer, int) else exit_codes.OK


def _report_usage(error: click.ClickException) -> int:
    import click

    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # since click 8.2
        print(printable(error.format_message(), lines=True), file=sys.stderr)
        return exit_codes.USAGE
    print(f"error: {printable(error.format_message())}", file=sys.stderr)
    context = getattr(error, "ctx", None)
    if isinstance(context, click.Context):
        print(f"\n{context.get_usage()}\nTry: {context.command_path} --help", file=sys.stderr)
    return exit_codes.USAGE


def _report(error: Exception) -> int:
    if os.environ.get("HOLDFAST_DEBUG", "") not in ("", "0"):
        traceback.print_exception(error)
    print(f"error: {printable(exit_codes.sentence(error))}", file=sys.stderr)
    return exit_codes.code_of(error)
