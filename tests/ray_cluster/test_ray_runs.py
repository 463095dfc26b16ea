"""Runs on a Ray cluster of three nodes: training, tuning, and what is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from tests.faults.programs import processes
from tests.ray_cluster.conftest import RayCluster, python_path
from tests.ray_cluster.jobs import meet, steps

from holdfast import tune
from holdfast.control.history import read_records
from holdfast.control.view import read_reports
from holdfast.core import records as r
from holdfast.errors import ConfigError
from holdfast.storage.locate import open_store
from holdfast.train import DataParallelTrainer, FailureConfig, Result, RunConfig, ScalingConfig

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]


@pytest.fixture(autouse=True)
def nothing_left(cluster: RayCluster) -> Iterator[None]:
    """No agent, zygote or worker outlives its run."""
    yield
    _wait_for_agents_to_end(cluster)


def _wait_for_agents_to_end(cluster: RayCluster) -> None:
    marker = f"HOLDFAST_LOCAL_CACHE_DIR={cluster.root / 'cache'}"
    ours = [pid for pid in processes.with_environment(marker) if processes.name_of(pid).startswith("hf-")]
    processes.wait_gone(*ours)


def _fit(path: Path, config: dict[str, Any], **scaling: Any) -> Result:
    return DataParallelTrainer(
        steps,
        train_loop_config={"steps": 5, "run_directory": str(path / "run"), **config},
        scaling_config=ScalingConfig(**scaling),
        run_config=RunConfig(name="run", storage_path=path, failure_config=FailureConfig(max_failures=3)),
    ).fit()


def _wait_for_checkpoints(path: Path, count: int) -> None:
    def is_there() -> bool:
        return len(list((path / "run").glob("checkpoint_*/.manifest.json"))) >= count

    processes.wait_until(is_there, f"{count} checkpoints")


def _wait_for_generations(path: Path, count: int) -> None:
    _wait_for_sizes(path, lambda sizes: len(sizes) >= count, f"generation {count}")


def _wait_for_sizes(path: Path, are_enough: Callable[[list[int]], bool], what: str) -> None:
    """Until the sizes of all generations so far are as they should be."""

    def has_started() -> bool:
        sleep(0.2)  # it reads the whole journal
        sizes = [one.world_size for one in _records(path, r.GenerationStarted)] if _is_there(path) else []
        return are_enough(sizes)

    processes.wait_until(has_started, what, within_s=90)


def _is_there(path: Path) -> bool:
    return (path / "run" / "run.json").exists()


def _has_shrunk(sizes: list[int]) -> bool:
    return any(after < before for before, after in pairwise(sizes))


def _records(path: Path, kind: type) -> list[Any]:
    return [one for one in read_records(open_store(path / "run")) if isinstance(one, kind)]


def _alive() -> int:
    """The nodes that Ray takes to be alive."""
    import ray

    return sum(node["Alive"] for node in ray.nodes())


def _reserved() -> int:
    """The bundles of groups that are placed."""
    from ray.util import placement_group_table

    return sum(len(one["bundles"]) for one in placement_group_table().values() if one["state"] == "CREATED")


def test_workers_are_spread_over_nodes_with_one_agent_on_each(cluster: RayCluster, tmp_path: Path) -> None:
    result = _fit(tmp_path, {}, num_workers=3, placement_strategy="STRICT_SPREAD")
    (started,) = _records(tmp_path, r.GenerationStarted)
    assert (result.metrics or {})["step"] == 5
    assert len(started.agents) == 3


def test_workers_on_one_node_share_an_agent(cluster: RayCluster, tmp_path: Path) -> None:
    _fit(tmp_path, {}, num_workers=2, placement_strategy="STRICT_PACK")
    (started,) = _records(tmp_path, r.GenerationStarted)
    assert len(started.agents) == 1


def test_each_worker_has_the_gpus_that_ray_assigned(cluster: RayCluster, tmp_path: Path) -> None:
    """Two bundles on a node: the agent has the ids of both, and gives each worker its own."""
    result = _fit(tmp_path, {}, num_workers=2, use_gpu=True, placement_strategy="STRICT_PACK")
    assert result.return_value["gpus"] in ("0", "1")


@pytest.mark.parametrize("victim", ["worker", "agent", "actor"])
def test_a_run_goes_on_from_its_checkpoint_after_a_kill(cluster: RayCluster, tmp_path: Path, victim: str) -> None:
    killed = tmp_path / "killed"
    config = {"kill": victim, "kill_at": 3, "killed_file": str(killed)}
    result = _fit(tmp_path, config, num_workers=2, placement_strategy="STRICT_SPREAD")
    assert killed.exists() and (result.metrics or {})["step"] == 5
    assert (result.metrics or {})["resumed_from"] > 0
    assert len(_records(tmp_path, r.GenerationStarted)) == 2


@pytest.mark.parametrize("kill", ["", "worker"])
def test_results_equal_those_of_the_local_engine(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill: str
) -> None:
    monkeypatch.setenv("TEST_NODE", "of the local engine")

    def run(engine: str) -> dict[str, Any]:
        path = tmp_path / engine
        path.mkdir()
        config = {"kill": kill, "kill_at": 3, "killed_file": str(path / "killed")} if kill else {}
        result = _fit(path, config, num_workers=2, engine=engine)
        assert result.checkpoint is not None
        with result.checkpoint.as_directory() as directory:
            files = {one.name: one.read_bytes() for one in Path(directory).iterdir() if one.name[0] != "."}
        rows = [one.metrics["step"] for one in read_reports(open_store(path / "run"))]
        names = [one.path.rpartition("/")[2] for one, _ in result.best_checkpoints]
        return {"rows": rows, "files": files, "names": names if not kill else len(names), "error": result.error}

    assert run("ray") == run("local")


def test_trials_run_on_several_nodes(cluster: RayCluster, tmp_path: Path) -> None:
    import ray

    together = 1 + max(int(node["Resources"].get("CPU", 0)) for node in ray.nodes())
    """More than a node holds."""

    def trial(config: dict[str, Any]) -> dict[str, Any]:
        meet(str(tmp_path / "met"), together)
        return {"score": config["x"] ** 2, "node": os.environ["TEST_NODE"]}

    tuner = tune.Tuner(
        trial,
        param_space={"x": tune.grid_search([1, 2, 3, 4, 5, 6])},
        tune_config=tune.TuneConfig(metric="score", mode="max"),
        run_config=tune.RunConfig(name="search", storage_path=str(tmp_path)),
    )
    results = tuner.fit()
    assert sorted((one.metrics or {})["score"] for one in results) == [1, 4, 9, 16, 25, 36]
    assert len({(one.metrics or {})["node"] for one in results}) > 1


def test_a_killed_driver_leaves_nothing_and_its_run_is_continued(cluster: RayCluster, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    config = {"steps": 5, "hold_at": 2, "hold_file": str(hold)}
    script = textwrap.dedent(
        f"""
        import json, ray
        ray.init(address={cluster.address!r}, _node_ip_address="127.0.0.2", log_to_driver=False)
        from pathlib import Path
        from tests.ray_cluster.test_ray_runs import _fit
        _fit(Path({str(tmp_path)!r}), json.loads({json.dumps(config)!r}), num_workers=2)
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": python_path()}) as driver:
        try:
            _wait_for_checkpoints(tmp_path, 2)
        finally:
            driver.send_signal(signal.SIGKILL)
    _wait_for_agents_to_end(cluster)
    hold.touch()
    result = _fit(tmp_path, config, num_workers=2)
    assert result.return_value["first"] == 2 and (result.metrics or {})["step"] == 5


