"""A script on Ray's engine where no cluster is: it starts one on this machine, which ends with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.programs import processes
from tests.ray_cluster.conftest import python_path

_UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
_tried = subprocess.run([*_UNSHARE, "true"], check=False, capture_output=True)
pytestmark = [pytest.mark.ray]


@pytest.fixture
def ray_root() -> Iterator[Path]:
    """Where Ray keeps its files, and finds no other cluster's. Its sockets' paths must be short."""
    root = Path(tempfile.mkdtemp(prefix="hf-ray-", dir="/tmp"))
    yield root
    shutil.rmtree(root)


@pytest.mark.parametrize(
    "address",
    [
        "local",
        # Ray looks for clusters among all processes that it sees.
        pytest.param("", marks=pytest.mark.skipif(_tried.returncode != 0, reason="namespaces are not permitted here")),
    ],
)
def test_a_script_without_a_cluster_has_one_on_this_machine_that_ends_with_it(
    tmp_path: Path, ray_root: Path, address: str
) -> None:
    pytest.importorskip("ray")
    script = textwrap.dedent(
        f"""
        import os
        from holdfast import train

        def function():
            import ray

            assert ray.__version__ and not ray.is_initialized()
            train.report({{"rank": train.get_context().get_world_rank(), "parent": os.getppid()}})

        result = train.DataParallelTrainer(
            function,
            scaling_config=train.ScalingConfig(num_workers=2, resources_per_worker={{"CPU": 0.5}}),
            run_config=train.RunConfig(name="run", storage_path={str(tmp_path / "storage")!r}),
        ).fit()
        print("rank", result.metrics["rank"])
        """
    )
    environment = {**os.environ, "HOLDFAST_ENGINE": "ray", "RAY_TMPDIR": str(ray_root), "PYTHONPATH": python_path()}
    environment |= {"HOLDFAST_LOCAL_CACHE_DIR": str(tmp_path / "cache"), "RAY_USAGE_STATS_ENABLED": "0"}
    environment["RAY_ADDRESS"] = address
    (tmp_path / "code").mkdir()
    driver = subprocess.run(
        [*([] if address else _UNSHARE), sys.executable, "-c", script],
        env=environment,
        cwd=tmp_path / "code",
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert driver.returncode == 0 and "rank 0" in driver.stdout.splitlines(), driver.stderr
    processes.wait_gone(*processes.with_environment(f"RAY_TMPDIR={ray_root}"))
    assert list(ray_root.glob("**/session_*")), "it was another cluster"
