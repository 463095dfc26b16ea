"""A run on a Ray cluster whose storage path only the driver sees: it has a mount namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.ray_cluster.conftest import RayCluster, python_path

_UNSHARE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
_MOUNT = 'mount -t tmpfs none "$0" && exec "$@"'
_tried = subprocess.run([*_UNSHARE, "sh", "-c", _MOUNT, "/mnt", "true"], check=False, capture_output=True)
pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(_tried.returncode != 0, reason="mount namespaces are not permitted here"),
]


def test_checkpoints_of_nodes_without_the_storage_path_are_streamed_to_the_driver(
    cluster: RayCluster, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    script = textwrap.dedent(
        f"""
        import ray
        ray.init(address={cluster.address!r}, _node_ip_address="127.0.0.2", log_to_driver=False)
        from pathlib import Path
        from tests.ray_cluster.jobs import steps
        from holdfast.train import DataParallelTrainer, RunConfig, ScalingConfig
        result = DataParallelTrainer(
            steps,
            train_loop_config={{"steps": 3}},
            scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
            run_config=RunConfig(name="run", storage_path={str(storage)!r}),
        ).fit()
        print("stored", (Path(result.checkpoint.path) / "step").read_text())
        """
    )
    driver = subprocess.run(
        [*_UNSHARE, "sh", "-c", _MOUNT, str(storage), sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": python_path()},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    assert "stored 3" in driver.stdout.splitlines()
    assert not any(storage.iterdir()), "written where only the nodes see it"
