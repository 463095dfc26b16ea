"""The driver is killed while a checkpoint that `report` accepted is being uploaded: its agents finish the
uploads, the next driver commits the checkpoint, and nothing is left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from tests.faults.programs import jobs, processes
from tests.faults.programs.driver import Driver
from tests.faults.programs.sandbox import Sandbox

from holdfast.checkpoint.catalog import Catalog
from holdfast.storage.locate import open_store

_STEPS = 8
_CONFIG = {"steps": _STEPS, "every": 2}
_GATED = "checkpoint_000001/rank_1.json"

_GATE = """
import sys
if any(name in sys.orig_argv for name in ("holdfast.agent", "tests.faults.programs.driver_main")):
    from pathlib import Path
    from holdfast.storage.posix.store import PosixStore
    upload = PosixStore.upload
    def gated(self, key, *arguments, **options):
        if key == {key!r} and Path("/proc/self/comm").read_text() == "hf-agent\\n":
            Path({arrived!r}).touch()
            open({gate!r}).close()
        return upload(self, key, *arguments, **options)
    PosixStore.upload = gated
"""


class _Gate:
    """Agents wait before they upload one file of the second checkpoint, until `open`."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._fifo = sandbox.gate("upload")
        self._arrived = sandbox.root / "arrived"
        site = sandbox.root / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(_GATE.format(key=_GATED, arrived=str(self._arrived), gate=self._fifo))
        paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {"PYTHONPATH": os.pathsep.join(paths)}

    def start_driver(self, **environment: str) -> Driver:
        """A driver whose agent stands before the gate: the first checkpoint is committed, half of the second is up."""
        driver = self._sandbox.start_driver(_CONFIG, {**self._environment, **environment})
        processes.wait_until(self._arrived.exists, "the upload of the second checkpoint")
        other = self._sandbox.storage / "run" / "checkpoint_000001" / "rank_0.json"
        processes.wait_until(other.exists, "the upload of rank 0's file")
        return driver

    def open(self) -> None:
        self._sandbox.open_gate(self._fifo)


@pytest.fixture
def gate(sandbox: Sandbox) -> Iterator[_Gate]:
    made = _Gate(sandbox)
    yield made
    for path in sandbox.root.glob("upload"):
        path.unlink()


def _kill(driver: Driver) -> list[int]:
    """Kill the driver and wait until its workers are gone; returns its agents."""
    agents = driver.agents()
    workers = driver.workers()
    assert len(workers) >= 2  # and perhaps a trial import
    driver.kill()
    driver.process.wait()
    processes.wait_gone(*workers)
    return agents


def _second(sandbox: Sandbox, **environment: str) -> Driver:
    """The next driver, which waits for the agents of the one before."""
    driver = sandbox.start_driver(_CONFIG, environment)
    processes.wait_until(lambda: "checkpoint_000001 is still being stored" in driver.errors, "a driver that waits")
    return driver


def _check(sandbox: Sandbox, driver: Driver, *, resumed_from: int) -> None:
    assert driver.value() == jobs.undisturbed(_STEPS)[-1]
    assert driver.expect("GenerationStarted")["iteration"] == resumed_from
    sandbox.check_stored()
    assert list(sandbox.storage.rglob(".part-*")) == []
    catalog = Catalog(open_store(sandbox.storage / "run"))
    assert catalog.leftovers() == []
    iterations = [manifest.iteration for manifest in catalog.committed()]
    assert iterations == [2, 4, 6, 8]
    found = next(manifest for manifest in catalog.committed() if manifest.iteration == 4)
    assert (found.world_size, found.generation) == (2, 1 if resumed_from == 4 else 2)
    assert found.metrics["step"] == 3
    assert [(entry.path, entry.rank) for entry in found.files] == [("rank_0.json", 0), ("rank_1.json", 1)]


def test_a_driver_that_is_killed_and_started_again_at_once_resumes_from_the_upload_in_flight(
    sandbox: Sandbox, gate: _Gate
) -> None:
    agents = _kill(gate.start_driver())
    second = _second(sandbox)
    gate.open()
    _check(sandbox, second, resumed_from=4)
    processes.wait_gone(*agents)


