"""`make bench-checkpoint`: how long a checkpoint keeps training waiting and when it is durable, against what others do.

Prints ratios from one run, with the aim beside each: contenders take turns, and medians count. Ours is a real `fit()`
with one worker that reports `Checkpoint.from_state`; Ray's too, in both of its upload modes, where it is installed.
`python -m bench.checkpoint --size 128MiB --rounds 3` is a shorter one. `saving` holds the others and the floors,
`drivers/snapshots.py` the training processes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from bench.saving import Floors, Others, change, make_state
from bench.store import parse_size
from bench.timing import settle

from holdfast.checkpoint.handle import Checkpoint
from holdfast.control.history import read_records
from holdfast.core.records import CheckpointCommitted
from holdfast.storage.files import mount_kind
from holdfast.storage.locate import open_store

__all__ = ["main"]

_DRIVER = Path(__file__).parent / "drivers" / "snapshots.py"
_GIB = 1024**3
_OURS = "holdfast from_state"
_COPY, _TORCH_COPY = "memcpy into warm memory", "Tensor.copy_ into warm memory"
_WRITE, _WRITE_MORE = "O_DIRECT + fsync", "O_DIRECT + fsync, four at a time"
_FLOORS = (_COPY, _TORCH_COPY, _WRITE, _WRITE_MORE)
_PAUSE_S = 1.0
"""For each GiB, between two contenders: each deletes its older checkpoints, and the next shall not pay for that."""
_LOOPS_PER_ROUND = 2
Taken = dict[str, float]


class Servant:
    """A training process that does what it is told, through every generation of its workers."""

    def __init__(self, system: str, scratch: Path, size_bytes: int) -> None:
        self.storage = scratch / system
        self.storage.mkdir()
        self._listener = Listener(family="AF_UNIX")  # in a short place of its own: such addresses have a limit
        environment = {
            **os.environ,
            "PYTHONPATH": str(_DRIVER.parents[2]),
            "HOLDFAST_QUIET": "1",
            "HOLDFAST_BACKOFF_S": "0.01",
            "HOLDFAST_LOCAL_CACHE_DIR": str(scratch / "cache"),
            "RAY_TRAIN_V2_ENABLED": "1",
            "RAY_worker_niceness": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        command = [
            sys.executable,
            str(_DRIVER),
            str(self._listener.address),
            str(self.storage),
            str(size_bytes),
            system,
        ]
        with (scratch / f"{system}.output").open("wb") as output:
            self._process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        self._output = scratch / f"{system}.output"
        self.hello: Taken = {}
        self._line = self._meet()

    def ask(self, **order: Any) -> Taken:
        self._line.send(order)
        answer: Taken = self._line.recv()
        return answer

    def report(self, mode: str = "", share: float = 1.0) -> Taken:
        return self.ask(do="report", mode=mode, share=share)

    def die(self) -> Taken:
        """Kill the worker; what its successor says about its start."""
        self._line.send({"do": "die"})
        self._line = self._meet()
        return self.hello

    def close(self) -> None:
        self._line.send({"do": "end"})
        self._process.wait(60)
        self._listener.close()

    def _meet(self) -> Connection:
        try:
            line = self._listener.accept()
            self.hello = line.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"the training process ended: {self._output.read_text()[-2000:]}") from error
        return line


@dataclass(slots=True)
class _Bench:
    scratch: Path
    size_bytes: int
    rounds: int
    loop_s: float
    missed: list[str] = field(default_factory=list)

    def race(self, contenders: dict[str, Callable[[], Taken]]) -> dict[str, Taken]:
        """Medians of each contender's figures, after a round that warms everything up."""
        taken: dict[str, list[Taken]] = {name: [] for name in contenders}
        for number in range(self.rounds + 1):
            for name, work in contenders.items():
                time.sleep(_PAUSE_S * self.size_bytes / _GIB)
                settle(self.scratch)
                figures = work()
                if number:
                    taken[name].append(figures)
        return {
            name: {key: statistics.median(one[key] for one in all_taken) for key in all_taken[0]}
            for name, all_taken in taken.items()
        }

    def table(self, title: str, medians: dict[str, Taken], key: str, aims: dict[str, float]) -> None:
        """One figure of every contender that has it, and how ours compares."""
        print(f"\n{title}")
        ours = medians[_OURS][key]
        for name, figures in medians.items():
            if key not in figures:
                continue
            line = f"  {name:<38}{figures[key]:8.3f} s {self.size_bytes / figures[key] / 1024**2:8.0f} MiB/s"
            if name != _OURS:
                line += f"   ours/this {ours / figures[key]:5.2f}"
            if name in aims:
                line += self.judge(f"{title}, against {name}", ours / figures[key], aims[name])
            print(line)

    def judge(self, what: str, figure: float, aim: float) -> str:
        met = figure <= aim
        if not met:
            self.missed.append(what)
        return f"   aim <= {aim:.2f}: {'met' if met else 'MISSED'}"


