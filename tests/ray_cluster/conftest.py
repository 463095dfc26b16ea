"""A Ray cluster of three nodes on this machine, each with a loopback address of its own, shared by the tests of a file.

Ray replaces 127.0.0.1 by the address of another interface, so the nodes are 127.0.0.2 and on.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_HEAD = "127.0.0.2"
_REPOSITORY = Path(__file__).parents[2]


def python_path() -> str:
    """For drivers in processes of their own."""
    import holdfast

    return os.pathsep.join([str(_REPOSITORY), str(Path(holdfast.__file__).parents[1])])


class RayCluster:
    """Nodes can be added; `TEST_NODE` in the environment of a worker is its node's number."""

    def __init__(self, root: Path, **head: Any) -> None:
        """`head` is what the head's node is given besides."""
        from ray.cluster_utils import Cluster

        self.root = root
        self._numbers = itertools.count()
        arguments = self._arguments(num_cpus=1, **head)
        self._cluster = Cluster(initialize_head=True, head_node_args={**arguments, "include_dashboard": False})
        self.address = str(self._cluster.address)
        self.client_address = ""

    def _arguments(self, **node: Any) -> dict[str, Any]:
        number = next(self._numbers)
        return {"node_ip_address": f"127.0.0.{2 + number}", "env_vars": {"TEST_NODE": str(number)}, **node}

    def add_node(self, **node: Any) -> str:
        """Add a node; its id."""
        return str(self._cluster.add_node(**self._arguments(**node)).node_id)

    def connect(self) -> None:
        import ray

        ray.init(address=self.address, _node_ip_address=_HEAD, log_to_driver=False)

    def kill(self) -> None:
        """All processes of all nodes, at once."""
        for node in self._cluster.list_all_nodes():
            for found in node.all_processes.values():
                for one in found:
                    one.process.kill()
                    one.process.wait()

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def cluster_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory in which agents of the clusters to be made keep their files."""
    pytest.importorskip("ray")
    root = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_LOCAL_CACHE_DIR", str(root / "cache"))
        patch.setenv("HOLDFAST_ENGINE", "ray")
        patch.setenv("HOLDFAST_AGENTS_TIMEOUT_S", "90")
        patch.setenv("HOLDFAST_BACKOFF_S", "0.1")
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")  # Ray's client server forks, and grpc may abort in the child
        (root / "code").mkdir()
        here = Path.cwd()
        os.chdir(root / "code")  # what is sent to agents is a small directory
        try:
            yield root
        finally:
            os.chdir(here)


@pytest.fixture(scope="module")
def cluster(cluster_root: Path) -> Iterator[RayCluster]:
    """This process is connected to it."""
    made = RayCluster(cluster_root)
    try:
        for _ in range(2):
            made.add_node(num_cpus=2, num_gpus=2)  # no device: Ray counts ids
        made.connect()
        yield made
    finally:
        made.close()
