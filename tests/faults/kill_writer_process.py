"""Drives `kill_writer`, and checks what must hold after each kill."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
from tests.faults.kill_writer import Job, Outcome

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.commit import commit_directory
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.removal import remove
from holdfast.checkpoint.verify import repair, verify
from holdfast.storage.store import Store

__all__ = ["CheckedRun", "KillWriter", "kill_writer_process", "make_source"]

_REPOSITORY = Path(__file__).resolve().parents[2]


class KillWriter:
    """A running `kill_writer`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def run(self, job: Job) -> Outcome:
        """Run one job in a process of its own, which may be killed as the job says."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(job) + b"\n")
        self._process.stdin.flush()
        outcome = msgspec.json.decode(self._process.stdout.readline(), type=Outcome)
        assert not outcome.error, outcome.error
        return outcome


@contextmanager
def kill_writer_process(environment: Mapping[str, str]) -> Iterator[KillWriter]:
    """The program for the time of the block; it ends when its input does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.kill_writer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=_REPOSITORY,
        env={**os.environ, **environment},
    )
    try:
        yield KillWriter(process)
    finally:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.wait()
        process.stdout.close()


def make_source(directory: Path, salt: int, big_bytes: int = 0) -> Path:
    """A directory to commit: one file never changes, the others differ with `salt`."""
    (directory / "layers").mkdir(parents=True, exist_ok=True)
    (directory / "frozen.bin").write_bytes(b"frozen" * 2000)
    (directory / "weights.bin").write_bytes(f"weights {salt}".encode() * 500)
    (directory / "layers" / "empty.txt").write_bytes(b"")
    (directory / "layers" / "head.bin").write_bytes(f"head {salt}".encode() * 100)
    (directory / ".metadata.json").write_text('{"salt": 1}')
    if big_bytes:
        (directory / "big.bin").write_bytes(salt.to_bytes(8, "big") * (big_bytes // 8))
    return directory


class CheckedRun:
    """One run in one store: what it held before a kill, and the checks after it."""

    def __init__(self, store: Store, uri: str, source: Path) -> None:
        self.store = store
        self.uri = uri
        self.source = source
        self._salt = 1

    def committed(self) -> list[str]:
        return [manifest.name for manifest in Catalog(self.store).committed()]

    def check_after(self, before: list[str], attempt: int) -> Manifest | None:
        """Everything that is committed is whole, nothing was lost, and at most this attempt's checkpoint is new."""
        report = verify(self.store, deep=True)
        assert report.intact, report.damaged
        names = [manifest.name for manifest in report.ok]
        assert [name for name in names if name in before] == before
        fresh = [manifest for manifest in report.ok if manifest.name not in before]
        assert len(fresh) <= 1
        for manifest in fresh:
            assert manifest.metrics == {"attempt": attempt}
        return fresh[0] if fresh else None

    def recover(self, name: str | None = None) -> None:
        """The next commit works (under the same name too, if the interrupted one had one), and `repair` leaves
        nothing of killed writers. Afterwards the run holds one checkpoint, and the source differs from it again."""
        if name is not None and name not in self.committed():
            self._commit(name)
        done = self._commit(None)
        assert Catalog(self.store).newest() == done
        report = verify(self.store, deep=False)
        assert report.intact, report.damaged
        assert done in report.ok
        repair(self.store, report)
        after = verify(self.store, deep=True)
        assert after.ok == report.ok
        # Only a reservation that was torn as it was made names no owner, so it is not cleared at once.
        assert [left.name for left in after.leftovers if left.reservation is not None] == []
        assert after.void == []
        if after.leftovers:
            repair(self.store, after, older_than_s=0)
            assert Catalog(self.store).leftovers() == []
        for manifest in after.ok[:-1]:
            remove(self.store, manifest.name)
        self._renew()

    def _commit(self, name: str | None) -> Manifest:
        self._renew()
        return commit_directory(self.store, self.source, metrics={"attempt": -1}, name=name)

    def _renew(self) -> None:
        self._salt += 1
        make_source(self.source, self._salt)