def main(arguments: list[str] | None = None) -> int:
    """Run all comparisons; 1 if an aim was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoint", description=__doc__)
    parser.add_argument("--size", type=parse_size, default=_GIB, help="bytes of the state (default 1GiB)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each comparison (default 5)")
    parser.add_argument("--dir", type=Path, default=None, help="where to work (default: the temporary directory)")
    parser.add_argument("--loop-seconds", type=float, default=4.0, help="length of each training loop (default 4)")
    parser.add_argument("--without-ray", action="store_true", help="leave Ray out, though it is installed")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=given.dir) as scratch:
        bench = _Bench(Path(scratch), given.size, given.rounds, given.loop_seconds)
        where = f"20 tensors, {given.size / 1024**2:.0f} MiB, {mount_kind(bench.scratch)}, {os.cpu_count()} cores"
        print(f"{where}; medians of {given.rounds} rounds in turns")
        with _servant("holdfast", bench) as ours:
            _saved(bench, ours, with_ray=not given.without_ray and importlib.util.find_spec("ray") is not None)
            _changed(bench, ours)
            _slowed(bench, ours)
            _restored(bench, ours)
    print("\nEvery aim was met." if not bench.missed else f"\nMissed: {'; '.join(bench.missed)}.")
    return 1 if bench.missed else 0


@contextmanager
def _servant(system: str, bench: _Bench) -> Iterator[Servant]:
    servant = Servant(system, bench.scratch, bench.size_bytes)
    try:
        yield servant
    finally:
        servant.close()


def _saved(bench: _Bench, ours: Servant, with_ray: bool) -> None:
    import torch

    print(
        f"  the first two, which get the memory, kept training waiting for {ours.report()['stall_s']:.3f} s and ",
        end="",
    )
    print(f"{ours.report()['stall_s']:.3f} s")
    torch.set_num_threads(int(ours.hello["threads"]))
    state = make_state(bench.size_bytes)
    with ExitStack() as stack:
        others, floors = Others(bench.scratch, state), Floors(bench.scratch, list(state["model"].values()))
        stack.callback(others.close)

        def just_changed(work: Callable[[], Taken]) -> Callable[[], Taken]:
            """As after a step: torch's threads linger for a while, and the caches hold what was written last."""

            def changed() -> Taken:
                change(state, 1.0)
                return work()

            return changed

        contenders: dict[str, Callable[[], Taken]] = {
            _OURS: ours.report,
            _COPY: just_changed(floors.copied),
            _TORCH_COPY: just_changed(floors.copied_by_torch),
            _WRITE: lambda: floors.written(1),
            _WRITE_MORE: lambda: floors.written(4),
            "torch.save + fsync": just_changed(others.torch_save),
            "dcp.async_save": just_changed(others.async_save),
        }
        if with_ray:
            ray = stack.enter_context(_servant("ray", bench))
            contenders["Ray report, SYNC"] = lambda: ray.report("SYNC")
            contenders["Ray report, ASYNC"] = lambda: ray.report("ASYNC")
        medians = bench.race(contenders)
    bench.table("Training waits (stall)", medians, "stall_s", {_COPY: 1.3})
    peers = [figures["stall_s"] for name, figures in medians.items() if name not in (_OURS, *_FLOORS)]
    share = medians[_OURS]["stall_s"] / min(peers)
    print(f"  ours / nearest peer {share:.2f}{bench.judge('Stall, against the nearest peer', share, 0.1)}")
    bench.table("From the call until it is stored (Ray's without fsync)", medians, "durable_s", {_WRITE: 1.3})


