"""`make bench-ray`: runs on a Ray cluster of three nodes, against Ray Train and Ray Tune on the same cluster.

The nodes are raylets on this machine, each with a loopback address of its own. All figures are of one run, contenders
taking turns; what counts are the ratios.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.contenders import Contender, Run, started

__all__ = ["main"]

_ROOT = Path(__file__).parents[1]
_DRIVERS = Path(__file__).with_name("drivers")
_SETTLING_S = 6.0
"""After the 60th step: Ray Train and our zygotes and spares have done by then what they do in the background."""
_PLENTY_S = 0.5
"""What start-up may take besides creating actors and importing torch."""
_QUIET = {"HOLDFAST_QUIET": "1", "RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
Figures = dict[str, list[float]]


class _Cluster:
    """A head and two nodes with a CPU each: room for two workers, and one node to spare."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._number = 2
        self._cluster = Cluster(initialize_head=True, head_node_args=self._node(include_dashboard=False))
        self.address = str(self._cluster.address)
        self.head_pid = int(self._cluster.head_node.all_processes["raylet"][0].process.pid)
        self.add_node()
        self.add_node()

    def _node(self, **more: Any) -> dict[str, Any]:
        self._number += 1
        return {"num_cpus": 1, "node_ip_address": f"127.0.0.{self._number - 1}", **more}

    def add_node(self) -> None:
        self._cluster.add_node(**self._node())

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def _cluster() -> Iterator[_Cluster]:
    made = _Cluster()
    try:
        yield made
    finally:
        made.close()


def _contenders(program: str, address: str, **more: str) -> list[Contender]:
    def command(system: str) -> Callable[[str, Path], list[str]]:
        return lambda scenario, directory: [
            *(sys.executable, str(_DRIVERS / program), scenario, str(directory), system),
        ]

    environment = {**_QUIET, "RAY_ADDRESS": address, "PYTHONPATH": os.environ["PYTHONPATH"], **more}
    return [
        Contender("holdfast", frozenset(), command("holdfast"), {**environment, "HOLDFAST_ENGINE": "ray"}),
        Contender("Ray", frozenset(), command("ray"), environment),
    ]


def _ancestor(pid: int, name: str) -> int:
    """The process above this one that calls itself so."""
    while pid > 1:
        stat = Path(f"/proc/{pid}/stat").read_text()
        if stat.partition("(")[2].rpartition(")")[0] == name:
            return pid
        pid = int(stat.rpartition(")")[2].split()[1])
    raise LookupError(name)


def _start(contender: Contender, directory: Path) -> float:
    """Seconds from `fit()` to the first line of the function, in a process that is connected to the cluster."""
    with started(contender, "noop", directory) as run:
        began = run.until(lambda event: event["event"] == "fit")
        return float(run.until(lambda event: event["event"] == "line")["at"]) - float(began["at"])


def _killed_worker(contender: Contender, directory: Path) -> float:
    """Seconds from SIGKILL of a worker to the next step of the new one."""
    with started(contender, "steps", directory) as run:
        step = _settled(run)
        workers, killed_at = _workers(run), time.time()
        os.kill(step["pid"], signal.SIGKILL)
        return _next_step(run, workers) - killed_at


def _killed_raylet(cluster: _Cluster) -> Callable[[Contender, Path], float]:
    def measure(contender: Contender, directory: Path) -> float:
        """Seconds from SIGKILL of a node's raylet to the next step of the workers that go on."""
        with started(contender, "steps", directory) as run:
            step = _settled(run, lambda event: _ancestor(event["pid"], "raylet") != cluster.head_pid)
            raylet = _ancestor(step["pid"], "raylet")
            workers, killed_at = _workers(run), time.time()
            os.kill(raylet, signal.SIGKILL)
            found = _next_step(run, workers) - killed_at
        cluster.add_node()
        return found

    return measure


def _settled(run: Run, condition: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any]:
    step = run.until(lambda event: event["event"] == "step" and event["step"] >= 60 and condition(event))
    time.sleep(_SETTLING_S)
    return step


def _workers(run: Run) -> set[int]:
    return {event["pid"] for event in run.events() if event["event"] == "step"}


def _next_step(run: Run, before: set[int]) -> float:
    """When the first worker has made a step that is not one of those."""
    fresh = run.until(lambda event: event["event"] == "step" and event["pid"] not in before)
    return float(fresh["at"])


