"""Nodes of a Ray cluster whose raylet is killed. The head does not notice, so nothing here can wait for Ray."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs import processes
from tests.ray_cluster.conftest import RayCluster
from tests.ray_cluster.jobs import steps

from holdfast.cli.main import main
from holdfast.control.history import read_records
from holdfast.core import records as r
from holdfast.storage.locate import open_store
from holdfast.train import DataParallelTrainer, FailureConfig, Result, RunConfig, ScalingConfig

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]


@pytest.fixture
def cluster(cluster_root: Path) -> Iterator[RayCluster]:
    """Three nodes with a CPU each, and a head that does not notice when a node dies."""
    made = RayCluster(cluster_root, _system_config={"health_check_initial_delay_ms": 10**8})
    try:
        for _ in range(2):
            made.add_node(num_cpus=1)
        made.connect()
        yield made
        marker = f"HOLDFAST_LOCAL_CACHE_DIR={cluster_root / 'cache'}"
        ours = [pid for pid in processes.with_environment(marker) if processes.name_of(pid).startswith("hf-")]
        processes.wait_gone(*ours)
    finally:
        made.close()


def _fit(path: Path, config: dict[str, Any], **scaling: Any) -> Result:
    (path / "nodes").mkdir()
    return DataParallelTrainer(
        steps,
        train_loop_config={
            "steps": 5,
            "run_directory": str(path / "run"),
            "kill": "raylet",
            "kill_at": 3,
            "killed_file": str(path / "killed"),
            "nodes_directory": str(path / "nodes"),
            **config,
        },
        scaling_config=ScalingConfig(placement_strategy="STRICT_SPREAD", **scaling),
        run_config=RunConfig(name="run", storage_path=path, failure_config=FailureConfig(max_failures=3)),
    ).fit()


def _sizes(path: Path) -> list[int]:
    found = read_records(open_store(path / "run"))
    return [one.world_size for one in found if isinstance(one, r.GenerationStarted)]


def _alive() -> int:
    import ray

    return sum(node["Alive"] for node in ray.nodes())


def test_a_lost_node_is_replaced_before_ray_has_noticed(cluster: RayCluster, tmp_path: Path) -> None:
    result = _fit(tmp_path, {}, num_workers=2)
    first = (result.metrics or {})["resumed_from"]
    assert first > 0 and _sizes(tmp_path) == [2, 2] and _alive() == 3
    nodes = {one.read_text() for one in (tmp_path / "nodes").glob(f"{first}-*")}
    assert len(nodes) == 2 and (tmp_path / "killed").read_text() not in nodes


def test_an_elastic_run_goes_on_before_ray_has_noticed(cluster: RayCluster, tmp_path: Path) -> None:
    result = _fit(tmp_path, {}, num_workers=(1, 3), last_call_timeout=30.0)
    assert (result.metrics or {})["resumed_from"] > 0
    assert _sizes(tmp_path) == [3, 2] and _alive() == 3


def test_a_run_without_room_gets_the_node_that_is_added(cluster: RayCluster, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(_fit, tmp_path, {}, num_workers=3)
        processes.wait_until((tmp_path / "killed").exists, "the raylet was killed", within_s=90)
        cluster.add_node(num_cpus=1)
        assert (run.result(120).metrics or {})["resumed_from"] > 0
    assert _sizes(tmp_path) == [3, 3]


def test_a_prepared_spare_takes_the_place_of_a_lost_node(
    cluster: RayCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, enough = str(tmp_path / "run"), tmp_path / "kill"

    def spares() -> list[str]:
        capsys.readouterr()
        if main(["status", run, "--json"]):
            return []
        return [one["agent"] for one in json.loads(capsys.readouterr().out).get("agents", []) if one.get("spare")]

    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(_fit, tmp_path, {"kill_when": str(enough)}, num_workers=2, spares=1)
        try:
            processes.wait_until((tmp_path / "killed").exists, "a rank is about to kill", within_s=90)
            processes.wait_until(spares, "a spare is prepared")
            (spare,) = spares()
        finally:
            enough.touch()
        assert (result.result(120).metrics or {})["resumed_from"] > 0
    records = list(read_records(open_store(run)))
    _, second = (one for one in records if isinstance(one, r.GenerationStarted))
    (lost,) = (one for one in records if isinstance(one, r.AgentRemoved))
    assert spare in second.agents and lost.agent not in second.agents
    since_loss = records[records.index(lost) : records.index(second)]
    assert not [one for one in since_loss if isinstance(one, r.AgentAdded)], "nothing was started for it"
