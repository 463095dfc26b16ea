"""`make bench-elastic`: hosts that are killed, join and get a notice, against torchrun (c10d, elastic) and Ray Train.

A host is a session of processes on this machine: an agent with one worker, `torchrun --nnodes=1:3`, or a raylet with
one CPU. Every system settles for the same time before it grows (torchrun's last call, the interval of the other two).
All figures are of one run, contenders taking turns; what counts are the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contenders import clear

from holdfast.control.history import read_records
from holdfast.core import records as r
from holdfast.storage.locate import open_store

__all__ = ["main"]

_ROOT = Path(__file__).parents[1]
_DRIVER = Path(__file__).with_name("drivers") / "elastic.py"
_SETTLING_S = 1.0
_STEP_S = 0.05
_STATE_BYTES = 4 * 1024 * 1024
_STEADY_STEPS = 30
_DEADLINE_S = 150.0
_START_S = 0.5
"""What a join may take besides importing torch and settling."""
_DRAIN_S = 1.0
"""What a drain may take besides one step and storing the checkpoint."""


@dataclass
class _Host:
    """A host's processes."""

    process: subprocess.Popen[bytes]
    pid: int
    """Of the process above the host's workers, which the notice goes to."""

    def kill(self) -> None:
        clear(self.process)

    def notify(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


class _System:
    """A system with hosts that come and go."""

    name = ""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        directory.mkdir()
        self.directory = directory
        self._stack = stack
        self._number = 0
        self.log = directory / "log"

    def add_host(self) -> _Host:
        raise NotImplementedError

    def _spawn(self, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        with (self.directory / "output").open("ab") as output:
            process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": f"{_ROOT}{os.pathsep}{_ROOT / 'src'}", **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._stack.callback(clear, process)
        return process

    def _driver(self, system: str) -> list[str]:
        low_high = ["1", "3", str(_STATE_BYTES), str(_STEP_S)]
        return [str(_DRIVER), system, str(self.directory), *low_high]


class _Holdfast(_System):
    name = "holdfast"

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        super().__init__(directory, stack)
        self._own = {
            "HOLDFAST_STATE_DIR": str(directory / "state"),
            "HOLDFAST_TOKEN": "bench-" + os.urandom(16).hex(),
            "HOLDFAST_QUIET": "1",
            "BENCH_LISTEN": f"127.0.0.1:{_free_port()}",
            "BENCH_SETTLING_S": str(_SETTLING_S),
        }
        self.driver = self._spawn([sys.executable, *self._driver("holdfast")], **self._own)

    def add_host(self) -> _Host:
        self._number += 1
        join = [
            "--join",
            f"holdfast://{self._own['BENCH_LISTEN']}",
            "--agent-id",
            f"host{self._number}",
            "--slots",
            "1",
        ]
        process = self._spawn([sys.executable, "-m", "holdfast", "agent", *join], **self._own)
        return _Host(process, process.pid)


class _Torchrun(_System):
    name = "torchrun"

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        super().__init__(directory, stack)
        self._port = _free_port()
        store = f"import time, torch.distributed as d; s = d.TCPStore('127.0.0.1', {self._port}, is_master=True, "
        # The rendezvous is a process of its own, so that no host that is killed takes it along.
        self._spawn([sys.executable, "-c", f"{store}wait_for_workers=False); time.sleep(1e6)"])

    def add_host(self) -> _Host:
        self._number += 1
        options = [
            *("--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=100", "--rdzv-backend=c10d", "--rdzv-id=bench"),
            f"--rdzv-endpoint=127.0.0.1:{self._port}",
            f"--rdzv-conf=is_host=0,last_call_timeout={_SETTLING_S:g}",
            "--local-addr=127.0.0.1",
            "--monitor-interval=0.1",
        ]
        command = [sys.executable, "-m", "torch.distributed.run", *options, *self._driver("torchrun")]
        # Without the setting its restarts fail with gloo: this is its better figure.
        process = self._spawn(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        return _Host(process, process.pid)


class _Ray(_System):
    name = "Ray Train"

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        super().__init__(directory, stack)
        from ray.cluster_utils import Cluster

        os.environ.update(RAY_TRAIN_V2_ENABLED="1", RAY_worker_niceness="0", RAY_USAGE_STATS_ENABLED="0")
        os.environ["PYTHONPATH"] = f"{_ROOT}{os.pathsep}{_ROOT / 'src'}"
        # Ray takes 127.0.0.1 for the machine's address on its network.
        head = {"num_cpus": 0, "include_dashboard": False, "node_ip_address": "127.0.0.2"}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        stack.callback(self._cluster.shutdown)
        self.driver: subprocess.Popen[bytes] | None = None

    def add_host(self) -> _Host:
        self._number += 1
        node = self._cluster.add_node(num_cpus=1, node_ip_address=f"127.0.0.{self._number + 2}", wait=False)
        if self.driver is None:
            environment = {"RAY_ADDRESS": str(self._cluster.address), "BENCH_SETTLING_S": str(_SETTLING_S)}
            self.driver = self._spawn([sys.executable, *self._driver("ray")], **environment)
        raylet = node.all_processes["raylet"][0].process
        return _Host(raylet, raylet.pid)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class _Figures:
    """Seconds, of one round of one system; steps lost are a count."""

    killed_s: float
    join_s: float
    stall_s: float
    steps_lost: int
    notice_s: float = 0.0
    durable_s: float = 0.0
    """From the report of a checkpoint that nobody waits for to its commit."""
    torch_s: float = 0.0
    """A new process that imports torch, right before the third host joins."""


def _measure(kind: type[_System], directory: Path) -> _Figures:
    with ExitStack() as stack:
        system = kind(directory, stack)
        watch = _Watch(system.log)
        system.add_host()
        second = system.add_host()
        watch.until_world(2, "two hosts train")
        watch.steady(2)
        torch_s = _import_torch_s() if isinstance(system, _Holdfast) else 0.0
        time.sleep(2 * random.random())  # random: some contenders look only now and then
        began = time.time()
        third = system.add_host()
        grown = watch.until_world(3, "the third host trains", began)
        before = watch.last_before(grown["at"], 2)
        lost = before["step"] + 1 - grown["step"]
        watch.steady(3)
        time.sleep(2 * random.random())
        killed = time.time()
        third.kill()
        after = watch.until_world(2, "training goes on without the killed host", killed)
        notice_s = durable_s = 0.0
        if isinstance(system, _Holdfast):
            watch.steady(2)
            noticed = time.time()
            second.notify()
            shrunk = watch.until_world(1, "training goes on without the host that had a notice", noticed)
            lost += watch.last_before(shrunk["at"], 2)["step"] + 1 - shrunk["step"]
            commits = _commits(directory)
            notice_s = commits[shrunk["step"] - 1] - noticed
            reports = {step: at for step, at in watch.saving().items() if step in commits and step % 20 == 0}
            durable_s = statistics.median(commits[step] - at for step, at in reports.items())
        join_s, stall_s = grown["at"] - began, grown["at"] - before["at"]
        return _Figures(after["at"] - killed, join_s, stall_s, lost, notice_s, durable_s, torch_s)


def _commits(directory: Path) -> dict[int, float]:
    """When the checkpoint of each step was committed."""
    found = read_records(open_store(directory / "storage" / "run"))
    return {one.metrics["step"]: one.at for one in found if isinstance(one, r.CheckpointCommitted)}


class _Watch:
    """The steps that workers log."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def _events(self, kind: str) -> list[dict[str, Any]]:
        if not self._log.exists():
            return []
        events = [json.loads(line) for line in self._log.read_text().splitlines()]
        return [event for event in events if event["event"] == kind]

    def _steps(self) -> list[dict[str, Any]]:
        return self._events("step")

    def until_world(self, size: int, what: str, since: float = 0.0) -> dict[str, Any]:
        """The first step of a world of this size after `since`."""
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline:
            for event in self._steps():
                if event["world"] == size and event["at"] > since:
                    return event
            time.sleep(0.02)
        raise TimeoutError(f"It took more than {_DEADLINE_S:g} s until {what}.")

    def steady(self, size: int) -> None:
        """Wait until a world of this size has made some steps."""
        count = len(self._steps())
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline:
            if sum(event["world"] == size for event in self._steps()[count:]) >= _STEADY_STEPS * size:
                return
            time.sleep(0.05)
        raise TimeoutError(f"A world of {size} made no steps.")

    def last_before(self, at: float, size: int) -> dict[str, Any]:
        return [event for event in self._steps() if event["world"] == size and event["at"] < at][-1]

    def saving(self) -> dict[int, float]:
        """When rank 0 reported the checkpoint of each step."""
        return {one["step"]: one["at"] for one in self._events("saving") if one["rank"] == 0}


def _import_torch_s() -> float:
    """A new process that imports torch as an agent's zygote does."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch, torch.distributed"], check=True)
    return time.perf_counter() - began


def _aim(text: str, is_met: bool) -> bool:
    print(f"    aim {text}: {'met' if is_met else 'MISSED'}", flush=True)
    return is_met


def _show(found: dict[str, list[_Figures]]) -> bool:
    """The tables; returns whether every aim was met. Aims against a system that was not run are not judged."""

    def median(name: str, field: str) -> float:
        return float(statistics.median(getattr(one, field) for one in found[name]))

    ours = {field: median("holdfast", field) for field in _Figures.__dataclass_fields__}
    all_met = True
    for title, field, ratios in (
        ("From SIGKILL of a host's processes to the next step in the smaller world", "killed_s", _KILLED_AIMS),
        ("A host joins: how long the running workers stand still", "stall_s", _STALL_AIMS),
        ("A host joins: from its start to the first step of the larger world", "join_s", {}),
    ):
        print(f"\n{title}")
        for name in found:
            seconds = [getattr(one, field) for one in found[name]]
            ratio = median(name, field) / ours[field]
            print(f"  {name:<12}{median(name, field):8.2f} s ({min(seconds):.2f} to {max(seconds):.2f}){ratio:8.1f}x")
            if name in ratios:
                all_met &= _aim(f"{name} takes at least {ratios[name]:g} times as long", ratio >= ratios[name])
    torch_s = ours["torch_s"]
    limit_s = torch_s + _SETTLING_S + _START_S
    text = f"at most {limit_s:.2f} s: importing torch {torch_s:.2f} s, settling {_SETTLING_S:g} s, and {_START_S} s"
    all_met &= _aim(text, ours["join_s"] <= limit_s)
    print(f"\nFrom SIGTERM of an agent to the commit of the last checkpoint\n  holdfast    {ours['notice_s']:8.2f} s")
    limit_s = _STEP_S + _DRAIN_S + ours["durable_s"]
    text = f"at most {limit_s:.2f} s: a step, {_DRAIN_S:g} s, and {ours['durable_s']:.2f} s to durable"
    all_met &= _aim(text, ours["notice_s"] <= limit_s)
    print("\nSteps that are done again after planned changes")
    for name, figures in found.items():
        print(f"  {name:<12}{max(one.steps_lost for one in figures):5d}")
    return all_met & _aim("0", max(one.steps_lost for one in found["holdfast"]) == 0)


_KILLED_AIMS = {"torchrun": 10.0, "Ray Train": 20.0}
_STALL_AIMS = {"torchrun": 10.0}
_SYSTEMS: dict[str, type[_System]] = {one.name: one for one in (_Holdfast, _Torchrun, _Ray)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.elastic", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=list(_SYSTEMS), help="with these alone; may be repeated")
    parser.add_argument("--dir", type=Path, help="where to write; a temporary directory")
    options = parser.parse_args(arguments)
    names = dict.fromkeys(["holdfast", *(options.only or _SYSTEMS)])
    found: dict[str, list[_Figures]] = {}
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-elastic-", dir=options.dir) as scratch:
        for number in range(options.rounds):
            for name in names:
                directory = Path(scratch, f"{number}-{name.replace(' ', '-')}")
                found.setdefault(name, []).append(_measure(_SYSTEMS[name], directory))
                print(f"  round {number + 1}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    return 0 if _show(found) else 1


if __name__ == "__main__":
    sys.exit(main())
