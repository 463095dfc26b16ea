"""The head of a cluster dies, and everything with it: the same script goes on on another cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs import processes
from tests.ray_cluster.conftest import RayCluster, python_path

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]


def _start(cluster: RayCluster, path: Path, config: dict[str, Any]) -> subprocess.Popen[str]:
    script = textwrap.dedent(
        f"""
        import json, ray
        ray.init(address={cluster.address!r}, _node_ip_address="127.0.0.2", log_to_driver=False)
        from pathlib import Path
        from tests.ray_cluster.test_ray_runs import _fit
        result = _fit(Path({str(path)!r}), json.loads({json.dumps(config)!r}), num_workers=2)
        print("came from step", result.return_value["first"], "to", result.metrics["step"])
        """
    )
    environment = {**os.environ, "PYTHONPATH": python_path()}
    return subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)


def test_the_same_script_goes_on_on_a_new_cluster_after_head_and_nodes_were_killed(
    cluster_root: Path, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    config = {"hold_at": 2, "hold_file": str(hold)}
    first = RayCluster(cluster_root)
    try:
        first.add_node(num_cpus=2)
        driver = _start(first, tmp_path, config)
        try:
            committed = tmp_path / "run" / "checkpoint_000001" / ".manifest.json"
            processes.wait_until(lambda: committed.exists() or driver.poll() is not None, "two checkpoints")
            first.kill()
            assert driver.wait(150) != 0, "it had finished"
        finally:
            driver.kill()
            driver.communicate()
        marker = f"HOLDFAST_LOCAL_CACHE_DIR={cluster_root / 'cache'}"
        processes.wait_gone(*(one for one in processes.with_environment(marker) if _is_ours(one)))
    finally:
        first.close()
    hold.touch()
    second = RayCluster(cluster_root)
    try:
        second.add_node(num_cpus=2)
        driver = _start(second, tmp_path, config)
        try:
            output, _ = driver.communicate(timeout=120)
        finally:
            driver.kill()
            driver.wait()
    finally:
        second.close()
    assert "came from step 2 to 5" in output


def _is_ours(pid: int) -> bool:
    return processes.name_of(pid).startswith("hf-")
