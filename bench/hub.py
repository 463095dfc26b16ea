"""`make bench-hub`: what one more run costs on an agent that is warm, and what a run that waits holds in memory.

One driver starts runs one after the other, each in a thread; every function tells when its first line ran, and waits.
So the n-th run is timed while n-1 others are there. A bare fork of a process with the same modules is the floor.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast import train
from holdfast.train import DataParallelTrainer, RunConfig, ScalingConfig

__all__ = ["main", "measure"]


def _wait(config: dict[str, str]) -> None:
    """Tell the time of the first line, and wait until the benchmark is over."""
    began = time.monotonic()
    root, name = Path(config["root"]), train.get_context().get_experiment_name()
    (root / f"{name}.began").write_text(repr(began))
    (root / "over").read_text()


def measure(counts: Sequence[int], root: Path) -> dict[int, dict[str, float]]:
    """For each number of runs: the time from `fit()` to the first line of the newest runs, and memory per run."""
    os.mkfifo(root / "over")
    os.environ.update(HOLDFAST_LOCAL_CACHE_DIR=str(root / "cache"), HOLDFAST_QUIET="1")
    threads: list[threading.Thread] = []
    found: dict[int, dict[str, float]] = {}
    first = _memory_bytes()
    starts_s: list[float] = []
    for count in sorted(counts):
        starts_s = []
        while len(threads) < count:
            starts_s.append(_start(len(threads), root, threads))
            if len(threads) == 1:
                first = _memory_bytes()
        now = _memory_bytes()
        more = max(1, count - 1)
        found[count] = {
            "fit() to first line, ms": 1000 * statistics.median(starts_s),
            "driver, KB a run": (now["driver"] - first["driver"]) / more / 1024,
            "agent, KB a run": (now["agent"] - first["agent"]) / more / 1024,
        }
    (root / "over").write_text("")  # lets all go that wait for it
    for thread in threads:
        thread.join()
    return found


def _start(number: int, root: Path, threads: list[threading.Thread]) -> float:
    name = f"run{number}"
    os.mkfifo(root / f"{name}.began")
    trainer = DataParallelTrainer(
        _wait,
        train_loop_config={"root": str(root)},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name=name, storage_path=root / "storage", verbose=0),
    )
    began = time.monotonic()
    thread = threading.Thread(target=trainer.fit, name=name)
    thread.start()
    threads.append(thread)
    return float((root / f"{name}.began").read_text()) - began


def _memory_bytes() -> dict[str, int]:
    """Private memory of the driver and of its agent."""
    agents = [child for child in _children(os.getpid()) if b"holdfast.agent" in _read(child, "cmdline")]
    return {"driver": _private_bytes(os.getpid()), "agent": sum(map(_private_bytes, agents))}


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _private_bytes(pid: int) -> int:
    lines = _read(pid, "smaps_rollup").decode().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def _read(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 10, 100], help="how many at the same time")
    options: Any = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        for count, figures in measure(options.runs, Path(root)).items():
            told = ", ".join(f"{name} {value:.0f}" for name, value in figures.items())
            print(f"{count:5d} runs: {told}", flush=True)


if __name__ == "__main__":
    main()
