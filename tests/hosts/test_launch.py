"""`holdfast launch` over a network, with a real etcd: hosts are network namespaces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.etcd_server import EtcdServer
from tests.faults.programs import processes
from tests.faults.programs.launched import LaunchedHost, launched_hosts
from tests.hosts.learning_check import check_learning
from tests.hosts.namespaces import Host, network

from holdfast.train import Result

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]


class _Cluster:
    """etcd on a host of its own, and three others."""

    def __init__(self, directory: Path, first: Host, hosts: list[Host], started: list[LaunchedHost]) -> None:
        self.directory = directory
        self._on_first = ["ip", "netns", "exec", first.namespace]
        self.etcd = EtcdServer(directory / "etcd", host=first.address)
        self.start_etcd()
        self.started = started
        self._hosts = dict(zip("abc", hosts, strict=True))

    def start_etcd(self) -> None:
        self.etcd.start(self._on_first)

    def cable(self, name: str) -> Host:
        return self._hosts[name]

    def start(self, name: str, *script: str, sees_storage: bool = True) -> LaunchedHost:
        """Without `sees_storage` the host has an empty directory where the others have it."""
        host = self._hosts[name]
        storage = self.directory / "storage"
        storage.mkdir(exist_ok=True)
        hide = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(storage)]
        query = "min_workers=1&max_workers=3&last_call_timeout=1&ttl=5"
        uri = f"etcd://{self.etcd.address}/images?{query}"
        made = LaunchedHost(
            name,
            self.directory,
            uri,
            script,
            address=host.address,
            prefix=["ip", "netns", "exec", host.namespace, *([] if sees_storage else hide)],
            environment={"OMP_NUM_THREADS": "1", "HOLDFAST_AGENT_SILENCE_S": "4"},
        )
        self.started.append(made)
        return made

    def reports(self, run: str) -> list[int]:
        """How many workers made each step."""
        return [json.loads(line)["workers"] for line in self._report_lines(run)]

    def _report_lines(self, run: str) -> list[str]:
        return processes.whole_lines(self.directory / "storage" / run / "result.json")

    def wait_for_step(self, more: int, run: str = "images") -> int:
        """Until so many reports more have been stored; the newest step."""
        before = len(self._report_lines(run))
        processes.wait_until(lambda: len(self._report_lines(run)) >= before + more, "training goes on", 120)
        return len(self._report_lines(run))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[_Cluster]:
    with network(4) as (first, *others), launched_hosts() as started:
        made = _Cluster(tmp_path, first, others, started)
        try:
            yield made
        finally:
            made.etcd.kill()


def test_training_goes_on_without_etcd_and_another_host_takes_over_when_it_is_back(cluster: _Cluster) -> None:
    script = ["-m", "tests.hosts.learning_script", str(cluster.directory), "1", "3"]
    hosts = [cluster.start(name, *script) for name in "ab"]
    cluster.wait_for_step(3, "run")
    cluster.etcd.kill()
    cluster.wait_for_step(5, "run")
    cluster.start_etcd()
    (leader,) = (host for host in hosts if host.leads)
    (other,) = (host for host in hosts if host is not leader)
    leader.kill_all()
    processes.wait_until(lambda: other.leads, "another leads", 120)
    cluster.wait_for_step(3, "run")
    added = cluster.start("c", *script)
    processes.wait_until(lambda: "has joined job 1" in added.errors, "a host is added")
    (cluster.directory / "end").touch()
    assert other.result() == added.result()
    check_learning(cluster.directory / "storage" / "run", cluster.directory / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["both ways", "outgoing"])
def test_a_leader_that_is_cut_off_is_fenced_and_follows_when_the_link_is_back(
    cluster: _Cluster, direction: str
) -> None:
    script = ["-m", "tests.hosts.learning_script", str(cluster.directory), "1", "3"]
    hosts = [cluster.start(name, *script) for name in "ab"]
    cluster.wait_for_step(3, "run")
    (leader,) = (host for host in hosts if host.leads)
    (other,) = (host for host in hosts if host is not leader)
    cable = cluster.cable(leader.name)
    {"both ways": cable.cut, "outgoing": cable.cut_outgoing}[direction]()
    processes.wait_until(lambda: other.leads, "another leads", 60)
    cluster.wait_for_step(3, "run")
    cable.heal()
    (cluster.directory / "end").touch()
    assert other.result() == leader.result()
    check_learning(cluster.directory / "storage" / "run", cluster.directory / "undisturbed")


def test_a_host_that_does_not_see_the_storage_takes_part_and_returns_the_same_result(cluster: _Cluster) -> None:
    script = ["-m", "tests.hosts.learning_script", str(cluster.directory), "2", "2"]
    leader = cluster.start("a", *script)
    processes.wait_until(lambda: leader.leads, "the host with the storage leads")
    other = cluster.start("b", *script, sees_storage=False)
    processes.wait_until(lambda: cluster.reports("run")[-3:] == [2, 2, 2], "both hosts train", 60)
    cluster.wait_for_step(12, "run")  # with a checkpoint
    (cluster.directory / "end").touch()
    assert leader.result()["value"]["step"] > 12
    assert other.result() == leader.result()
    assert "if a dies, the run can only wait until it is back" in other.errors
    check_learning(cluster.directory / "storage" / "run", cluster.directory / "undisturbed")


def test_an_experiment_has_the_same_results_on_a_host_that_does_not_see_the_storage(cluster: _Cluster) -> None:
    script = ["-m", "tests.faults.programs.launched_tuner", str(cluster.directory)]
    leader = cluster.start("a", *script)
    processes.wait_until(lambda: leader.leads, "the host with the storage leads")
    other = cluster.start("b", *script, sees_storage=False)

    def places() -> list[str]:
        """On which hosts the trials have started."""
        starts = [processes.whole_lines(path) for path in cluster.directory.glob("starts_*")]
        return sorted(lines[0].split()[0] for lines in starts if lines)

    processes.wait_until(lambda: places() == ["a", "b"], "each host has a trial")
    (cluster.directory / "end").touch()
    assert other.result() == leader.result()
    assert len(leader.result()["trials"]) == 2


def test_the_walkthrough_kills_a_node_and_adds_a_node(cluster: _Cluster) -> None:
    script = ["examples/launch/images.py", "--storage", str(cluster.directory / "storage")]
    script += ["--epochs", "12", "--samples", "128", "--pause-s", "0.05"]
    hosts = [cluster.start(name, *script) for name in "ab"]
    cluster.wait_for_step(4)
    (leader,) = (host for host in hosts if host.leads)
    (other,) = (host for host in hosts if host is not leader)
    leader.kill_all()
    processes.wait_until(lambda: other.leads, "another leads", 60)
    cluster.wait_for_step(4)
    added = cluster.start("c", *script)
    assert [host.wait(240) for host in (other, added)] == [0, 0], other.errors + added.errors
    results = [host.output.splitlines()[-1] for host in (other, added)]
    assert results[0] == results[1] and results[0].startswith("RESULT")
    result = Result.from_path(cluster.directory / "storage" / "images")
    assert result.metrics is not None and result.metrics["step"] == 12 * 4
    frame = result.metrics_dataframe
    assert frame is not None
    assert list(frame["step"]) == list(range(1, 12 * 4 + 1)), "every step counts once"
