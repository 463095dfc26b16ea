"""`make bench-faults`: how long training stands still after each fault of docs/elastic.md's table. Needs root.

Hosts are network namespaces of this machine, with real TCP, TLS and etcd, as in `tests.hosts`, whose training function
makes a step each 0.05 s. A time is from the fault to the first step of the workers that go on, as they report it;
medians of some rounds are printed, with the machine's load meanwhile. Silence limit, time-to-live and settling time,
which are the user's to set, are part of the times.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.contract.etcd_server import EtcdServer
from tests.faults.programs import processes
from tests.faults.programs.launched import LaunchedHost, launched_hosts
from tests.hosts.conftest import Hosts
from tests.hosts.namespaces import Host, network

from holdfast.storage.run_secret import open_secret

_SILENCE_S = 5.0
_TTL_S = 5.0
_SETTLING_S = 1.0


__all__ = ["main"]


class _Clock:
    """The times of one round, by fault."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.found: dict[str, float] = {}

    def reports(self) -> list[dict[str, Any]]:
        """The steps that count, each with the number of workers and its time."""
        return _read_lines(self.run / "result.json")

    def wait_for(self, workers: int, since: float = 0.0) -> float:
        """Until so many workers have made three steps after that time; when the first one was."""

        def times() -> list[float]:
            return [one["at"] for one in self.reports() if one["workers"] == workers and one["at"] > since]

        processes.wait_until(lambda: len(times()) >= 3, f"{workers} workers train", 120)
        return times()[0]

    def measure(self, fault: str, do: Callable[[], object], workers: int) -> None:
        self.wait_for(workers=int(self.reports()[-1]["workers"]), since=time.time())
        began = time.time()
        do()
        self.found[fault] = self.wait_for(workers, since=began) - began

    def measure_gap(self, fault: str, do: Callable[[], object], workers: int) -> None:
        """The longest time without a step from then on, where the number of workers does not change."""
        self.wait_for(workers, since=time.time())
        began = time.time()
        do()
        self.wait_for(workers, since=time.time() + 0.5)
        times = [one["at"] for one in self.reports() if one["at"] > began - 1]
        self.found[fault] = max(b - a for a, b in pairwise(times))


class _PlainClock(_Clock):
    """Of a script that logs its steps itself (`bench.drivers.elastic`)."""

    def reports(self) -> list[dict[str, Any]]:
        steps = [one for one in _read_lines(self.run / "log") if one["event"] == "step" and one["rank"] == 0]
        return [{"workers": one["world"], "at": one["at"]} for one in steps]


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _by_hand(root: Path) -> dict[str, float]:
    os.environ["HOLDFAST_STATE_DIR"] = str(root / "state")
    open_secret()
    with network(4) as found:
        hosts = Hosts(found, root)
        hosts.environment |= {"HOLDFAST_AGENT_SILENCE_S": str(_SILENCE_S), "OMP_NUM_THREADS": "1"}
        del hosts.environment["HOLDFAST_BACKOFF_S"]
        clock = _Clock(hosts.storage / "run")
        try:
            scaling = {"num_workers": (1, 2), "listen": hosts.listen, "last_call_timeout": 0}
            scaling["elastic_resize_monitor_interval_s"] = _SETTLING_S
            hosts.start_driver("learn", config={"directory": str(hosts.directory)}, scaling=scaling, max_failures=-1)
            agents = {number: hosts.start_agent(found[number], f"host{number}") for number in (1, 2)}
            clock.wait_for(2)
            clock.measure_gap("a worker is killed", lambda: _kill_worker(found[2]), 2)
            clock.measure("a host's processes are killed", found[2].kill_all, 1)

            def join() -> None:
                agents[2] = hosts.start_agent(found[2], "again")

            clock.measure("a host joins: agent's start to the larger world", join, 2)
            clock.measure("holdfast scale RUN 1", lambda: _scale(hosts, clock, "1"), 1)
            clock.measure("holdfast scale RUN 1:2", lambda: _scale(hosts, clock, "1:2"), 2)
            clock.measure("SIGTERM to an agent", lambda: agents[1].send_signal(signal.SIGTERM), 1)
            agents[3] = hosts.start_agent(found[3], "host3")
            clock.wait_for(2, time.time())
            clock.measure("a link is cut both ways", found[3].cut, 1)
            clock.measure("the link is back", found[3].heal, 2)
        finally:
            hosts.close()
    return clock.found


def _with_spare(root: Path) -> dict[str, float]:
    os.environ["HOLDFAST_STATE_DIR"] = str(root / "state")
    open_secret()
    with network(4) as found:
        hosts = Hosts(found, root)
        hosts.environment["OMP_NUM_THREADS"] = "1"
        del hosts.environment["HOLDFAST_BACKOFF_S"]
        clock = _Clock(hosts.storage / "run")
        try:
            scaling = {"num_workers": 2, "listen": hosts.listen, "spares": 1}
            hosts.start_driver("learn", config={"directory": str(hosts.directory)}, scaling=scaling, max_failures=-1)
            for number in (1, 2):
                hosts.start_agent(found[number], f"host{number}")
            clock.wait_for(2)
            hosts.start_agent(found[3], "spare")
            processes.wait_until(lambda: _has_spare(hosts, clock), "there is a spare", 60)
            clock.measure_gap("a host's processes are killed, with a spare", found[2].kill_all, 2)
        finally:
            hosts.close()
    return clock.found


