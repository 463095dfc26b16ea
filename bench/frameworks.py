"""`make bench-frameworks`: start and recovery of `examples/frameworks`, against a peer and a bare fork.

Start is from the command to rank 0's first step; recovery from SIGKILL of rank 1 to the first step of the group that
takes its place. The peer is Ray Train with the same script, `holdfast` replaced by `ray`, or torchrun with the same
script, where Ray cannot run it. The floor is the same function, from the same checkpoint, in two workers that were
forked from a process which had imported everything.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bench.contenders import Contender, started

__all__ = ["main"]

_ROOT = Path(__file__).parents[1]
_EXAMPLES = _ROOT / "examples" / "frameworks"
_DRIVERS = Path(__file__).with_name("drivers")
_TIMEOUT_S = 150.0
"""For a start and a recovery, with any system."""
_RAY, _TORCHRUN = "Ray Train", "torchrun"
_PEERS = {
    "lightning": _RAY,
    "transformers": _RAY,
    "accelerate": _RAY,
    "xgboost": _RAY,
    "lightgbm": _RAY,
    # These save with `Checkpoint.from_state`, which Ray has not; nor does its JaxTrainer join processes on CPUs.
    "jax": _TORCHRUN,
    "fsdp2": _TORCHRUN,
    "torch_compile": _TORCHRUN,
}


class Figures(NamedTuple):
    """In seconds; NaN where there is none."""

    start_s: float
    recovery_s: float


def _driver(system: str, framework: str, directory: Path) -> list[str]:
    return [str(_DRIVERS / "framework.py"), system, str(_EXAMPLES / f"train_{framework}.py"), str(directory)]


def _torchrun(framework: str, directory: Path) -> list[str]:
    options = ["--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    return [sys.executable, "-m", "torch.distributed.run", *options, *_driver("torchrun", framework, directory)]


_EVERY = frozenset(_PEERS)
_OURS = Contender(
    "holdfast", _EVERY, lambda name, there: [sys.executable, *_driver("holdfast", name, there)], {"HOLDFAST_QUIET": "1"}
)
_CONTENDERS = {
    _RAY: Contender(
        _RAY,
        _EVERY,
        lambda name, there: [sys.executable, *_driver("ray", name, there)],
        {
            "RAY_TRAIN_V2_ENABLED": "1",
            "RAY_worker_niceness": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
        },
    ),
    # Without the setting its restarts fail with gloo: this is its better figure.
    _TORCHRUN: Contender(
        _TORCHRUN, _EVERY, _torchrun, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "HOLDFAST_QUIET": "1"}
    ),
}


def _start_and_recovery(contender: Contender, framework: str, directory: Path) -> Figures:
    deadline = time.monotonic() + _TIMEOUT_S
    with started(contender, framework, directory) as run:

        def step_after(earliest: float) -> float:
            step = run.until(
                lambda event: event["event"] == "step" and event["rank"] == 0 and event["at"] > earliest,
                deadline - time.monotonic(),
            )
            return float(step["at"])

        first = step_after(run.began)
        kill = run.until(lambda event: event["event"] == "kill", deadline - time.monotonic())
        killed = float(kill["at"])
        return Figures(first - run.began, step_after(killed) - killed)


def _floor(framework: str, checkpoint: Path) -> Figures:
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
            timeout=_TIMEOUT_S,
        )
    return Figures(float("nan"), float(done.stdout.split()[-1]))


class _Rounds:
    """The figures of each system for one script; a system that failed is not tried again."""

    def __init__(self, framework: str) -> None:
        self._framework = framework
        self._taken: dict[str, list[Figures]] = {}
        self.failed: set[str] = set()

    def add(self, system: str, measure: Callable[..., Figures], *args: object) -> bool:
        """Whether there is a figure more."""
        if system in self.failed:
            return False
        try:
            self._taken.setdefault(system, []).append(measure(*args))
        except (RuntimeError, TimeoutError, subprocess.SubprocessError) as error:
            print(f"{self._framework}, {system}: {error}", file=sys.stderr)
            self.failed.add(system)
        return system not in self.failed

    def median(self, system: str) -> Figures | None:
        if system in self.failed or system not in self._taken:
            return None
        starts, recoveries = zip(*self._taken[system], strict=True)
        return Figures(statistics.median(starts), statistics.median(recoveries))


def _measure(framework: str, rounds: int, with_peers: bool, directory: Path) -> _Rounds:
    taken = _Rounds(framework)
    for number in range(rounds):
        print(f"{framework}: round {number + 1} of {rounds}", file=sys.stderr)
        ours, theirs = directory / f"ours_{number}", directory / f"theirs_{number}"
        if taken.add("ours", _start_and_recovery, _OURS, framework, ours):
            checkpoint = min((ours / "storage" / "run").glob("checkpoint_*"))
            taken.add("floor", _floor, framework, checkpoint)
        if with_peers:
            taken.add("peer", _start_and_recovery, _CONTENDERS[_PEERS[framework]], framework, theirs)
        for place in (ours, theirs):
            shutil.rmtree(place, ignore_errors=True)
    return taken


def _row(framework: str, taken: _Rounds) -> list[str]:
    ours, floor, peer = (taken.median(system) for system in ("ours", "floor", "peer"))

    def seconds(system: str, value: float | None, digits: int) -> str:
        return "failed" if system in taken.failed else "-" if value is None else f"{value:.{digits}f} s"

    def ratio(above: float | None, below: float | None, digits: int) -> str:
        return f"{above / below:.{digits}f}" if above is not None and below is not None else "-"

    again = ours and ours.recovery_s
    return [
        framework,
        seconds("ours", ours and ours.start_s, 1),
        seconds("ours", again, 2),
        seconds("floor", floor and floor.recovery_s, 2),
        ratio(again, floor and floor.recovery_s, 2),
        _PEERS[framework],
        seconds("peer", peer and peer.start_s, 1),
        ratio(peer and peer.start_s, ours and ours.start_s, 1),
        seconds("peer", peer and peer.recovery_s, 1),
        ratio(peer and peer.recovery_s, again, 1),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("frameworks", nargs="*", default=list(_PEERS), metavar="FRAMEWORK")
    args = parser.parse_args()
    titles = ["script", "start", "recovery", "bare fork", "recovery / bare fork"]
    titles += ["peer", "its start", "its / our start", "its recovery", "its / our recovery"]
    print("| " + " | ".join(titles) + " |")
    print("|" + "---|" * len(titles))
    for framework in args.frameworks:
        with tempfile.TemporaryDirectory(prefix="bench_frameworks_") as directory:
            taken = _measure(framework, args.rounds, not args.without_peers, Path(directory))
        print("| " + " | ".join(_row(framework, taken)) + " |", flush=True)


if __name__ == "__main__":
    main()
