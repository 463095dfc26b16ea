"""`make bench-train`: start, reports, recovery and weight of the training runtime, against Ray Train and torchrun.

All figures of a table come from one run on one machine, contenders taking turns; what counts are the ratios. The floor
is the least that could do the job: processes forked or spawned by hand, with nothing around them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import random
import re
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.contenders import ALL, OURS, Contender, clear, started

__all__ = ["main"]

Figures = dict[str, float]
_SETTLING_S = 4.0
"""How long training goes on before a worker is killed: nobody should be caught while still starting."""


def _first_line(contender: Contender, directory: Path) -> tuple[float, float]:
    """Seconds from the command to the first line of the training function, and to the end of the whole run."""
    with started(contender, "noop", directory) as run:
        line = run.until(lambda event: event["event"] == "line")
        run.process.wait()
        return line["at"] - run.began, time.time() - run.began


def _rate(scenario: str) -> Callable[[Contender, Path], float]:
    def measure(contender: Contender, directory: Path) -> float:
        with started(contender, scenario, directory) as run:
            return float(run.until(lambda event: event["event"] == "reports")["rate"])

    return measure


def _recovery(contender: Contender, directory: Path) -> float:
    """Seconds from SIGKILL of rank 1, at a random moment, to the next step of the new rank 1."""
    with started(contender, "steps", directory) as run:
        killed = run.until(lambda event: event["event"] == "step" and event["rank"] == 1 and event["step"] >= 60)
        time.sleep(_SETTLING_S + 2 * random.random())  # random: some contenders look only now and then
        killed_at = time.time()
        os.kill(killed["pid"], signal.SIGKILL)
        fresh = run.until(
            lambda event: event["event"] == "step" and event["rank"] == 1 and event["pid"] != killed["pid"]
        )
        return float(fresh["at"]) - killed_at


def _driver(contender: Contender, directory: Path) -> float:
    """Seconds from the second start to the first resumed step, after the driver was killed."""
    with started(contender, "steps", directory) as run:
        run.until(lambda event: event["event"] == "step" and event["step"] >= 60)
        os.kill(run.process.pid, signal.SIGKILL)
        clear(run.process)
    with started(contender, "steps", directory) as again:
        step = again.until(lambda event: event["event"] == "step" and event["at"] > again.began)
        return float(step["at"]) - again.began


def _third_step(contender: Contender, directory: Path) -> float:
    """Seconds from the command to the third step of the optimizer on both ranks: the first imports half of torch."""
    with started(contender, "steps", directory) as run:
        done = [run.until(lambda event, rank=rank: _is_third(event, rank)) for rank in range(2)]  # type: ignore[misc]
        return max(float(event["at"]) for event in done) - run.began


def _is_third(event: dict[str, Any], rank: int) -> bool:
    return bool(event["event"] == "step" and event["rank"] == rank and event["step"] == 2)


def _memory(contender: Contender, directory: Path) -> float:
    """MiB of everything that runs while two workers train."""
    with started(contender, "steps", directory) as run:
        run.until(lambda event: event["event"] == "step" and event["step"] >= 60)
        return run.memory_bytes() / 1024**2


def _installed_mib(root: str, extra: str = "") -> float:
    """Size of a distribution, with one of its extras, and all that it requires, as installed here."""
    seen: set[str] = set()
    queue, total = [root], 0
    while queue:
        name = re.sub(r"[-_.]+", "-", queue.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if name == "holdfast":
            total += sum(path.stat().st_size for path in Path("src").rglob("*.py"))
        for file in found.files or ():
            path = Path(str(file.locate()))
            total += path.stat().st_size if path.is_file() else 0
        wanted = [one for one in found.requires or () if "extra ==" not in one]
        if name == root and extra:
            wanted += [one for one in found.requires or () if re.search(rf"extra == ['\"]{extra}['\"]", one)]
        queue += [re.split(r"[ ;<>=!~\[(]", one)[0] for one in wanted]
    return total / 1024**2


def _table(
    title: str, unit: str, figures: Figures, *, more_is_better: bool = False, aims: Figures | None = None
) -> bool:
    """One comparison; returns whether our aims hold."""
    print(f"\n{title}")
    ours, fine = figures[OURS.name], True
    better = "as quick" if unit == "s" else "as small"
    for name, figure in figures.items():
        line = f"  {name:<34}{figure:12.2f} {unit}"
        if name != OURS.name:
            ratio = ours / figure if more_is_better else figure / ours
            line += f"   holdfast is {ratio:8.2f}x {'as many' if more_is_better else better}"
            if aims and name in aims:
                met = ratio >= aims[name]
                fine = fine and met
                line += f"   aim >= {aims[name]:.2f}: {'met' if met else 'MISSED'}"
        print(line, flush=True)
    return fine


def _measure(
    scenario: str,
    measure: Callable[[Contender, Path], float],
    rounds: int,
    scratch: Path,
    without: Sequence[str] = (),
) -> Figures:
    taken: dict[str, list[float]] = {}
    for number in range(rounds):
        for contender in ALL:
            if scenario in contender.scenarios and contender.name not in without:
                directory = scratch / f"{scenario}-{number}-{len(taken)}-{abs(hash(contender.name))}"
                taken.setdefault(contender.name, []).append(measure(contender, directory))
                shutil.rmtree(directory, ignore_errors=True)
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help=f"one scenario: {', '.join(_SCENARIOS)}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-train-") as name:
        scratch = Path(name)
        for scenario, run in _SCENARIOS.items():
            if options.only in (None, scenario):
                run(options.rounds, scratch)


def _show_start(rounds: int, scratch: Path) -> None:
    lines: dict[str, list[float]] = {}
    wholes: dict[str, list[float]] = {}
    for number in range(rounds):
        for contender in ALL:
            if "noop" in contender.scenarios:
                line_s, whole_s = _first_line(contender, scratch / f"noop-{number}-{contender.name}".replace(" ", "-"))
                lines.setdefault(contender.name, []).append(line_s)
                wholes.setdefault(contender.name, []).append(whole_s)
    first = {name: statistics.median(values) for name, values in lines.items()}
    whole = {name: statistics.median(values) for name, values in wholes.items()}
    _table(
        "From the command to the first line of the function, 2 torch workers",
        "s",
        first,
        aims=dict.fromkeys(("floor", "torchrun"), 1 / 0.65),
    )
    _table("A whole run that does nothing", "s", whole)


def _show_third_step(rounds: int, scratch: Path) -> None:
    figures = _measure("steps", _third_step, rounds, scratch, without=["floor"])  # its `steps` is a group of forks
    _table("From the command to the third optimizer step, 2 workers", "s", figures, aims={"torchrun": 1 / 0.75})


def _show_reports(rounds: int, scratch: Path) -> None:
    figures = _measure("reports", _rate("reports"), rounds, scratch)
    _table("Reports without a checkpoint, 2 workers", "/s", figures, more_is_better=True)
    print(f"  aim >= 10,000/s: {'met' if figures[OURS.name] >= 10_000 else 'MISSED'}")


def _show_checkpoints(rounds: int, scratch: Path) -> None:
    figures = _measure("checkpoints", _rate("checkpoints"), rounds, scratch)
    _table("Reports with a 1 KiB checkpoint, 1 worker", "/s", figures, more_is_better=True)


def _show_recovery(rounds: int, scratch: Path) -> None:
    figures = _measure("steps", _recovery, rounds, scratch)
    aims = {"Ray Train": 20.0, "Ray Train, polling every 10 ms": 20.0, "torchrun": 5.0, "floor": 0.5}
    _table("From SIGKILL of one of 2 workers to the next step", "s", figures, aims=aims)


def _show_driver(rounds: int, scratch: Path) -> None:
    figures = _measure("driver", _driver, rounds, scratch)
    _table("Driver killed, same command again, to the first resumed step", "s", figures, aims={"Ray Train": 6.0})


def _show_memory(rounds: int, scratch: Path) -> None:
    del rounds
    figures = {one.name: _memory(one, scratch / f"memory-{number}") for number, one in enumerate(ALL)}
    _table("Memory of everything while 2 workers train (PSS)", "MiB", figures, aims={"torchrun": 1 / 0.65})


def _show_size(rounds: int, scratch: Path) -> None:
    del rounds, scratch
    figures = {OURS.name: _installed_mib("holdfast"), "Ray Train": _installed_mib("ray", "train")}
    _table("Installed size with dependencies, without torch", "MiB", figures)


_SCENARIOS = {
    "noop": _show_start,
    "optimizer": _show_third_step,
    "reports": _show_reports,
    "checkpoints": _show_checkpoints,
    "steps": _show_recovery,
    "driver": _show_driver,
    "memory": _show_memory,
    "size": _show_size,
}


if __name__ == "__main__":
    main()
