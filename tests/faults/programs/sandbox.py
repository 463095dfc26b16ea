"""A test's storage and cache, and the check that no process, file, port or memory is left at its end.

Every test of the training runtime asks for the fixture `sandbox`. Its processes are known by the cache directory in
their environment, which no other test shares.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs import processes
from tests.faults.programs.driver import Driver
from tests.faults.programs.driver_main import trainer

from holdfast.checkpoint.verify import verify
from holdfast.control.history import read_records
from holdfast.core.records import Record
from holdfast.storage.locate import open_store
from holdfast.train import Result

__all__ = ["Sandbox", "sandbox"]

_SEGMENTS = ("holdfast", "torch_", "psm_", "sem.")


class Sandbox:
    """One test's storage and cache, and the drivers that it starts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.storage = root / "storage"
        self.cache = root / "cache"
        self._threads = set(threading.enumerate())
        self._gates: list[int] = []
        self._drivers: list[Driver] = []
        self.go = self.gate("go")

    @property
    def marker(self) -> str:
        return f"HOLDFAST_LOCAL_CACHE_DIR={self.cache}"

    def options(self, config: dict[str, Any], **others: Any) -> dict[str, Any]:
        return {"storage": str(self.storage), **others, "config": {"go": self.go, **config}}

    def fit(self, config: dict[str, Any], **others: Any) -> Result:
        """Run `jobs.steps` in this process's own name."""
        return trainer(**self.options(config, **others)).fit()

    def start_driver(self, config: dict[str, Any], environment: dict[str, str] | None = None, **others: Any) -> Driver:
        """The same in a process that can be killed."""
        driver = Driver(self.options(config, **others), self.root / f"driver_{len(self._drivers)}.err", environment)
        self._drivers.append(driver)
        return driver

    def gate(self, name: str) -> str:
        """A pipe at which workers wait (`jobs`, "hold") until `open_gate`."""
        path = self.root / name
        os.mkfifo(path)
        return str(path)

    def open_gate(self, gate: str | None = None) -> None:
        """Open the gate: workers that wait there continue, and later ones do not wait."""
        self._gates.append(os.open(gate or self.go, os.O_RDWR | os.O_NONBLOCK))

    def records(self, name: str = "run") -> list[Record]:
        """What the run's journal holds."""
        return list(read_records(open_store(self.storage / name)))

    def log(self, generation: int, rank: int, name: str = "run") -> str:
        return (self.storage / name / "logs" / f"generation_{generation:06d}" / f"rank_{rank}.log").read_text()

    def check_stored(self, name: str = "run") -> list[str]:
        """Every committed checkpoint verifies to the last byte; gives their names."""
        report = verify(open_store(self.storage / name), deep=True)
        assert report.intact, report.damaged
        return [manifest.name for manifest in report.ok]

    def check_nothing_left(self) -> None:
        """No process, no thread, nothing in the cache but what users put into their working directories."""
        processes.wait_gone(*processes.with_environment(self.marker))
        for one in threading.enumerate():
            if one.name == "holdfast-sweep":  # in local mode, `fit()` does not wait for it
                one.join(60)
        new = set(threading.enumerate()) - self._threads  # libraries that other tests used may have left some
        threads = [one.name for one in new if one.name.startswith(("holdfast", "asyncio"))]
        assert threads == [], threads
        left = [path for path in self.cache.rglob("*") if path.is_file() and "work" not in path.parts]
        assert left == [], left
        assert list(self.cache.glob("agents/*")) == []

    def close(self) -> None:
        """For tests that failed half way."""
        while self._gates:
            os.close(self._gates.pop())
        for driver in self._drivers:
            driver.close()
        for pid in processes.with_environment(self.marker):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    here = Sandbox(tmp_path)
    monkeypatch.setenv("HOLDFAST_LOCAL_CACHE_DIR", str(here.cache))
    monkeypatch.setenv("HOLDFAST_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))  # killed workers cannot tidy up what their function made
    monkeypatch.setenv("HOLDFAST_BACKOFF_S", "0.01")
    monkeypatch.setenv("HOLDFAST_QUIET", "1")
    ports, shared = _ports(), _shared_memory()
    try:
        yield here
        here.check_nothing_left()
        assert _ports() <= ports
        processes.wait_until(lambda: not _left_in_shared_memory(shared), "shared memory of no process is removed")
    finally:
        here.close()


def _ports() -> set[str]:
    """The inodes of sockets on which this very process listens."""
    mine = set()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            mine.add(str(fd.readlink()))
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {row[9] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}


def _shared_memory() -> set[str]:
    """Segments and semaphores by the names that holdfast, torch and Python give them."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(_SEGMENTS) and path.is_file()}


def _left_in_shared_memory(before: set[str]) -> set[str]:
    """New segments that no process uses; used ones belong to other tests, since all processes of ours have ended."""
    new = _shared_memory() - before
    for entry in Path("/proc").iterdir() if new else []:
        if entry.name.isdecimal():
            with suppress(OSError):
                maps = (entry / "maps").read_text()
                new = {name for name in new if f"/dev/shm/{name}" not in maps}
    return {name for name in new if Path("/dev/shm", name).exists()}