@pytest.mark.parametrize(
    "scaling, told",
    [
        ({"resources_per_worker": {"CPU": 64}}, "asks for 64 CPU for each worker, but the largest node of the Ray"),
        ({"resources_per_worker": {"disk": 1}}, "the largest node of the Ray cluster has 2 CPU, 2 GPU, 0 disk"),
        ({"num_workers": 4, "placement_strategy": "STRICT_PACK"}, "asks for 4 CPU on one node"),
        ({"resources_per_worker": {"CPU": 0}}, "asks for nothing"),
    ],
)
def test_what_the_cluster_can_never_give_is_one_sentence(
    cluster: RayCluster, tmp_path: Path, scaling: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        _fit(tmp_path, {}, **scaling)
    assert not (tmp_path / "run").exists()


# The cluster loses nodes from here on.


def test_workers_leave_a_node_that_ray_drains(cluster: RayCluster, tmp_path: Path) -> None:
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    drained = cluster.add_node(num_cpus=1, resources={"drained": 1})
    hold = tmp_path / "hold"
    with ThreadPoolExecutor(1) as threads:
        config = {"hold_at": 2, "hold_file": str(hold)}
        run = threads.submit(_fit, tmp_path, config, num_workers=4, placement_strategy="STRICT_SPREAD")
        try:
            _wait_for_checkpoints(tmp_path, 2)
            reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
            accepted, why = GcsClient(address=cluster.address).drain_node(drained, reason, "test", 2**62)
            assert accepted, why
            processes.wait_until(lambda: _records(tmp_path, r.DrainStarted), "the drain is recorded")
            cluster.add_node(num_cpus=1)
        finally:
            hold.touch()
        assert (run.result(120).metrics or {})["step"] == 5


def test_a_run_goes_on_while_ray_notices_that_a_node_is_lost_and_places_its_bundle_anew(
    cluster: RayCluster, tmp_path: Path
) -> None:
    alive, hold = _alive(), tmp_path / "hold"
    kill = {"kill": "raylet", "kill_at": 3, "killed_file": str(tmp_path / "killed")}
    config = {"hold_at": 4, "hold_file": str(hold), **kill}
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(_fit, tmp_path, config, num_workers=2, placement_strategy="SPREAD")
        try:
            _wait_for_generations(tmp_path, 2)
            # A node that an earlier test has drained may end now, too.
            processes.wait_until(lambda: _alive() < alive, "Ray has noticed", within_s=90)
            processes.wait_until(lambda: _reserved() == 3, "Ray has placed the lost bundle anew")
        finally:
            hold.touch()
        assert (run.result(120).metrics or {})["resumed_from"] > 0
    assert len(_records(tmp_path, r.GenerationStarted)) == 2


def test_an_elastic_run_goes_on_without_a_lost_node_and_grows_with_an_added_one(
    cluster: RayCluster, tmp_path: Path
) -> None:
    import ray

    alive, most = _alive(), int(ray.cluster_resources()["CPU"]) + 1
    killed, enough = tmp_path / "killed", tmp_path / "enough"
    kill = {"kill": "raylet", "kill_at": 3, "kill_workers": 2, "killed_file": str(killed)}
    config = {"steps": 100_000, "until_file": str(enough), **kill}
    with ThreadPoolExecutor(1) as threads:
        scaling = {"num_workers": (1, most), "last_call_timeout": 1.0, "elastic_resize_monitor_interval_s": 0.5}
        run = threads.submit(_fit, tmp_path, config, placement_strategy="SPREAD", **scaling)
        try:
            _wait_for_sizes(tmp_path, _has_shrunk, "the run goes on with fewer workers")
            (lost,) = (one for one in _records(tmp_path, r.GenerationEnded) if not one.planned)
            left = _records(tmp_path, r.GenerationStarted)[lost.generation].world_size
            cluster.add_node(num_cpus=1)
            _wait_for_sizes(tmp_path, lambda sizes: sizes[-1] > left, "the run grows")
        finally:
            enough.touch()
        run.result(120)
    processes.wait_until(lambda: _alive() <= alive, "Ray has noticed", within_s=90)


def test_a_run_waits_for_a_node_that_is_added(cluster: RayCluster, tmp_path: Path) -> None:
    import ray

    workers = int(ray.cluster_resources()["CPU"]) + 1
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(_fit, tmp_path, {}, num_workers=workers)
        processes.wait_until((tmp_path / "run" / "run.json").exists, "the run has begun")
        cluster.add_node(num_cpus=1)
        assert (run.result(120).metrics or {})["step"] == 5
