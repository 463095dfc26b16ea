"""`make bench-tune`: trivial trials, two at a time, against Ray Tune and Optuna; the cost of a trial in small and large
experiments; and how long an experiment of many trials takes to be read back.

Each aim is printed as met or MISSED. Each experiment runs in a process of its own, in the same run of this program. Ray
Tune is asked for few trials only. It is found in this environment, or in the one whose interpreter BENCH_RAY_PYTHON
names; a peer that is not there is left out. Optuna runs its trials in threads of the driver, so its trials cost no
process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.checkpoint.claims import create_once
from holdfast.control.history import RUN_FILE
from holdfast.core import records as r
from holdfast.journal.writer import Journal
from holdfast.storage.posix.store import PosixStore

__all__ = ["Aims", "main", "measure", "restore_s", "write_experiment"]

_DRIVER = Path(__file__).with_name("drivers") / "trials.py"
_OURS = "holdfast"
_WITH_TORCH = "holdfast, torch"
_PEERS = {"Optuna, sqlite": "optuna", "Optuna, journal": "optuna", "Ray Tune": "ray"}
_RAY_LIMIT = 200
_DRIVER_CPU = "driver CPU a trial, ms"
_CHILDREN_CPU = "children's CPU a trial, ms"
_DEADLINE_S = 3600.0


def measure(system: str, trials: int, directory: Path) -> dict[str, Any]:
    """The figures of one experiment."""
    directory.mkdir(parents=True)
    command = [_python(system), str(_DRIVER), system, str(trials), str(directory)]
    environment = {**os.environ, "HOLDFAST_QUIET": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=_DEADLINE_S)
    if done.returncode != 0:
        raise RuntimeError(f"{system} with {trials} trials failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {
        "trials a second": trials / found["elapsed_s"],
        "after the first": (trials - 1) / max(1e-9, found["elapsed_s"] - found["first_s"]),
        "first result, s": found["first_s"],
        _DRIVER_CPU: 1000 * found["driver_cpu_s"] / trials,
        _CHILDREN_CPU: 1000 * found["children_cpu_s"] / trials,
        "driver memory, MB": found["driver_memory_mb"],
        "fsyncs a trial": found["fsyncs"] / trials,
        "state a trial, bytes": found["state_bytes"] / trials,
    }


def _python(system: str) -> str:
    return os.environ.get("BENCH_RAY_PYTHON", sys.executable) if system == "Ray Tune" else sys.executable


def _is_there(system: str) -> bool:
    check = [_python(system), "-c", f"import {_PEERS[system]}"]
    return subprocess.run(check, capture_output=True, check=False).returncode == 0


# ------------------------------------------------------------ reading back


def write_experiment(directory: Path, trials: int) -> None:
    """A finished experiment of so many trials, as its journal would be."""
    store = PosixStore(directory)
    identity = {"format": "holdfast.run/1.0", "id": "bench", "name": directory.name, "experiment": True}
    create_once(store, RUN_FILE, json.dumps(identity).encode())
    journal = Journal(store, 1, "0123456789abcdef")
    settings = {
        "seed": 1,
        "trainable": None,
        "space": {"x": {"$tune": "domain"}},
        "tune": {},
        "failure": {},
        "checkpoint": {},
    }
    journal.append([r.ExperimentStarted(at=1.0, epoch=1, host="h", pid=1, settings=settings)], "bench")
    for number in range(trials):
        trial, at = f"bench_{number:05d}", float(number)
        created = r.TrialCreated(
            at=at, trial=trial, config={"x": number / trials}, directory=f"trial_{trial}_x={number}", name=trial
        )
        journal.append([created], "bench")
        records: list[r.Record] = [
            r.ControllerStarted(at=at, epoch=1, host="h", pid=1, workers=1),
            r.AgentAdded(at=at, agent="local-1", host="h", slots=2),
            r.GenerationStarted(at=at, generation=1, world_size=1, agents=("local-1",), iteration=0),
            r.GenerationRunning(at=at, generation=1, pids={0: 100}),
            r.Reported(at=at, generation=1, iteration=1, metrics={"y": number / trials}),
            r.RunFinished(at=at),
        ]
        journal.append(records, trial)
        if number % 500 == 0:
            journal.flush()
    journal.flush()
    journal.close()


def restore_s(directory: Path) -> tuple[float, float]:
    """Time, and CPU time, until the machine of an experiment knows all that its journal tells."""
    from holdfast.tune.machine import ExperimentMachine, Policies
    from holdfast.tune.run_experiment import read_lines
    from holdfast.tune.schedulers.trial_scheduler import FIFOScheduler
    from holdfast.tune.search.basic_variant import BasicVariantGenerator
    from holdfast.tune.search.sample import uniform
    from holdfast.tune.search.searcher import configure_searcher

    searcher = BasicVariantGenerator()
    configure_searcher(searcher, None, None, {"x": uniform(0, 1)}, num_samples=1_000_000, seed=1)
    machine = ExperimentMachine("bench", Policies(searcher, FIFOScheduler()), lambda trial: (trial.trial_id, ""))
    began, cpu_began_s = time.monotonic(), time.process_time()
    _, lines = read_lines(PosixStore(directory))
    for line in lines:
        machine.apply(line.run, line.record)
    machine.resume()
    return time.monotonic() - began, time.process_time() - cpu_began_s


# ------------------------------------------------------------ the table


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, nargs="*", default=[50, 200, 2000], help="of the comparison")
    parser.add_argument("--cost", type=int, nargs="*", default=[100, 1000, 10_000], help="of ours alone")
    parser.add_argument("--torch", type=int, nargs="*", default=[200], help="of ours with torch imported")
    parser.add_argument("--restore", type=int, nargs="*", default=[1000, 10_000])
    options = parser.parse_args(arguments)
    aims = Aims()
    peers = [system for system in _PEERS if _is_there(system)]
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs", flush=True)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as root:
        for trials in options.trials:
            ours = measure(_OURS, trials, Path(root, f"ours-{trials}"))
            _show(_OURS, trials, ours)
            if trials == max(options.trials):
                aims.at_least(50, ours["trials a second"], f"trials a second of {trials}")
            for peer in peers:
                if peer == "Ray Tune" and trials > _RAY_LIMIT:
                    continue
                theirs = measure(peer, trials, Path(root, f"{peer}-{trials}"))
                ratio = ours["trials a second"] / theirs["trials a second"]
                _show(peer, trials, theirs, ratio)
                if peer == "Ray Tune" and trials == max(one for one in options.trials if one <= _RAY_LIMIT):
                    aims.at_least(75, ratio, f"times as fast as Ray Tune with {trials} trials")
                elif peer == "Optuna, sqlite" and trials == max(options.trials):
                    aims.at_least(2.5, ratio, f"times as fast as Optuna with sqlite with {trials} trials")
        for trials in options.torch:
            figures = measure(_WITH_TORCH, trials, Path(root, f"torch-{trials}"))
            _show(_WITH_TORCH, trials, figures)
            aims.at_least(30, figures["after the first"], f"trials a second of {trials} with torch, after the first")
        costs: dict[int, dict[str, Any]] = {}
        for trials in sorted(options.cost):
            costs[trials] = measure(_OURS, trials, Path(root, f"cost-{trials}"))
            _show(f"{_OURS}, cost", trials, costs[trials])
        _judge_costs(aims, costs)
        for trials in options.restore:
            place = Path(root, f"restore-{trials}")
            write_experiment(place, trials)
            elapsed_s, cpu_s = restore_s(place)
            print(f"restore of {trials:>6} trials: {elapsed_s:.2f} s, {cpu_s:.2f} s of CPU", flush=True)
            if trials == max(options.restore):
                aims.at_most(2.0, elapsed_s, f"seconds to restore {trials} trials")
    print(f"load {os.getloadavg()[0]:.1f}")
    print("\n".join(aims.lines))


class Aims:
    """What was aimed at, and whether it was met."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def at_least(self, aim: float, found: float, what: str) -> None:
        self._add(found >= aim, f"{found:.3g} {what} (aim: at least {aim:g})")

    def at_most(self, aim: float, found: float, what: str) -> None:
        self._add(found <= aim, f"{found:.3g} {what} (aim: at most {aim:g})")

    def _add(self, is_met: bool, text: str) -> None:
        self.lines.append(f"{'met   ' if is_met else 'MISSED'} {text}")


