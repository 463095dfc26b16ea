"""The driver's process or disk stalls for longer than the agents' timeout: the same generation continues."""

from __future__ import annotations

import os
import signal
import socket
import threading
from typing import Any

import pytest
from tests.faults.programs import processes
from tests.faults.programs.driver import Driver
from tests.faults.programs.exact import check_exact, ends, starts
from tests.faults.programs.sandbox import Sandbox

from holdfast.core import records as r

_STEPS = 8
_HELD: dict[str, Any] = {"steps": _STEPS, "every": 2, "faults": {"1:0:5": "hold", "1:1:5": "hold"}}
_SILENCE_S = 2.0
_ENVIRONMENT = {"HOLDFAST_AGENT_SILENCE_S": str(_SILENCE_S), "HOLDFAST_LOCAL_NODES": "2"}


def _let_time_pass(seconds: float) -> None:
    """Time itself is what these tests are about: there is no event to wait for."""
    threading.Event().wait(seconds)


def _held(sandbox: Sandbox, environment: dict[str, str], **options: Any) -> Driver:
    driver = sandbox.start_driver(_HELD, environment, **options)
    driver.expect("CheckpointCommitted", iteration=4)
    driver.expect_step(4)
    return driver


def _check_undisturbed(sandbox: Sandbox) -> None:
    check_exact(sandbox, _STEPS)
    assert len(starts(sandbox)) == 1 and ends(sandbox) == []
    assert not [record for record in sandbox.records() if isinstance(record, r.AgentRemoved)]


@pytest.mark.parametrize("failure", [{}, {"progress_timeout_s": 4.0}], ids=["pings", "progress"])
def test_a_driver_stopped_for_a_while_does_not_lose_its_agents(sandbox: Sandbox, failure: dict[str, Any]) -> None:
    driver = _held(sandbox, _ENVIRONMENT, failure=failure)
    driver.kill(signal.SIGSTOP)
    _let_time_pass(2.5 * _SILENCE_S)
    driver.kill(signal.SIGCONT)
    if not failure:
        _let_time_pass(1.25 * _SILENCE_S)  # whoever is taken for silent is taken for that by now
    sandbox.open_gate()
    driver.value()
    _check_undisturbed(sandbox)


def test_a_stopped_agent_is_still_lost(sandbox: Sandbox) -> None:
    driver = _held(sandbox, _ENVIRONMENT, failure={"max_failures": 1})
    os.kill(driver.agents()[1], signal.SIGSTOP)
    driver.expect("AgentGone")
    sandbox.open_gate()
    driver.value()
    check_exact(sandbox, _STEPS)
    (ended,) = ends(sandbox)
    assert "silent" in ended.failures[0].cause


_STALLS = """
import os, pathlib
if b"tests.faults.programs.driver_main" in pathlib.Path("/proc/self/cmdline").read_bytes():
    sync = os.fdatasync
    def stalled(fd):
        if os.path.exists({stall!r}):
            os.unlink({stall!r})
            open({gate!r}).close()
        sync(fd)
    os.fdatasync = stalled
"""


def test_a_stalled_disk_blocks_neither_the_event_loop_nor_the_run(sandbox: Sandbox) -> None:
    """The driver's next fdatasync takes longer than the agents' timeout. Meanwhile it still accepts connections."""
    gate, stall = sandbox.gate("disk"), sandbox.root / "stall"
    (sandbox.root / "sitecustomize.py").write_text(_STALLS.format(stall=str(stall), gate=gate))
    path = os.pathsep.join([str(sandbox.root), *filter(None, [os.environ.get("PYTHONPATH")])])
    # An agent that is started anew shows the port in its command line.
    driver = _held(sandbox, {**_ENVIRONMENT, "PYTHONPATH": path, "HOLDFAST_FORK_DRIVER": "0"})
    port = _port_of(driver)
    stall.touch()
    sandbox.open_gate()  # more reports, and with them a flush
    processes.wait_until(lambda: not stall.exists(), "the flush that stalls")
    _let_time_pass(1.25 * _SILENCE_S)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        assert connection.recv(4), "the driver said nothing"
    sandbox.open_gate(gate)
    driver.value()
    _check_undisturbed(sandbox)


def _port_of(driver: Driver) -> int:
    words = processes.command_of(driver.agents()[0]).split()
    return int(words[words.index("--connect") + 1].rpartition(":")[2])
