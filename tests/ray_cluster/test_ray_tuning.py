"""Experiments whose trials differ in size, are gangs, or share GPUs, on a Ray cluster of three nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs import processes
from tests.ray_cluster.conftest import RayCluster
from tests.ray_cluster.jobs import meet

from holdfast import train, tune
from holdfast.train import DataParallelTrainer, RunConfig, ScalingConfig

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]


@pytest.fixture(autouse=True)
def nothing_left(cluster: RayCluster) -> Iterator[None]:
    """No agent, zygote or worker outlives its experiment, and nothing stays reserved."""
    yield
    marker = f"HOLDFAST_LOCAL_CACHE_DIR={cluster.root / 'cache'}"
    ours = [pid for pid in processes.with_environment(marker) if processes.name_of(pid).startswith("hf-")]
    processes.wait_gone(*ours)

    import ray

    def is_free() -> bool:
        free = ray.available_resources()
        return bool(free.get("CPU") == 5 and free.get("GPU") == 4)

    processes.wait_until(is_free, "all resources are given back")


def test_trials_of_different_sizes_are_gangs_on_several_nodes(cluster: RayCluster, tmp_path: Path) -> None:
    """Of 5 CPUs, 3 workers and 2 workers at once, which no node holds alone."""

    def loop(config: dict[str, Any]) -> dict[str, Any]:
        meet(config["meet"], 5)
        context = train.get_context()
        train.report({"size": context.get_world_size(), "score": config["x"] * context.get_world_size()})
        return {"node": os.environ["TEST_NODE"]}

    trainer = DataParallelTrainer(
        loop,
        train_loop_config={"meet": str(tmp_path / "meet")},
        run_config=RunConfig(name="gangs", storage_path=str(tmp_path)),
    )
    tuner = tune.Tuner(
        trainer,
        param_space={
            "scaling_config": tune.grid_search([ScalingConfig(num_workers=2), ScalingConfig(num_workers=3)]),
            "train_loop_config": {"x": 10},
        },
        tune_config=tune.TuneConfig(metric="score", mode="max", max_concurrent_trials=2),
        run_config=tune.RunConfig(name="sizes", storage_path=str(tmp_path)),
    )
    results = tuner.fit()
    assert [one.error for one in results] == [None, None]
    assert sorted((one.metrics or {})["size"] for one in results) == [2, 3]
    assert (results.get_best_result().metrics or {})["score"] == 30


def test_trials_share_gpus_by_fractions(cluster: RayCluster, tmp_path: Path) -> None:
    """Four GPUs hold eight trials at once, of half of one each, and each sees one GPU."""
    place = str(tmp_path / "meet")

    def trial(config: dict[str, Any]) -> dict[str, Any]:
        meet(place, 8)
        return {"gpus": os.environ["CUDA_VISIBLE_DEVICES"], "node": os.environ["TEST_NODE"]}

    tuner = tune.Tuner(
        tune.with_resources(trial, {"gpu": 0.5}),
        param_space={"x": tune.grid_search(list(range(8)))},
        tune_config=tune.TuneConfig(metric="gpus", mode="max"),
        run_config=tune.RunConfig(name="halves", storage_path=str(tmp_path)),
    )
    results = tuner.fit()
    assert [one.error for one in results] == [None] * 8
    seen = sorted(((one.metrics or {})["node"], (one.metrics or {})["gpus"]) for one in results)
    assert seen == sorted([(node, gpu) for node in ("1", "2") for gpu in ("0", "1")] * 2)


def test_trials_of_whole_gpus_get_different_ones(cluster: RayCluster, tmp_path: Path) -> None:
    place = str(tmp_path / "meet")

    def trial(config: dict[str, Any]) -> dict[str, Any]:
        meet(place, 4)
        return {"gpus": os.environ["CUDA_VISIBLE_DEVICES"], "node": os.environ["TEST_NODE"]}

    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": 1, "gpu": 1}),
        param_space={"x": tune.grid_search(list(range(4)))},
        tune_config=tune.TuneConfig(metric="gpus", mode="max"),
        run_config=tune.RunConfig(name="whole", storage_path=str(tmp_path)),
    )
    seen = sorted(((one.metrics or {})["node"], (one.metrics or {})["gpus"]) for one in tuner.fit())
    assert seen == [(node, gpu) for node in ("1", "2") for gpu in ("0", "1")]
