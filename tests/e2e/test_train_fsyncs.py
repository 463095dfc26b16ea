"""How often a run that does nothing waits for the disk, and for which files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.e2e.small import fit
from tests.faults.programs.sandbox import Sandbox


def test_a_run_that_does_nothing_syncs_each_name_once(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what a command waits for (the first records, the start of the workers, the end) ten calls, in the driver:
    the agent has none. Where the agent is there at once, the start of the workers is among the first records; on a slow
    machine, records that no command waits for may be flushed in between."""
    synced: list[str] = []
    fsync, fdatasync = os.fsync, os.fdatasync

    def noting_fsync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115  no real path while it has no name
        synced.append(path.name if path.exists() else f"new in {path.parent.name}")
        fsync(fd)

    def noting_fdatasync(fd: int) -> None:
        synced.append("records")
        fdatasync(fd)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "fdatasync", noting_fdatasync)
    fit(sandbox, lambda: None, verbose=0)
    once = ["000001.json", "run.json", sandbox.root.name, "storage", "run", "epochs", "new in journal", "journal"]
    assert [name for name in synced if name != "records"] == once
    assert synced.count("records") >= 1

    synced.clear()
    fit(sandbox, lambda: 1, verbose=0)
    again = ["000002.json", "000002.floor.json", "run.json"]
    assert [name for name in synced if name != "records"][:3] == again
