"""Links that break and drivers that are killed, with agents on other hosts: network namespaces stand in for them."""

from __future__ import annotations

import time

import pytest
from tests.faults.programs import processes
from tests.hosts.conftest import Hosts

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]


def _starts(hosts: Hosts) -> list[int]:
    """How often each rank has started."""
    return [len(processes.whole_lines(hosts.directory / f"started_{rank}")) for rank in range(2)]


def _wait_for_steps(hosts: Hosts, more: int) -> None:
    """Until both ranks have made so many steps more."""
    for rank in range(2):
        path = hosts.directory / f"step_{rank}"
        before = int(path.read_text()) if path.exists() else 0
        hosts.wait_for_file(f"step_{rank}", before + more)


def test_a_link_that_is_cut_for_two_seconds_restarts_nobody(hosts: Hosts) -> None:
    hosts.start_agent(hosts.first, "a")
    hosts.start_agent(hosts.second, "b")
    driver = hosts.start_driver("work")
    _wait_for_steps(hosts, 5)
    hosts.second.cut()
    time.sleep(2.0)  # how long the cable is out
    hosts.second.heal()
    _wait_for_steps(hosts, 20)
    hosts.end()
    hosts.result(driver)
    assert _starts(hosts) == [1, 1]


def test_an_agent_that_was_away_for_longer_than_its_lease_is_lost_and_comes_back(hosts: Hosts) -> None:
    hosts.environment["HOLDFAST_AGENT_SILENCE_S"] = "4"
    hosts.start_agent(hosts.first, "a")
    away = hosts.start_agent(hosts.second, "b")
    driver = hosts.start_driver("work", max_failures=-1)
    _wait_for_steps(hosts, 5)
    hosts.second.cut()
    processes.wait_until(lambda: "The controller was silent" in hosts.log("b"), "the agent stops its workers")
    hosts.second.heal()
    processes.wait_until(lambda: sum(_starts(hosts)) == 4, "both ranks start again")
    _wait_for_steps(hosts, 5)
    assert away.poll() is None, "it is the same agent"
    hosts.end()
    hosts.result(driver)
    assert _starts(hosts) == [2, 2]


def test_a_driver_that_is_killed_and_started_again_finds_its_agents(hosts: Hosts) -> None:
    agents = [hosts.start_agent(hosts.first, "a"), hosts.start_agent(hosts.second, "b")]
    driver = hosts.start_driver("work")
    _wait_for_steps(hosts, 5)
    driver.kill()
    driver.wait()
    again = hosts.start_driver("work")
    processes.wait_until(lambda: sum(_starts(hosts)) == 4, "both ranks start again")
    _wait_for_steps(hosts, 5)
    assert [agent.poll() for agent in agents] == [None, None], "they are the same agents"
    hosts.end()
    hosts.result(again)
    assert [agent.wait(60) for agent in agents] == [0, 0]


def test_a_host_whose_processes_are_killed_is_lost_long_before_the_silence_limit(hosts: Hosts) -> None:
    hosts.environment["HOLDFAST_AGENT_SILENCE_S"] = "200"  # more than the test may take
    hosts.start_agent(hosts.first, "a")
    hosts.start_agent(hosts.second, "b")
    driver = hosts.start_driver("work", max_failures=-1)
    _wait_for_steps(hosts, 5)
    hosts.second.kill_all()
    hosts.start_agent(hosts.second, "c")
    processes.wait_until(lambda: sum(_starts(hosts)) == 4, "both ranks start again")
    hosts.end()
    hosts.result(driver)
