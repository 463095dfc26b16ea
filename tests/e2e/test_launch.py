"""`holdfast launch` on loopback, with a shared directory: tests/hosts has the same over a network, with etcd."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults.programs import processes
from tests.faults.programs.launched import LaunchedHost, launched_hosts

pytestmark = pytest.mark.timeout(240)

_SCRIPT = ("-m", "tests.faults.programs.launched")


def _host(name: str, directory: Path, workers: int = 1) -> LaunchedHost:
    rendezvous = f"file://{directory}/rdzv?ttl=3"
    return LaunchedHost(name, directory, rendezvous, [*_SCRIPT, str(directory), str(workers)])


def _committed(directory: Path) -> int:
    """How many checkpoints of the run are committed."""
    return len(list((directory / "storage").glob("*/checkpoint_*/.manifest.json")))


def test_another_host_takes_over_when_the_leader_dies_and_all_return_the_same(tmp_path: Path) -> None:
    with launched_hosts() as hosts:
        hosts += [_host(name, tmp_path) for name in ("a", "b")]
        processes.wait_until(lambda: _committed(tmp_path) >= 3, "three checkpoints are committed")
        (leader,) = (host for host in hosts if host.leads)
        (other,) = (host for host in hosts if host is not leader)
        before = _committed(tmp_path)
        leader.kill_all()
        processes.wait_until(lambda: _committed(tmp_path) >= before + 3, f"{other.name} goes on")
        assert f"{other.name} leads, after {leader.name}." in other.errors
        # It is back, like a pod that was started again, and follows.
        again = _host(leader.name, tmp_path)
        hosts.append(again)
        processes.wait_until(lambda: again.errors.count("has joined job 1") == 2, "it has joined the same job")
        (tmp_path / "end").touch()
        found = [other.result(), again.result()]
    assert found[0] == found[1]
    assert found[0]["value"]["first"] >= before, "no committed step was lost"
    assert len(list((tmp_path / "storage").iterdir())) == 1, "both took part in one run, whose name was made up"