def _trials(count: int) -> Callable[[Contender, Path], float]:
    def measure(contender: Contender, directory: Path) -> float:
        with started(contender, str(count), directory) as run:
            return float(run.until(lambda event: event["event"] == "trials")["rate"])

    return measure


def _take_turns(
    contenders: list[Contender], measure: Callable[[Contender, Path], float], rounds: int, scratch: Path
) -> dict[str, float]:
    taken: Figures = {}
    for number in range(rounds):
        for contender in contenders:
            directory = scratch / f"{len(list(scratch.iterdir()))}-{number}"
            taken.setdefault(contender.name, []).append(measure(contender, directory))
    return {name: statistics.median(values) for name, values in taken.items()}


def _actor_creation_s(address: str) -> float:
    """Seconds to place two bundles and have an actor answer in each."""
    program = f"""
import ray, time
ray.init(address={address!r}, log_to_driver=False, logging_level="ERROR")
from ray.util import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as In
class Actor:
    def ping(self): return 1
began = time.perf_counter()
group = placement_group([{{"CPU": 1}}] * 2, strategy="SPREAD")
actors = [ray.remote(Actor).options(num_cpus=1, scheduling_strategy=In(group, n)).remote() for n in range(2)]
ray.get([one.ping.remote() for one in actors])
print(time.perf_counter() - began)
"""
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


def _import_torch_s() -> float:
    program = "import time; t = time.perf_counter(); import torch; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


def _show(
    title: str, unit: str, figures: dict[str, float], aim: float | None = None, contender: str = "holdfast"
) -> None:
    ours, peer = figures[contender], figures["Ray"]
    ratio = peer / ours if unit == "s" else ours / peer
    told = "" if aim is None else f"   aim >= {aim:g}: {'met' if ratio >= aim else 'MISSED'}"
    print(f"\n{title}")
    print(f"  holdfast {ours:8.2f} {unit}   Ray {peer:8.2f} {unit}   {ratio:.1f}x{told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--only", choices=["start", "worker", "node", "smaller", "trials"])
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT), str(_ROOT / "src")])
    with tempfile.TemporaryDirectory(prefix="bench-ray-") as name, _cluster() as cluster:
        scratch, rounds = Path(name), options.rounds
        trainers = _contenders("trainer.py", cluster.address)
        print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs")
        if options.only in (None, "start"):
            creation_s, torch_s = _actor_creation_s(cluster.address), _import_torch_s()
            figures = _take_turns(trainers, _start, rounds, scratch)
            _show("From fit() to the first line of the function, 2 workers on 2 nodes", "s", figures)
            over_s = figures["holdfast"] - creation_s - torch_s
            print(
                f"  {creation_s:.2f} s to create actors, {torch_s:.2f} s to import torch, {over_s:.2f} s over both   "
                f"aim <= {_PLENTY_S}: {'met' if over_s <= _PLENTY_S else 'MISSED'}"
            )
        if options.only in (None, "worker"):
            _show(
                "From SIGKILL of a worker to its next step",
                "s",
                _take_turns(trainers, _killed_worker, rounds, scratch),
                50,
            )
        if options.only in (None, "node"):
            (spared, _) = _contenders("trainer.py", cluster.address, BENCH_SPARE="1")
            spared = replace(spared, name="spare")
            figures = _take_turns([*trainers, spared], _killed_raylet(cluster), rounds, scratch)
            _show("From SIGKILL of a raylet to the next step, on another node", "s", figures, 3)
            _show("The same with spares=1, on the prepared agent", "s", figures, 20, "spare")
        if options.only in (None, "smaller"):
            elastic = _contenders("trainer.py", cluster.address, BENCH_ELASTIC="1")
            figures = _take_turns(elastic, _killed_raylet(cluster), rounds, scratch)
            _show("From SIGKILL of a raylet to the next step of elastic runs, in the smaller world", "s", figures, 20)
        if options.only in (None, "trials"):
            tuners = _contenders("tuner.py", cluster.address)
            figures = _take_turns(tuners, _trials(options.trials), rounds, scratch)
            _show(f"{options.trials} trivial trials", "trials/s", figures)


if __name__ == "__main__":
    main()
