"""Hosts that come and go, with real TCP and TLS: samples and weights are exact in each case (`learning_check`)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs import processes
from tests.hosts.conftest import Hosts
from tests.hosts.learning_check import check_learning

from holdfast.control.history import read_records
from holdfast.core import records as r
from holdfast.storage.locate import open_store

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]


class _Learning:
    """A driver on the first host that trains `learning.learn` on one to three of the others."""

    def __init__(self, hosts: Hosts, **config: Any) -> None:
        self.hosts = hosts
        hosts.environment |= {"HOLDFAST_AGENT_SILENCE_S": "4", "OMP_NUM_THREADS": "1"}
        self._config = {"directory": str(hosts.directory), **config}
        self._driver = self.start_driver()

    def start_driver(self) -> subprocess.Popen[str]:
        scaling = {"num_workers": (1, 3), "elastic_resize_monitor_interval_s": 0.2, "last_call_timeout": 0}
        scaling["listen"] = self.hosts.listen
        return self.hosts.start_driver("learn", max_failures=-1, config=self._config, scaling=scaling)

    def kill_driver(self) -> None:
        self._driver.kill()
        self._driver.wait()
        self._driver = self.start_driver()

    @property
    def run(self) -> Path:
        return self.hosts.storage / "run"

    def reports(self) -> list[dict[str, int]]:
        return [json.loads(line) for line in processes.whole_lines(self.run / "result.json")]

    def wait_for_workers(self, workers: int, steps: int = 3) -> None:
        """Until so many workers have made so many steps more."""
        before = self.step()

        def are_there() -> bool:
            found = [one for one in self.reports()[-steps:] if one["step"] > before]
            return len(found) == steps and all(one["workers"] == workers for one in found)

        processes.wait_until(are_there, f"{workers} workers train", 60)

    def wait_for_steps(self, more: int) -> None:
        before = self.step()
        processes.wait_until(lambda: self.step() >= before + more, f"{more} steps more are made", 60)

    def step(self) -> int:
        reports = self.reports()
        return reports[-1]["step"] if reports else 0

    def ends(self) -> list[r.GenerationEnded]:
        return [one for one in read_records(open_store(self.run)) if isinstance(one, r.GenerationEnded)]

    def end(self) -> list[int]:
        """Let it end, and check it: the number of workers at each step."""
        self.hosts.end()
        self.hosts.result(self._driver)
        return check_learning(self.run, self.hosts.root / "undisturbed")


def _start(hosts: Hosts, number: int, *options: str) -> subprocess.Popen[str]:
    return hosts.start_agent(hosts.all[number], f"host{number}", *options)


def test_hosts_join_leave_and_die(four_hosts: Hosts) -> None:
    learning = _Learning(four_hosts)
    agents = [_start(four_hosts, 1), _start(four_hosts, 2)]
    learning.wait_for_workers(2)
    agents.append(_start(four_hosts, 3))
    learning.wait_for_workers(3)
    agents[0].send_signal(signal.SIGTERM)
    assert agents[0].wait(60) == 0
    learning.wait_for_workers(2)
    four_hosts.all[2].kill_all()
    learning.wait_for_workers(1)
    learning.kill_driver()
    learning.wait_for_workers(1)
    assert {1, 2, 3} == set(learning.end())


@pytest.mark.parametrize("direction", ["outgoing", pytest.param("incoming", marks=pytest.mark.slow)])
def test_a_link_that_is_cut_in_one_direction_costs_its_host_and_gives_it_back(
    four_hosts: Hosts, direction: str
) -> None:
    learning = _Learning(four_hosts)
    for number in (1, 2):
        _start(four_hosts, number)
    learning.wait_for_workers(2)
    host = four_hosts.all[2]
    {"outgoing": host.cut_outgoing, "incoming": host.cut_incoming}[direction]()
    learning.wait_for_workers(1)
    host.heal()
    learning.wait_for_workers(2)
    learning.end()


@pytest.mark.slow
def test_a_slow_link_is_not_taken_for_a_dead_host(hosts: Hosts) -> None:
    # What a checkpoint sends takes longer than the silence limit.
    learning = _Learning(hosts, ballast_bytes=3_000_000)
    hosts.start_agent_without_storage(hosts.second, "far")
    learning.wait_for_workers(1)
    hosts.second.slow_down(5_000_000)
    learning.wait_for_steps(11)  # a checkpoint among them
    near = hosts.start_agent(hosts.first, "near")
    learning.wait_for_workers(2)
    near.send_signal(signal.SIGTERM)
    assert near.wait(60) == 0
    learning.wait_for_workers(1)
    learning.end()
    assert all(one.planned for one in learning.ends()), learning.ends()


def test_a_preemption_with_too_short_a_deadline_costs_steps_and_no_sample(four_hosts: Hosts) -> None:
    # A report is in the file about a second after it was made: the deadline is over long before the next one.
    learning = _Learning(four_hosts, step_s=3.0, every=1_000)
    agents = [_start(four_hosts, number, "--drain-deadline", "0.4") for number in (1, 2)]
    learning.wait_for_workers(2, steps=1)
    agents[1].send_signal(signal.SIGTERM)
    assert agents[1].wait(60) == 0
    learning.wait_for_workers(1, steps=1)
    learning.end()
    (end,) = (one for one in learning.ends() if one.why.endswith("its time is up"))
    assert not end.counted, "it spends no failure"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", os.environ.get("SOAK_SEEDS", "1").split())
def test_twenty_joins_and_leaves_at_random(four_hosts: Hosts, seed: str) -> None:
    """Other seeds: SOAK_SEEDS="2 3 4" make test-slow."""
    choose = random.Random(int(seed))
    learning = _Learning(four_hosts)
    agents: dict[int, subprocess.Popen[str]] = {}
    is_cut: set[int] = set()
    for _ in range(20):
        number = choose.randrange(1, 4)
        host = four_hosts.all[number]
        if number in is_cut:
            host.heal()
            is_cut.discard(number)
        elif number not in agents:
            agents[number] = _start(four_hosts, number)
        else:
            how = choose.choice(("drain", "kill", "cut", "cut one way"))
            if how == "drain":
                agents.pop(number).send_signal(signal.SIGTERM)
            elif how == "kill":
                agents.pop(number)
                host.kill_all()
            else:
                is_cut.add(number)
                (host.cut if how == "cut" else host.cut_outgoing)()
        if agents.keys() - is_cut:
            learning.wait_for_steps(choose.randrange(0, 12))
    for host in four_hosts.all:
        host.heal()
    if not agents:
        _start(four_hosts, 1)
    learning.wait_for_steps(3)
    learning.end()
