"""Trivial trials for `bench.ray_cluster` on Holdfast or on Ray Tune: `python tuner.py COUNT DIRECTORY holdfast|ray`."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

from bench.workload import Log

COUNT, DIRECTORY, SYSTEM = sys.argv[1:4]
tune: Any = importlib.import_module(f"{SYSTEM}.tune")


def trial(config: dict[str, Any]) -> dict[str, Any]:
    return {"score": config["x"] ** 2}


if SYSTEM == "ray":
    importlib.import_module("ray").init(log_to_driver=False, logging_level="ERROR")
tuner = tune.Tuner(
    trial,
    param_space={"x": tune.uniform(0, 1)},
    tune_config=tune.TuneConfig(num_samples=int(COUNT), metric="score", mode="max"),
    run_config=tune.RunConfig(name="search", storage_path=f"{DIRECTORY}/storage", verbose=0),
)
began = time.perf_counter()
tuner.fit()
Log(f"{DIRECTORY}/log").say("trials", rate=int(COUNT) / (time.perf_counter() - began))