def test_agents_finish_uploads_and_exit_before_the_next_driver_starts(sandbox: Sandbox, gate: _Gate) -> None:
    first = gate.start_driver()
    agents = _kill(first)
    first.end()  # whoever reads the driver's output is not kept waiting by its agent
    gate.open()
    processes.wait_gone(*agents)
    sandbox.check_nothing_left()
    records = sorted(path.name for path in (sandbox.storage / "run" / "checkpoint_000001").glob(".part-*"))
    assert records == [".part-0.json", ".part-1.json"]
    _check(sandbox, sandbox.start_driver(_CONFIG), resumed_from=4)


def test_the_next_driver_is_killed_while_it_waits_for_the_uploads(sandbox: Sandbox, gate: _Gate) -> None:
    agents = _kill(gate.start_driver())
    second = _second(sandbox)
    second.kill()
    second.end()
    third = _second(sandbox)
    gate.open()
    _check(sandbox, third, resumed_from=4)
    processes.wait_gone(*agents)


def test_the_agents_of_two_nodes_finish_their_parts(sandbox: Sandbox, gate: _Gate) -> None:
    agents = _kill(gate.start_driver(HOLDFAST_LOCAL_NODES="2"))
    assert len(agents) == 2
    second = _second(sandbox, HOLDFAST_LOCAL_NODES="2")
    gate.open()
    _check(sandbox, second, resumed_from=4)
    processes.wait_gone(*agents)


def test_a_driver_that_is_killed_between_the_uploads_and_the_manifest(sandbox: Sandbox, gate: _Gate) -> None:
    driver = gate.start_driver()
    driver.kill(signal.SIGSTOP)
    gate.open()
    processes.wait_until((sandbox.storage / "run" / _GATED).exists, "the upload of rank 1's file")
    agents = _kill(driver)
    processes.wait_gone(*agents)
    sandbox.check_nothing_left()
    _check(sandbox, sandbox.start_driver(_CONFIG), resumed_from=4)


def test_the_agent_that_finishes_the_uploads_is_killed_too(sandbox: Sandbox, gate: _Gate) -> None:
    first = gate.start_driver()
    below = processes.descendants(first.pid)
    (agent,) = _kill(first)
    os.kill(agent, signal.SIGKILL)
    processes.wait_gone(*below)
    sandbox.check_nothing_left()
    second = sandbox.start_driver(_CONFIG)
    _check(sandbox, second, resumed_from=2)
    assert "still being stored" not in second.errors
    files = sorted(path.name for path in (sandbox.storage / "run" / "checkpoint_000001").iterdir())
    assert files == [".manifest.json", ".reserved.json"]


def test_agents_give_up_uploads_after_the_linger_time(sandbox: Sandbox, gate: _Gate) -> None:
    """The storage never answers: the agent gives up at its time limit, and the next driver shuts the draft."""
    agents = _kill(gate.start_driver(HOLDFAST_LINGER_S="0.5"))
    processes.wait_gone(*agents)
    sandbox.check_nothing_left()
    _check(sandbox, sandbox.start_driver(_CONFIG), resumed_from=2)


def test_a_sigterm_ends_an_agent_that_finishes_uploads(sandbox: Sandbox, gate: _Gate) -> None:
    (agent,) = _kill(gate.start_driver())
    os.kill(agent, signal.SIGTERM)
    processes.wait_gone(agent)
    sandbox.check_nothing_left()
    _check(sandbox, sandbox.start_driver(_CONFIG), resumed_from=2)


def test_an_agent_stops_uploading_when_the_next_driver_voided_its_draft(sandbox: Sandbox, gate: _Gate) -> None:
    """A driver that does not know of the agent, as on another machine, does not wait for it."""
    (agent,) = _kill(gate.start_driver())
    elsewhere = sandbox.root / "elsewhere"
    second = sandbox.start_driver(_CONFIG, {"HOLDFAST_LOCAL_CACHE_DIR": str(elsewhere)})
    second.expect("GenerationStarted")
    gate.open()
    processes.wait_gone(agent)
    _check(sandbox, second, resumed_from=2)
    files = sorted(path.name for path in (sandbox.storage / "run" / "checkpoint_000001").iterdir())
    assert files == [".manifest.json", ".reserved.json"]
