"""`make bench-hub`, first part: what one more run costs on a warm agent, and what a run that waits holds in memory.

One driver starts runs one after the other, each in a thread; every function tells when its first line ran, and waits.
So the n-th run is timed while n-1 others are there. A bare fork of a process with the same modules is the floor. Fsyncs
and messages are those of the driver, from `fit()` to the first line.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from operator import sub
from pathlib import Path
from typing import Any

from holdfast import train
from holdfast.train import DataParallelTrainer, RunConfig, ScalingConfig
from holdfast.wire.channel import Channel

__all__ = ["bare_fork_ms", "main", "measure"]

_FORKS = 50
_BARE_FORK = """
import gc, os, statistics, struct, sys, time
import holdfast.zygote.zygote, holdfast.train.functions, multiprocessing.reduction
gc.collect()
gc.freeze()
times = []
for _ in range(int(sys.argv[1])):
    reader, writer = os.pipe()
    began = time.monotonic()
    if (pid := os.fork()) == 0:
        os.write(writer, struct.pack("d", time.monotonic()))
        os._exit(0)
    times.append(struct.unpack("d", os.read(reader, 8))[0] - began)
    os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)
print(1000 * statistics.median(times))
"""


class _Counter:
    """Counts fsyncs, and the frames of this process's connections."""

    def __init__(self) -> None:
        self.fsyncs = self.messages = self.size_bytes = 0
        for name in ("fsync", "fdatasync"):
            setattr(os, name, self._counting(getattr(os, name)))
        write_frame, receive = Channel.write_frame, Channel._recv

        def write(channel: Channel[Any], frame: bytes) -> None:
            self.messages, self.size_bytes = self.messages + 1, self.size_bytes + len(frame)
            write_frame(channel, frame)

        async def recv(channel: Channel[Any]) -> Any:
            before = channel.received_bytes
            message = await receive(channel)
            self.messages, self.size_bytes = self.messages + 1, self.size_bytes + channel.received_bytes - before
            return message

        for name, counting in (("write_frame", write), ("_recv", recv)):
            setattr(Channel, name, counting)

    def _counting(self, call: Callable[[int], None]) -> Callable[[int], None]:
        def counted(fd: int) -> None:
            self.fsyncs += 1
            call(fd)

        return counted

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.fsyncs, self.messages, self.size_bytes


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
    counter = _Counter()
    for count in sorted(counts):
        starts_s: list[float] = []
        costs: list[tuple[int, ...]] = []
        cpu_s = time.process_time()
        while len(threads) < count:
            before = counter.counts
            starts_s.append(_start(len(threads), root, threads))
            costs.append(tuple(map(sub, counter.counts, before)))
            if len(threads) == 1:
                first = _memory_bytes()
        now = _memory_bytes()
        fsyncs, messages, size_bytes = map(statistics.median, zip(*costs, strict=True))
        more = max(1, count - 1)
        found[count] = {
            "fit() to first line, ms": 1000 * statistics.median(starts_s),
            "driver, CPU ms": 1000 * (time.process_time() - cpu_s) / len(starts_s),
            "fsyncs of the driver": fsyncs,
            "messages": messages,
            "bytes": size_bytes,
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


def bare_fork_ms() -> float:
    """From `os.fork` in a process that has imported what a zygote has, to the first line of the child."""
    command = [sys.executable, "-c", _BARE_FORK, str(_FORKS)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


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
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 10, 100, 1_000], help="how many at the same time")
    options: Any = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; a bare fork {bare_fork_ms():.1f} ms", flush=True)
    with tempfile.TemporaryDirectory() as root:
        for count, figures in measure(options.runs, Path(root)).items():
            told = ", ".join(f"{name} {value:.0f}" for name, value in figures.items())
            print(f"{count:5d} runs: {told}", flush=True)


if __name__ == "__main__":
    main()