def _judge_costs(aims: Aims, costs: dict[int, dict[str, Any]]) -> None:
    """By CPU time, which other work on the machine disturbs little, and by time. The start, which small experiments pay
    for with few trials, is left out of both."""
    if not costs:
        return
    sizes = sorted(costs)
    large = costs[sizes[-1]]
    aims.at_most(2.0, large["fsyncs a trial"], f"fsyncs a trial of {sizes[-1]}")
    aims.at_most(1500, large["state a trial, bytes"], f"bytes of journal a trial of {sizes[-1]}")
    if len(sizes) > 2:
        spent = [(size, size * (costs[size][_DRIVER_CPU] + costs[size][_CHILDREN_CPU])) for size in sizes]
        first, last = (_slope(*pair) for pair in (spent[:2], spent[-2:]))
        text = f"times the CPU of a trial between {sizes[0]} and {sizes[1]} for one between {sizes[-2]} and {sizes[-1]}"
        aims.at_most(1.2, last / first, text)
    if len(sizes) > 1:
        ratio = costs[sizes[0]]["after the first"] / large["after the first"]
        aims.at_most(1.2, ratio, f"times the time of a trial of {sizes[0]} for one of {sizes[-1]}")


def _slope(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


def _show(system: str, trials: int, figures: dict[str, Any], ratio: float | None = None) -> None:
    told = "; ".join(f"{name} {value:.3g}" for name, value in figures.items())
    versus = f"; ours is {ratio:.2g} times as fast" if ratio is not None else ""
    print(f"{system:<16} {trials:>6} trials: {told}{versus}", flush=True)


if __name__ == "__main__":
    main()
