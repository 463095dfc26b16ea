"""`Interrupted`: what `fit()` raises after Ctrl+C or SIGTERM stopped a run.

It is a `KeyboardInterrupt`, for scripts that catch that, and a `SystemExit`: uncaught it ends the process with the code
that a shell expects (130 or 143) and without a traceback, after the summary that says how to continue.
"""

from __future__ import annotations

__all__ = ["Interrupted"]

_EXIT_CODES = {"SIGTERM": 143}
_CTRL_C = 130


class Interrupted(KeyboardInterrupt, SystemExit):
    """`why` is "Ctrl+C" or the name of the signal; `code` the exit code."""

    def __init__(self, why: str) -> None:
        super().__init__(f"The run was stopped ({why}); the same call continues it.")
        self.why = why
        self.code = _EXIT_CODES.get(why, _CTRL_C)

    def _render_traceback_(self) -> list[str]:
        """What notebooks show instead of a traceback."""
        return [str(self)]