def _changed(bench: _Bench, ours: Servant) -> None:
    print("\nOne tensor in ten changed since the last checkpoint")
    medians = bench.race({"some": lambda: ours.report(share=0.1), "all": lambda: ours.report(share=1.0)})
    records = list(read_records(open_store(ours.storage / "holdfast")))
    sent = [record.uploaded_bytes for record in records if isinstance(record, CheckpointCommitted)]
    share = statistics.median(sorted(sent)[: bench.rounds]) / bench.size_bytes
    print(f"  written {share:.1%} of the bytes{bench.judge('Bytes written, a tenth changed', share, 0.12)}")
    for name, figures in medians.items():
        print(f"  {name + ' changed':<38}{figures['durable_s']:8.3f} s until it is stored")


def _slowed(bench: _Bench, ours: Servant) -> None:
    for size_bytes in (bench.size_bytes, bench.size_bytes // 4):
        size = f"{size_bytes / 1024**2:.0f} MiB"
        print(f"\nA training loop on one core, with a snapshot of {size} each second")
        waits_s = {}
        for by, taken in _looped(bench, ours, size_bytes).items():
            slower, waits_s[by], queued = (
                statistics.median(one[key] for one in taken) for key in ("slower", "stall_s", "queued")
            )
            low, _, high = statistics.quantiles((one["slower"] for one in taken), n=4)
            line = f"  {by:<12}slower by {slower:6.1%} (half of the loops: {low:.1%} to {high:.1%}), waits"
            line += f" {waits_s[by]:.3f} s each time and {queued:.1%} of the time for a core"
            print(line + (bench.judge(f"Slowdown of a loop, {size}", slower, 0.05) if by == "holdfast" else ""))
        share = waits_s["holdfast"] / waits_s["async_save"]
        print(f"  ours / async_save {share:.2f}{bench.judge(f'Stall in a loop, {size}', share, 0.1)}")


def _looped(bench: _Bench, ours: Servant, size_bytes: int) -> dict[str, list[Taken]]:
    """Each loop is compared with the one without snapshots just before it: the machine is not the same for long."""
    taken: dict[str, list[Taken]] = {"holdfast": [], "async_save": []}
    for number in range(_LOOPS_PER_ROUND * bench.rounds + 1):
        rate = 0.0
        for by in ("nobody", *taken):
            settle(bench.scratch)
            figures = ours.ask(do="train", seconds=bench.loop_s, size_bytes=size_bytes, by=by)
            if by == "nobody":
                rate = figures["rate"]
            elif number:  # the first warms everything up
                taken[by].append({**figures, "slower": 1 - figures["rate"] / rate})
    return taken


def _restored(bench: _Bench, ours: Servant) -> None:
    import torch

    ours.report()
    newest = max((ours.storage / "holdfast").glob("checkpoint_*/.manifest.json")).parent
    plain = bench.scratch / "plain.pt"
    torch.save(Checkpoint(newest).load_state(), plain)

    def timed(work: Callable[[], object]) -> Taken:
        began = time.perf_counter()
        work()
        return {"restore_s": time.perf_counter() - began}

    medians = bench.race(
        {
            _OURS: lambda: {"restore_s": ours.die()["restored_s"]},
            "holdfast, from the directory": lambda: timed(lambda: _touched(Checkpoint(newest).load_state())),
            "torch.load": lambda: timed(lambda: torch.load(plain)),
        }
    )
    bench.table("Restored by a new worker (from memory), and from files in the page cache", medians, "restore_s", {})


def _touched(state: Any) -> None:
    """Mapped files are read when they are used: use them."""
    for tensor in state["model"].values():
        tensor.clone()


if __name__ == "__main__":
    raise SystemExit(main())
