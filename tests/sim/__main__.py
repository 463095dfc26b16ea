"""`python -m tests.sim --seeds 2000` runs many seeds; `python -m tests.sim --seed 1234 --trace` shows one."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable

from tests.sim.simulation import Simulation

__all__ = ["main", "run_seeds"]


def run_seeds(seeds: Iterable[int]) -> Counter[str]:
    """How the runs ended. The first seed that breaks a promise raises, with the command that replays it."""
    endings: Counter[str] = Counter()
    for seed in seeds:
        simulation = Simulation(seed)
        try:
            endings[simulation.run()] += 1
        except Exception as error:
            what = error if isinstance(error, AssertionError) else repr(error)
            raise AssertionError(
                f"Seed {seed}: {what}\nReplay it with: python -m tests.sim --seed {seed} --trace"
            ) from error
    return endings


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many seeds to run")
    parser.add_argument("--start", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--trace", action="store_true", help="show everything that happens")
    asked = parser.parse_args(arguments)
    if asked.seed is not None:
        simulation = Simulation(asked.seed, asked.trace)
        print(f"{simulation.scenario}")
        print(f"{simulation.run()} after {simulation.loop.time():.1f} virtual seconds")
        return 0
    began = time.process_time()
    try:
        endings = run_seeds(range(asked.start, asked.start + asked.seeds))
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    counts = ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items()))
    print(f"{asked.seeds} seeds: {counts}; {time.process_time() - began:.1f} s of CPU.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
