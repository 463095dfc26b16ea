"""An agent that dies at a chosen step of storing snapshots: put on the path as `sitecustomize` by `install`.

Every Python process imports that module first; all but agents leave it at that. The agent's store counts the beginning
and the end of each upload and copy, and the process is killed at the count that HOLDFAST_TEST_DIE_AT names, once.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

__all__ = ["install"]


def install(directory: Path) -> str:
    """Make this file a `sitecustomize` in `directory`; the PYTHONPATH for it."""
    directory.mkdir()
    shutil.copy(__file__, directory / "sitecustomize.py")
    return os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])


def _arm(die_at: int, marker: Path) -> None:
    from holdfast.storage.posix.store import PosixStore

    passed = itertools.count(1)  # threads share it

    def step() -> None:
        if next(passed) == die_at and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(real: Any) -> Any:
        def call(self: Any, key: str, *arguments: Any) -> Any:
            if "checkpoint_" not in key and "checkpoint_" not in str(arguments[:1]):
                return real(self, key, *arguments)  # logs
            step()
            found = real(self, key, *arguments)
            step()
            return found

        return call

    PosixStore.upload = counted(PosixStore.upload)  # type: ignore[method-assign]
    PosixStore.copy = counted(PosixStore.copy)  # type: ignore[method-assign]


if "holdfast.agent" in sys.orig_argv and "HOLDFAST_TEST_DIE_AT" in os.environ:
    _arm(int(os.environ["HOLDFAST_TEST_DIE_AT"]), Path(os.environ["HOLDFAST_TEST_DIED"]))
