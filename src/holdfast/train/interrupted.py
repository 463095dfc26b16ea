"""`Interrupted`: what `fit()` raises after Ctrl+C or SIGTERM stopped a run.

It is a `KeyboardInterrupt`, for scripts that catch that. In a script it is a `SystemExit` as well: uncaught it ends the
process with the code that a shell expects (130 or 143) and without a traceback, after the summary that says how to
continue. A notebook or an interactive interpreter must go on, so there it is not.
"""

from __future__ import annotations

import sys

__all__ = ["Interrupted", "make_interrupted"]

_EXIT_CODES = {"SIGTERM": 143}
_CTRL_C = 130


class Interrupted(KeyboardInterrupt):
    """`why` is "Ctrl+C" or the name of the signal; `code` the exit code."""

    code: str | int | None

    def __init__(self, why: str) -> None:
        super().__init__(f"The run was stopped ({why}); the same call continues it.")
        self.why = why
        self.code = _EXIT_CODES.get(why, _CTRL_C)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback."""
        return [str(self)]


class _EndsScript(Interrupted, SystemExit):
    """Python prints nothing of it, and exits with its `code`."""


def make_interrupted(why: str) -> Interrupted:
    """The exception for this process: one that ends it, unless somebody types at it."""
    ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    if hasattr(sys, "ps1") or (ipython is not None and ipython() is not None):
        return Interrupted(why)
    return _EndsScript(why)
