"""A run over two hosts, by real TCP and TLS: network namespaces stand in for them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.faults.programs import processes
from tests.hosts.conftest import PORT, Hosts

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]


def test_ddp_trains_over_both_hosts(hosts: Hosts) -> None:
    agents = [hosts.start_agent(hosts.first, "a"), hosts.start_agent(hosts.second, "b")]
    driver = hosts.start_driver("allreduce")
    value = hosts.result(driver)["value"]
    assert sorted(value["places"]) == [["a", "eth0", "=eth0"], ["b", "eth0", "=eth0"]]
    first = value["places"][0][0]
    assert value["master"] == (hosts.first if first == "a" else hosts.second).address
    assert value["gradient"] == 3 * (2 * 1 + 2 * 2) / 2, "the mean over both ranks, three times"
    assert [agent.wait(60) for agent in agents] == [0, 0], "agents end with their driver"


def test_strangers_on_the_network_are_refused_logged_once_and_disturb_nobody(hosts: Hosts) -> None:
    agent = hosts.start_agent(hosts.first, "a")
    driver = hosts.start_driver("work", workers=1)
    hosts.wait_for_file("step_0", 1)
    for kind in ("scan", "oversized", "replay", "wrong_secret"):
        done = hosts.second.run([sys.executable, "-m", "tests.hosts.stranger", kind, hosts.first.address, str(PORT)])
        assert done.returncode == 0, f"{kind}: {done.stderr}"
    hosts.wait_for_file("step_0", int((hosts.directory / "step_0").read_text()) + 5)
    hosts.end()
    assert hosts.result(driver)["value"]["steps"] > 5
    assert agent.wait(60) == 0
    assert len((hosts.directory / "started_0").read_text().splitlines()) == 1
    lines = hosts.log("driver").splitlines()
    assert len([line for line in lines if "does not speak TLS" in line]) == 1
    assert len([line for line in lines if "A frame of 4294967295 bytes" in line]) == 1
    assert len([line for line in lines if "run secret is not the controller's" in line]) == 1, "replay and wrong secret"
    assert len([line for line in lines if hosts.second.address in line]) == 3


def test_an_agent_joins_while_a_thousand_connections_say_nothing(hosts: Hosts) -> None:
    driver = hosts.start_driver("work", workers=1)
    command = [sys.executable, "-m", "tests.hosts.stranger", "idle", hosts.first.address, str(PORT)]
    processes.wait_until(lambda: hosts.first.accepts(PORT), "the driver listens")
    stranger = hosts.second.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert stranger.stdin is not None and stranger.stdout is not None
    try:
        assert stranger.stdout.readline() == "1000\n"
        hosts.start_agent(hosts.second, "b")
        hosts.wait_for_file("step_0", 1)
    finally:
        stranger.stdin.close()
        stranger.stdout.close()
        stranger.wait(60)
    hosts.end()
    hosts.result(driver)
    about = [line for line in hosts.log("driver").splitlines() if hosts.second.address in line]
    assert 1 <= len(about) <= 3, about


def test_an_agent_with_an_address_that_nobody_can_reach_is_told_so(hosts: Hosts) -> None:
    hosts.start_agent(hosts.second, "b")
    driver = hosts.start_driver("work", workers=1)
    hosts.wait_for_file("step_0", 1)
    bad = hosts.start_agent(hosts.first, "c", "--advertise", "127.0.0.1")
    assert bad.wait(60) == 1 and "no other machine can reach" in hosts.log("c")
    hosts.end()
    hosts.result(driver)
