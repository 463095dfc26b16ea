"""One experiment of trivial trials, two at a time, on one system: `trials.py SYSTEM TRIALS DIRECTORY` prints figures.

Each trial reports a number once. `first_s` is from the call to the first trial's end, as the trial notes it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(system: str, trials: int, directory: Path) -> dict[str, Any]:
    """Run it, and measure."""
    mark = directory / "first"
    synced = _count_syncs()
    began, cpu_began_s = time.monotonic(), time.process_time()
    _SYSTEMS[system](trials, directory, mark)
    elapsed_s = time.monotonic() - began
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "elapsed_s": elapsed_s,
        "first_s": float(mark.read_text()) - began,
        "driver_cpu_s": time.process_time() - cpu_began_s,
        "children_cpu_s": children.ru_utime + children.ru_stime,
        "driver_memory_mb": own.ru_maxrss / 1024,
        "fsyncs": len(synced),
        "state_bytes": _state_bytes(system, directory),
    }


def _count_syncs() -> list[None]:
    synced: list[None] = []
    for name in ("fsync", "fdatasync"):
        setattr(os, name, _counting(getattr(os, name), synced))
    return synced


def _counting(sync: Callable[[int], None], synced: list[None]) -> Callable[[int], None]:
    def counted(fd: int) -> None:
        synced.append(None)
        sync(fd)

    return counted


def _note(mark: str) -> None:
    if not Path(mark).exists():
        Path(mark).write_text(str(time.monotonic()))


def _holdfast(trials: int, directory: Path, mark: Path) -> None:
    from holdfast import tune

    def trial(config: dict[str, Any]) -> None:
        tune.report({"y": config["x"]})
        _note(config["mark"])

    tune.Tuner(
        trial,
        param_space={"x": tune.uniform(0, 1), "mark": str(mark)},
        tune_config=tune.TuneConfig(num_samples=trials, max_concurrent_trials=2),
        run_config=tune.RunConfig(name="trials", storage_path=str(directory)),
    ).fit()


def _holdfast_torch(trials: int, directory: Path, mark: Path) -> None:
    import torch

    from holdfast import tune

    def trial(config: dict[str, Any]) -> None:
        tune.report({"y": float(torch.tensor(config["x"]) * 2)})
        _note(config["mark"])

    tune.Tuner(
        trial,
        param_space={"x": tune.uniform(0, 1), "mark": str(mark)},
        tune_config=tune.TuneConfig(num_samples=trials, max_concurrent_trials=2),
        run_config=tune.RunConfig(name="trials", storage_path=str(directory)),
    ).fit()


def _ray(trials: int, directory: Path, mark: Path) -> None:
    import ray
    from ray import tune

    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")

    def trial(config: dict[str, Any]) -> None:
        tune.report({"y": config["x"]})
        _note(config["mark"])

    tune.Tuner(
        trial,
        param_space={"x": tune.uniform(0, 1), "mark": str(mark)},
        tune_config=tune.TuneConfig(num_samples=trials, max_concurrent_trials=2),
        run_config=tune.RunConfig(name="trials", storage_path=str(directory), verbose=0),
    ).fit()


def _optuna(trials: int, storage: Any, mark: Path) -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def objective(trial: Any) -> float:
        x = float(trial.suggest_float("x", 0, 1))
        _note(str(mark))
        return x

    sampler = optuna.samplers.RandomSampler(seed=1)
    optuna.create_study(storage=storage, sampler=sampler).optimize(objective, n_trials=trials, n_jobs=2)


def _optuna_sqlite(trials: int, directory: Path, mark: Path) -> None:
    _optuna(trials, f"sqlite:///{directory}/study.db", mark)


def _optuna_journal(trials: int, directory: Path, mark: Path) -> None:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    _optuna(trials, JournalStorage(JournalFileBackend(str(directory / "study.log"))), mark)


_SYSTEMS = {
    "holdfast": _holdfast,
    "holdfast, torch": _holdfast_torch,
    "Ray Tune": _ray,
    "Optuna, sqlite": _optuna_sqlite,
    "Optuna, journal": _optuna_journal,
}


def _state_bytes(system: str, directory: Path) -> int:
    """What the experiment's own state takes, without the trials' directories."""
    top = directory / "trials"
    if system.startswith("holdfast"):
        found = [*(top / "journal").glob("*")]
    elif system == "Ray Tune":
        found = [path for path in top.iterdir() if path.is_file()]
    else:
        found = [*directory.glob("study.*")]
    return sum(path.stat().st_size for path in found)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))), flush=True)
    os._exit(0)  # Ray's processes end with this one