def _has_spare(hosts: Hosts, clock: _Clock) -> bool:
    done = hosts.first.run([sys.executable, "-m", "holdfast", "status", str(clock.run), "--json"])
    return any(one.get("spare") for one in json.loads(done.stdout)["agents"])


def _kill_worker(host: Host) -> None:
    for pid in host.pids():
        if Path(f"/proc/{pid}/comm").read_text().startswith("hf-rank"):
            os.kill(pid, signal.SIGKILL)
            return
    raise RuntimeError("there is no worker")


def _scale(hosts: Hosts, clock: _Clock, bounds: str) -> None:
    command = [sys.executable, "-m", "holdfast", "scale", str(clock.run), bounds]
    done = hosts.first.run(command)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)


def _launched(root: Path) -> dict[str, float]:
    clock = _Clock(root / "storage" / "run")
    with _launches(root, ["-m", "tests.hosts.learning_script", str(root), "1", "2"]) as launches:
        launches.start("a")
        launches.start("b")
        clock.wait_for(2)
        clock.measure_gap("etcd is restarted", launches.restart_etcd, 2)
        clock.measure("the leader's host dies", launches.leader().kill_all, 1)
        launches.start("c")
        clock.wait_for(2, time.time())
        cable = launches.places[launches.leader().name]
        clock.measure("the leader is cut off", cable.cut, 1)
    return clock.found


def _plain(root: Path) -> dict[str, float]:
    clock = _PlainClock(root)
    script = ["--max-restarts", "3", "--torchrun", "bench/drivers/elastic.py", "torchrun"]
    with _launches(root, [*script, str(root), "1", "2", "4000", "0.05"]) as launches:
        launches.start("a")
        other = launches.start("b")
        clock.wait_for(2)
        clock.measure_gap("a worker is killed, plain script", lambda: _kill_plain_worker(launches.places["b"]), 2)
        clock.measure("a host dies, plain script", other.kill_all, 1)
        clock.measure("a host joins, plain script", lambda: launches.start("c"), 2)
        clock.measure("SIGTERM to a launcher, plain script", launches.started[-1].process.terminate, 1)
    return clock.found


class _Launches:
    """Hosts that run `holdfast launch`, and etcd on one of its own."""

    def __init__(self, root: Path, hosts: list[Host], started: list[LaunchedHost], script: list[str]) -> None:
        first, *others = hosts
        self._root = root
        self._script = script
        self.started = started
        self.places = dict(zip("abc", others, strict=True))
        self._prefix = ["ip", "netns", "exec", first.namespace]
        self.etcd = EtcdServer(root / "etcd", host=first.address)
        self.etcd.start(self._prefix)

    def start(self, name: str) -> LaunchedHost:
        place = self.places[name]
        made = LaunchedHost(
            name,
            self._root,
            f"etcd://{self.etcd.address}/job?min_workers=1&max_workers=2&last_call_timeout=0&ttl={_TTL_S:g}",
            self._script,
            address=place.address,
            prefix=["ip", "netns", "exec", place.namespace],
            environment={
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "eth0",  # a plain script's own affair
                "PYTHONPATH": str(Path(__file__).parents[1]),
            },
        )
        self.started.append(made)
        return made

    def leader(self) -> LaunchedHost:
        """Of those that live: a host whose processes were killed may have been the leader, too."""
        (found,) = (host for host in self.started if host.leads and host.process.poll() is None)
        return found

    def restart_etcd(self) -> None:
        self.etcd.kill()
        self.etcd.start(self._prefix)


@contextmanager
def _launches(root: Path, script: list[str]) -> Iterator[_Launches]:
    with network(4) as hosts, launched_hosts() as started:
        made = _Launches(root, hosts, started, script)
        try:
            yield made
        finally:
            made.etcd.kill()


def _kill_plain_worker(host: Host) -> None:
    for pid in host.pids():
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"drivers/elastic.py" in command and b"launch" not in command:
            os.kill(pid, signal.SIGKILL)
            return
    raise RuntimeError("there is no worker")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    times: dict[str, list[float]] = {}
    loads = []
    for _ in range(given.rounds):
        for measure in (_by_hand, _with_spare, _launched, _plain):
            with tempfile.TemporaryDirectory() as root:
                for fault, time_s in measure(Path(root)).items():
                    times.setdefault(fault, []).append(time_s)
            loads.append(os.getloadavg()[0])
            print({fault: [round(one, 2) for one in found] for fault, found in times.items()}, flush=True)
    print(f"\nsilence limit {_SILENCE_S:g} s, time-to-live {_TTL_S:g} s, settling {_SETTLING_S:g} s")
    print(f"load {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores, {given.rounds} rounds")
    for fault, found in times.items():
        print(f"{statistics.median(found):6.2f} s  ({min(found):.2f} to {max(found):.2f})  {fault}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
