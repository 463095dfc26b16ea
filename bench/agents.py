"""`make bench-hub`, second part: what agents cost the controller, for 10 to 10,000 of them.

A driver in a process of its own waits for as many agents as it has workers; one process plays all the agents
(`bench.drivers.load_agents`) over sockets. Measured are the time until all are told to start, the CPU of the driver per
event while every rank reports, its memory per agent, and the time until the rest is told to stop when 5 % and 30 % of
the connections end at once. Agents start no processes, so nothing of it is a worker's time.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["main", "measure"]

_EVENTS = 20_000
"""So many events are sent, in rounds in which every agent sends two."""
_IDLE_S = 0.1
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def measure(agents: int, root: Path, *, tls: bool = False) -> dict[str, float]:
    """The figures for this number of agents."""
    address = f"127.0.0.1:{_free_port()}"
    environment = os.environ | {
        "HOLDFAST_TOKEN": secrets.token_urlsafe(32),
        "HOLDFAST_LOCAL_CACHE_DIR": str(root / "cache"),
        "HOLDFAST_QUIET": "1",
    }
    options = ["--tls"] if tls else []
    driver_command = ["bench.drivers.hub", str(root / "storage"), address, str(agents), *options]
    with _process(driver_command, environment) as driver:
        _wait_until_listening(address)
        before_bytes = _private_bytes(driver.pid)
        with _process(["bench.drivers.load_agents", address, *options], environment) as load:
            cpu_s = _cpu_s(driver.pid)
            formed = _ask(load, f"join {agents}")
            form_cpu_s = _cpu_s(driver.pid) - cpu_s
            _wait_until_idle(driver.pid)
            memory_bytes = _private_bytes(driver.pid) - before_bytes
            cpu_s = _cpu_s(driver.pid)
            rounds = _ask(load, f"rounds {max(1, _EVENTS // (2 * agents))}")
            _wait_until_idle(driver.pid)
            report_cpu_s = _cpu_s(driver.pid) - cpu_s
            found = {
                "formed, s": formed["seconds"],
                "formed, CPU s": form_cpu_s,
                "CPU an event, us": 1e6 * report_cpu_s / rounds["events"],
                "memory an agent, KB": memory_bytes / agents / 1024,
            }
            for percent in (5, 30):
                cpu_s = _cpu_s(driver.pid)
                lost = max(1, agents * percent // 100)
                found[f"{percent} % lost, s"] = _ask(load, f"die {lost}")["seconds"]
                found[f"{percent} % lost, CPU s"] = _cpu_s(driver.pid) - cpu_s
                _ask(load, f"join {lost}")
    return found


@contextmanager
def _process(module: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", *module]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _ask(load: subprocess.Popen[str], command: str) -> Any:
    assert load.stdin is not None and load.stdout is not None
    load.stdin.write(f"{command}\n")
    return json.loads(load.stdout.readline())


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _wait_until_listening(address: str) -> None:
    host, _, port = address.rpartition(":")
    while True:
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return
        time.sleep(0.05)


def _wait_until_idle(pid: int) -> None:
    """Until the process uses next to no CPU: what it was sent is dealt with."""
    while True:
        before = _cpu_s(pid)
        time.sleep(_IDLE_S)
        if _cpu_s(pid) - before <= 2 * _TICK_S:
            return


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def _private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, nargs="*", default=[10, 100, 1_000, 10_000])
    parser.add_argument("--tls", type=int, nargs="*", default=[1_000], help="the same over TLS")
    options: Any = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    for tls, counts in ((False, options.agents), (True, options.tls)):
        for count in counts:
            with tempfile.TemporaryDirectory() as root:
                figures = measure(count, Path(root), tls=tls)
            told = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
            print(f"{count:6d} agents{' over TLS' if tls else ''}: {told}", flush=True)


if __name__ == "__main__":
    main()
