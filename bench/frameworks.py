"""`make bench-frameworks`: start and recovery of `examples/frameworks`, against Ray Train and a bare fork.

Start is from the command to the first report; recovery from SIGKILL of rank 1 to the first report of the group that
takes its place, so both hold an epoch of training. The floor is the same function, from the same checkpoint, in two
workers that were forked from a process which had imported everything.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.contenders import Contender, started

__all__ = ["main"]

_ROOT = Path(__file__).parents[1]
_EXAMPLES = _ROOT / "examples" / "frameworks"
_DRIVERS = Path(__file__).with_name("drivers")
_ALL = ("lightning", "transformers", "accelerate", "xgboost", "lightgbm", "jax", "fsdp2", "torch_compile")
_IN_RAY = frozenset({"lightning", "transformers", "accelerate", "xgboost", "lightgbm"})
"""The others save with `Checkpoint.from_state`, which Ray has not, or need JAX's processes on CPUs to be joined."""
_RAY = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}


def _contender(system: str) -> Contender:
    def command(framework: str, directory: Path) -> list[str]:
        script = _EXAMPLES / f"train_{framework}.py"
        return [sys.executable, str(_DRIVERS / "framework.py"), system, str(script), str(directory)]

    return Contender(system, frozenset(_ALL), command, _RAY if system == "ray" else {"HOLDFAST_QUIET": "1"})


def _start_and_recovery(system: str, framework: str, directory: Path) -> tuple[float, float]:
    with started(_contender(system), framework, directory) as run:
        first = run.until(lambda event: event["event"] == "report")
        killed = run.until(lambda event: event["event"] == "kill")
        fresh = run.until(
            lambda event: event["event"] == "report" and event["at"] > killed["at"] and event["count"] == 1
        )
        return float(first["at"]) - run.began, float(fresh["at"]) - float(killed["at"])


def _floor(framework: str, checkpoint: Path) -> float:
    script = _EXAMPLES / f"train_{framework}.py"
    command = [sys.executable, str(_DRIVERS / "framework_floor.py"), str(script), str(checkpoint)]
    environment = os.environ | {"PYTHONPATH": str(_ROOT)}
    with tempfile.TemporaryDirectory() as work:
        done = subprocess.run(
            command,
            env=environment,
            cwd=work,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=180,
        )
    return float(done.stdout.split()[-1])


def _measure(framework: str, rounds: int, with_ray: bool, directory: Path) -> dict[str, tuple[float, float]]:
    taken: dict[str, list[tuple[float, float]]] = {}
    for number in range(rounds):
        for system in ("holdfast", "ray") if with_ray and framework in _IN_RAY else ("holdfast",):
            print(f"{framework}: round {number + 1} of {rounds}, {system}", file=sys.stderr)
            where = directory / f"{framework}_{system}_{number}"
            taken.setdefault(system, []).append(_start_and_recovery(system, framework, where))
            if system == "holdfast":
                checkpoint = sorted((where / "storage" / "run").glob("checkpoint_*"))[0]
                taken.setdefault("floor", []).append((float("nan"), _floor(framework, checkpoint)))
            shutil.rmtree(where, ignore_errors=True)
    return {
        system: (statistics.median(start for start, _ in found), statistics.median(again for _, again in found))
        for system, found in taken.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-ray", action="store_true")
    parser.add_argument("frameworks", nargs="*", default=_ALL)
    args = parser.parse_args()
    print("| script | start | Ray's start | recovery | floor | recovery / floor | Ray's recovery | Ray's / ours |")
    print("|---|---|---|---|---|---|---|---|")
    for framework in args.frameworks:
        with tempfile.TemporaryDirectory(prefix="bench_frameworks_") as directory:
            found = _measure(framework, args.rounds, not args.without_ray, Path(directory))
        start, again = found["holdfast"]
        floor = found["floor"][1]
        ray = found.get("ray")
        cells = [
            framework,
            f"{start:.1f} s",
            f"{ray[0]:.1f} s" if ray else "-",
            f"{again:.2f} s",
            f"{floor:.2f} s",
            f"{again / floor:.2f}",
            f"{ray[1]:.1f} s" if ray else "-",
            f"{ray[1] / again:.0f}x" if ray else "-",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
