"""`holdfast launch` on loopback, with a shared directory: tests/hosts has the same over a network, with etcd."""

from __future__ import annotations

from collections import Counter
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


def test_an_experiment_runs_on_all_hosts_and_survives_its_leader(tmp_path: Path) -> None:
    def start(name: str) -> LaunchedHost:
        uri = f"file://{tmp_path}/rdzv?min_workers=1&max_workers=2&ttl=3"
        return LaunchedHost(name, tmp_path, uri, ["-m", "tests.faults.programs.launched_tuner", str(tmp_path)])

    def starts() -> dict[str, list[str]]:
        """On which hosts each trial has started, and from which step."""
        return {path.name: processes.whole_lines(path) for path in tmp_path.glob("starts_*")}

    def committed() -> list[int]:
        trials = (tmp_path / "storage").glob("*/*/checkpoint_*/.manifest.json")
        return sorted(Counter(path.parent.parent for path in trials).values())

    with launched_hosts() as hosts:
        hosts += [start(name) for name in ("a", "b")]
        processes.wait_until(lambda: len(committed()) == 2 and min(committed()) >= 3, "both trials have checkpoints")
        assert {lines[0].split()[0] for lines in starts().values()} == {"a", "b"}, "one trial on each host"
        (leader,) = (host for host in hosts if host.leads)
        (other,) = (host for host in hosts if host is not leader)
        leader.kill_all()
        processes.wait_until(lambda: f"{other.name} leads, after {leader.name}." in other.errors, "another leads")
        again = start(leader.name)
        hosts.append(again)
        processes.wait_until(lambda: all(len(lines) >= 2 for lines in starts().values()), "both trials go on")
        assert all(int(lines[-1].split()[1]) >= 3 for lines in starts().values()), "from their checkpoints"
        (tmp_path / "end").touch()
        found = [other.result(), again.result()]
    assert found[0] == found[1] and len(found[0]["trials"]) == 2
    assert len(list((tmp_path / "storage").iterdir())) == 1, "both took part in one experiment, whose name was made up"


def test_a_plain_script_runs_in_rounds_as_hosts_come_fail_and_go(tmp_path: Path) -> None:
    def start(name: str) -> LaunchedHost:
        options = ["--nproc-per-node", "2", "--max-restarts", "1"]
        script = ["-m", "tests.faults.programs.plain_script", str(tmp_path)]
        query = "min_workers=1&max_workers=2&last_call_timeout=0&ttl=3"
        return LaunchedHost(name, tmp_path, f"file://{tmp_path}/rdzv?{query}", [*options, *script])

    def place(name: str, local_rank: int) -> list[str]:
        path = tmp_path / f"place_{name}_{local_rank}"
        return path.read_text().split() if path.exists() else []

    def both(restarts: int) -> bool:
        """Two hosts are in a round with two workers each."""
        ends = ["127.0.0.1", str(restarts)]
        found = sorted(place(name, local_rank) for name in ("a", "b") for local_rank in (0, 1))
        return found == [[str(rank), "4", str(rank % 2), str(rank // 2), *ends] for rank in range(4)]

    with launched_hosts() as hosts:
        hosts.append(start("a"))
        processes.wait_until(lambda: place("a", 1) == ["1", "2", "1", "0", "127.0.0.1", "0"], "a runs alone")
        hosts.append(start("b"))
        processes.wait_until(lambda: both(0), "b has joined, which spends no restart")
        (tmp_path / "fail").touch()
        processes.wait_until(lambda: both(1), "all workers are started again after a failure")
        hosts[0].kill_all()
        processes.wait_until(lambda: place("b", 1) == ["1", "2", "1", "0", "127.0.0.1", "1"], "b goes on alone")
        (tmp_path / "end").touch()
        assert hosts[1].wait() == 0, hosts[1].errors
    assert "b joined" in hosts[0].errors and "ended with code 7" in hosts[0].errors


def test_a_script_is_fetched_from_a_store_and_its_failure_is_told(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "main.py").write_text("import sys; print('argument', sys.argv[1]); sys.exit(3)\n")
    uri = f"file://{tmp_path}/rdzv?ttl=3&last_call_timeout=0"
    with launched_hosts() as hosts:
        hosts.append(LaunchedHost("a", tmp_path, uri, [f"file://{tmp_path}/bucket/main.py", "--epochs"]))
        assert hosts[0].wait() == 3
        assert hosts[0].output == "argument --epochs\n"
        assert "The job has failed: a: the worker of local rank 0 ended with code 3." in hosts[0].errors


def test_a_launcher_removes_what_killed_ones_left_and_keeps_the_secret_apart_from_the_script(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "main.py").write_text(
        "import sys, time; from pathlib import Path\n"
        "print([path.name for path in Path(__file__).parent.iterdir()], flush=True)\n"
        "while not Path(sys.argv[1]).exists(): time.sleep(0.02)\n"
    )
    script = ["--fit", f"file://{tmp_path}/bucket/main.py", str(tmp_path / "end")]
    launches = tmp_path / "cache_a" / "launches"
    with launched_hosts() as hosts:
        hosts.append(LaunchedHost("a", tmp_path, f"file://{tmp_path}/first?ttl=3", script))
        processes.wait_until(lambda: hosts[0].output == "['main.py']\n", "the script runs")
        assert list(launches.glob("a-*/secret")), "its agent reads it there"
        hosts[0].kill_all()
        assert len(list(launches.iterdir())) == 2, "a directory and its lock"
        (tmp_path / "end").touch()
        hosts.append(LaunchedHost("a", tmp_path, f"file://{tmp_path}/second?ttl=3", script))
        assert hosts[1].wait() == 0, hosts[1].errors
    assert hosts[1].output == "['main.py']\n" * 2
    assert list(launches.iterdir()) == []
