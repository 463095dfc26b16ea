"""The names in a run's directory that are the run's own: no artifact and no output file of the user may have one."""

from __future__ import annotations

import re

__all__ = ["is_own_name"]

_OWN = re.compile(
    r"run\.json|result\.json|progress\.csv|params\.json|error\.txt|events\.out\.tfevents\..*"
    r"|epochs|journal|logs|artifacts|checkpoint_.*|\..*"
)


def is_own_name(first_part: str) -> bool:
    """Of a path below the run's directory."""
    return _OWN.fullmatch(first_part) is not None
