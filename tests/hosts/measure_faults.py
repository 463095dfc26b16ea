"""How long training stands still after each fault of docs/elastic.md's table: `python -m tests.hosts.measure_faults`.

Hosts are network namespaces of this machine, with real TCP, TLS and etcd. A time is from the fault to the first step of
the workers that go on, as they report it; medians of some rounds are printed, with the machine's load meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from tests.contract.etcd_server import EtcdServer
from tests.faults.programs import processes
from tests.faults.programs.launched import LaunchedHost, launched_hosts
from tests.hosts.conftest import Hosts
from tests.hosts.namespaces import Host, network

from holdfast.storage.run_secret import open_secret

_SILENCE_S = 5.0
_TTL_S = 5.0
_SETTLING_S = 0.5


class _Clock:
    """The times of one round, by fault."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self.found: dict[str, float] = {}

    def reports(self) -> list[dict[str, float]]:
        path = self._run / "result.json"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, workers: int, since: float = 0.0) -> float:
        """Until so many workers have made three steps after that time; when the first one was."""

        def times() -> list[float]:
            return [one["at"] for one in self.reports() if one["workers"] == workers and one["at"] > since]

        processes.wait_until(lambda: len(times()) >= 3, f"{workers} workers train", 120)
        return times()[0]

    def measure(self, fault: str, do: Callable[[], object], workers: int, *, but_s: float = 0.0) -> None:
        """`but_s` is a time that is the user's to set, and is not counted."""
        self.wait_for(workers=int(self.reports()[-1]["workers"]), since=time.time())
        began = time.time()
        do()
        self.found[fault] = self.wait_for(workers, since=began) - began - but_s

    def measure_gap(self, fault: str, do: Callable[[], object], workers: int, *, but_s: float = 0.0) -> None:
        """The longest time without a step from then on, where the number of workers does not change."""
        self.wait_for(workers, since=time.time())
        began = time.time()
        do()
        self.wait_for(workers, since=time.time() + 0.5)
        times = [one["at"] for one in self.reports() if one["at"] > began - 1]
        self.found[fault] = max(b - a for a, b in pairwise(times)) - but_s


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

            clock.measure("a host joins: agent's start to the larger world", join, 2, but_s=_SETTLING_S)
            clock.measure("scale 1", lambda: _scale(hosts, clock, "1"), 1)
            clock.measure("scale 2", lambda: _scale(hosts, clock, "1:2"), 2)
            clock.measure("SIGTERM", lambda: agents[1].send_signal(signal.SIGTERM), 1)
            agents[3] = hosts.start_agent(found[3], "host3")
            clock.wait_for(2, time.time())
            clock.measure("a host's cable is pulled", found[3].cut, 1, but_s=_SILENCE_S)
            clock.measure("a cable is plugged in again", found[3].heal, 2, but_s=_SETTLING_S)
        finally:
            hosts.close()
    return clock.found


def _kill_worker(host: Host) -> None:
    found = subprocess.run(["ip", "netns", "pids", host.namespace], check=True, capture_output=True, text=True)
    for pid in found.stdout.split():
        if Path(f"/proc/{pid}/comm").read_text().startswith("hf-rank"):
            os.kill(int(pid), signal.SIGKILL)
            return
    raise RuntimeError("there is no worker")


def _scale(hosts: Hosts, clock: _Clock, bounds: str) -> None:
    command = [sys.executable, "-m", "holdfast", "scale", str(clock._run), bounds]
    done = hosts.first.run(command)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)


def _launched(root: Path) -> dict[str, float]:
    clock = _Clock(root / "storage" / "run")
    with network(4) as (first, *others), launched_hosts() as started:
        etcd = EtcdServer(root / "etcd", host=first.address)
        prefix = ["ip", "netns", "exec", first.namespace]
        etcd.start(prefix)
        places = dict(zip("abc", others, strict=True))

        def start(name: str) -> LaunchedHost:
            uri = f"etcd://{etcd.address}/job?min_workers=1&max_workers=2&last_call_timeout=0&ttl={_TTL_S:g}"
            script = ["-m", "tests.hosts.learning_script", str(root), "1", "2"]
            on = ["ip", "netns", "exec", places[name].namespace]
            environment = {"OMP_NUM_THREADS": "1"}
            made = LaunchedHost(
                name, root, uri, script, address=places[name].address, prefix=on, environment=environment
            )
            started.append(made)
            return made

        def leader() -> LaunchedHost:
            return [host for host in started if host.leads][-1]

        try:
            hosts = {name: start(name) for name in "ab"}
            clock.wait_for(2)

            def restart_etcd() -> None:
                etcd.kill()
                etcd.start(prefix)

            clock.measure_gap("etcd is restarted", restart_etcd, 2)
            first_leader = leader()
            clock.measure("the leader's host dies", first_leader.kill_all, 1, but_s=_TTL_S)
            start("c")
            clock.wait_for(2, time.time())
            cable = places[leader().name]
            clock.measure("the leader is cut off", cable.cut, 1, but_s=_TTL_S)
            assert hosts
        finally:
            etcd.kill()
    return clock.found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    times: dict[str, list[float]] = {}
    loads = []
    for _ in range(given.rounds):
        for measure in (_by_hand, _launched):
            with tempfile.TemporaryDirectory() as root:
                for fault, time_s in measure(Path(root)).items():
                    times.setdefault(fault, []).append(time_s)
            loads.append(os.getloadavg()[0])
            print({fault: [round(one, 2) for one in found] for fault, found in times.items()}, flush=True)
    print(f"load {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores, {given.rounds} rounds")
    for fault, found in times.items():
        print(f"{statistics.median(found):6.2f} s  ({min(found):.2f} to {max(found):.2f})  {fault}")


if __name__ == "__main__":
    main()
