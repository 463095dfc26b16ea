"""The contenders of `bench.train` as processes: how each is started, watched through its log, and cleared away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["ALL", "OURS", "Contender", "Run", "clear", "started"]

_ROOT = Path(__file__).parents[1]
_DRIVERS = Path(__file__).with_name("drivers")
_DEADLINE_S = 180.0


@dataclass(frozen=True, slots=True)
class Contender:
    """A system, and the command that runs a scenario on it."""

    name: str
    scenarios: frozenset[str]
    command: Callable[[str, Path], list[str]]
    environment: dict[str, str] = field(default_factory=dict)


def _trainer(system: str) -> Callable[[str, Path], list[str]]:
    return lambda scenario, directory: [
        sys.executable, str(_DRIVERS / "trainer.py"), scenario, str(directory), system
    ]  # fmt: skip


def _torchrun(scenario: str, directory: Path) -> list[str]:
    options = ["--nproc-per-node=2", "--max-restarts=100", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    program = [str(_DRIVERS / "with_torchrun.py"), scenario, str(directory)]
    return [sys.executable, "-m", "torch.distributed.run", *options, *program]


def _floor(scenario: str, directory: Path) -> list[str]:
    return [sys.executable, str(_DRIVERS / "floor.py"), scenario, str(directory)]


_RAY = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
_EVERYTHING = frozenset({"noop", "reports", "checkpoints", "steps", "driver"})
OURS = Contender("holdfast", _EVERYTHING, _trainer("holdfast"), {"HOLDFAST_QUIET": "1"})
ALL = (
    OURS,
    Contender("Ray Train", _EVERYTHING, _trainer("ray"), _RAY),
    Contender(
        "Ray Train, polling every 10 ms",
        frozenset({"reports", "checkpoints", "steps"}),
        _trainer("ray"),
        {**_RAY, "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.01"},
    ),
    # Without the setting its restarts fail with gloo: this is its better figure.
    Contender("torchrun", frozenset({"noop", "steps"}), _torchrun, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    Contender("floor", frozenset({"noop", "steps"}), _floor),
)


class Run:
    """A started process and the log that its workers write."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, began: float) -> None:
        self.process = process
        self.began = began
        self._log = log

    def events(self) -> list[dict[str, Any]]:
        if not self._log.exists():
            return []
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def until(self, wanted: Callable[[dict[str, Any]], bool], timeout_s: float = _DEADLINE_S) -> dict[str, Any]:
        """The first event that is wanted, waited for."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            code = self.process.poll()
            for event in self.events():
                if wanted(event):
                    return event
            if code is not None:
                raise RuntimeError(f"{self.process.args!r} ended with {code}")
            time.sleep(0.02)
        raise TimeoutError(f"{self.process.args!r} took more than {timeout_s:g} s")

    def memory_bytes(self) -> int:
        """Proportional set size of the whole session: shared pages are counted once."""
        total = 0
        for pid in _session(self.process.pid):
            with suppress(OSError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        total += int(line.split()[1]) * 1024
        return total


@contextmanager
def started(contender: Contender, scenario: str, directory: Path) -> Iterator[Run]:
    """Start a scenario; whatever is left of it at the end is killed."""
    directory.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), **contender.environment}
    with (directory / "output").open("ab") as output:
        began = time.time()
        process = subprocess.Popen(
            contender.command(scenario, directory),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield Run(process, directory / "log", began)
    finally:
        clear(process)


def clear(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and everything that it ever started."""
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGSTOP)  # no new children while we look
    family = _session(process.pid)
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _session(root: int) -> list[int]:
    """The process and all its descendants, those in sessions of their own included."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    family, queue = [], [root]
    while queue:
        pid = queue.pop()
        family.append(pid)
        queue.extend(children.get(pid, []))
    return family
