"""Two hosts, of which the second does not see the storage path: its files stream to the first, over TCP and TLS."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults.programs import processes
from tests.hosts.conftest import Hosts

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.verify import verify
from holdfast.storage.locate import open_store

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]


def _started(hosts: Hosts, rank: int) -> list[tuple[str, int]]:
    """On which hosts a rank was started, and from which step."""
    lines = processes.whole_lines(hosts.directory / f"started_{rank}")
    return [(host, int(step)) for host, step in (line.split() for line in lines)]


def _check_stored(hosts: Hosts) -> None:
    report = verify(open_store(hosts.storage / "run"), deep=True)
    assert report.ok and not report.damaged, report


def _step(hosts: Hosts) -> int:
    return int((hosts.directory / "step_1").read_text())


def test_a_host_without_the_path_is_killed_and_another_one_restores_what_it_had_sent(hosts: Hosts) -> None:
    hosts.environment["HOLDFAST_AGENT_SILENCE_S"] = "5"
    hosts.start_agent(hosts.first, "a")
    hosts.start_agent_without_storage(hosts.second, "b")
    driver = hosts.start_driver("checkpoint", max_failures=5)
    hosts.wait_for_file("step_1", 3)
    hosts.second.kill_all()
    agent = hosts.start_agent_without_storage(hosts.second, "c")
    hosts.wait_for_file("step_1", _step(hosts) + 4)
    assert list(Path(f"/proc/{agent.pid}/root{hosts.storage}").iterdir()) == []
    hosts.end()
    steps = hosts.result(driver)["value"]["steps"]
    started = {host: step for rank in (0, 1) for host, step in _started(hosts, rank)}
    assert 2 <= started["c"] < steps, "it starts from a checkpoint of which half was sent by the host that died"
    _check_stored(hosts)
    assert agent.wait(60) == 0


def test_a_link_that_is_cut_while_files_stream_costs_nothing_that_was_committed(hosts: Hosts) -> None:
    hosts.start_agent(hosts.first, "a")
    hosts.start_agent_without_storage(hosts.second, "b")
    driver = hosts.start_driver("checkpoint", max_failures=5)
    hosts.wait_for_file("step_1", 3)
    hosts.second.cut()
    before = _step(hosts)
    hosts.second.heal()
    hosts.wait_for_file("step_1", before + 3)
    hosts.end()
    assert hosts.result(driver)["value"]["steps"] >= before + 3
    assert len(_started(hosts, 0)) == 1, "no generation is lost"
    _check_stored(hosts)


def test_a_state_comes_from_the_memory_of_another_host_and_not_from_the_drivers_disk(four_hosts: Hosts) -> None:
    """The copy on the disk is replaced by other bytes, of which nobody starts."""
    hosts = four_hosts
    hosts.environment["HOLDFAST_AGENT_SILENCE_S"] = "5"
    places = {name: hosts.all[number] for number, name in enumerate("abc", 1)}
    for name in "ab":
        hosts.start_agent_without_storage(places[name], name)
    driver = hosts.start_driver("state", max_failures=5)
    for name in "ab":
        hosts.wait_for_file(f"on_{name}")
    files = [path for path in (hosts.storage / "run" / "checkpoint_000000").iterdir() if path.name[0] != "."]
    for path in files:
        path.write_bytes(bytes(path.stat().st_size))
    (lost,) = (name for name in "ab" if (hosts.directory / f"on_{name}").read_text() == "1")
    hosts.start_agent_without_storage(places["c"], "c")
    places[lost].kill_all()
    assert hosts.result(driver)["value"] == 21_000_000.0
    assert (hosts.directory / "restored_1").read_text() == "c 21000000.0"


def test_a_driver_that_is_killed_and_started_again_goes_on_with_the_host_without_the_path(hosts: Hosts) -> None:
    hosts.environment["HOLDFAST_AGENT_SILENCE_S"] = "5"
    hosts.start_agent(hosts.first, "a")
    hosts.start_agent_without_storage(hosts.second, "b")
    driver = hosts.start_driver("checkpoint", max_failures=5)
    hosts.wait_for_file("step_1", 3)
    driver.kill()
    driver.wait()
    before = _step(hosts)
    driver = hosts.start_driver("checkpoint", max_failures=5)
    hosts.wait_for_file("step_1", before + 3)
    hosts.end()
    hosts.result(driver)
    assert min(_started(hosts, rank)[-1][1] for rank in (0, 1)) >= 1
    _check_stored(hosts)


def test_what_was_being_stored_when_the_driver_died_is_stored_for_the_next_one(hosts: Hosts) -> None:
    hosts.environment["HOLDFAST_AGENT_SILENCE_S"] = "5"
    hosts.start_agent(hosts.first, "a")
    hosts.start_agent_without_storage(hosts.second, "b")
    driver = hosts.start_driver("checkpoint", max_failures=5)
    hosts.wait_for_file("step_1", 3)
    hosts.second.slow_down(3_000_000)  # a part takes 8 s
    run = hosts.storage / "run"
    sent_by = "large_0" if _started(hosts, 0)[0][0] == "a" else "large_1"
    begun_before = set(run.glob("checkpoint_*"))  # the newest may be committed at any moment: most of it was sent fast

    def drafts() -> list[Path]:
        """Checkpoints of which the near host has stored its part, and the far one has not."""
        found = [one.parent for one in run.glob(f"checkpoint_*/{sent_by}") if one.parent not in begun_before]
        return [one for one in found if not (one / ".manifest.json").exists()]

    processes.wait_until(drafts, "a part is being sent")
    driver.kill()
    driver.wait()
    (draft,) = drafts()
    driver = hosts.start_driver("checkpoint", max_failures=5)
    hosts.wait_for_file("started_0")
    processes.wait_until(lambda: len(_started(hosts, 0)) > 1, "the workers are started again", 60)
    hosts.second.heal()
    hosts.end()
    hosts.result(driver)
    (one,) = (one for one in Catalog(open_store(run)).committed() if one.name == draft.name)
    assert {_started(hosts, rank)[1][1] for rank in (0, 1)} == {one.iteration}
    _check_stored(hosts)
