"""Runs on a Ray cluster whose nodes do not share a disk: a bucket, and a storage path that only the driver sees, in a
mount namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.contract.servers import Server
from tests.ray_cluster.conftest import RayCluster, python_path
from tests.ray_cluster.jobs import steps

from holdfast.train import DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig

_UNSHARE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
_MOUNT = 'mount -t tmpfs none "$0" && exec "$@"'
_tried = subprocess.run([*_UNSHARE, "sh", "-c", _MOUNT, "/mnt", "true"], check=False, capture_output=True)
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]


def test_a_run_in_a_bucket_goes_on_after_a_killed_agent(
    cluster: RayCluster, moto: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes get the keys by the `runtime_env`."""
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "checkpoint_0").mkdir()  # what `steps` waits for before it kills
    (tmp_path / "checkpoint_0" / ".manifest.json").touch()
    kill = {"kill": "agent", "kill_at": 3, "killed_file": str(tmp_path / "killed"), "run_directory": str(tmp_path)}
    result = DataParallelTrainer(
        steps,
        train_loop_config={"steps": 5, **kill},
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        run_config=RunConfig(
            name="run",
            storage_path=moto.uri(moto.new_bucket()),
            failure_config=FailureConfig(max_failures=1),
            worker_runtime_env={"env_vars": dict(moto.environment)},
        ),
    ).fit()
    assert (tmp_path / "killed").exists() and (result.metrics or {})["step"] == 5
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        assert (Path(directory) / "step").read_text() == "5"


@pytest.mark.skipif(_tried.returncode != 0, reason="mount namespaces are not permitted here")
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
