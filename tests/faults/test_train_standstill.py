"""The driver's process or disk stalls for longer than the agents' timeout: the same generation continues."""

from __future__ import annotations

import os
import signal
import socket
import threading
from typing import Any

import pytest
from tests.faults.programs import kin
from tests.faults.programs.driver import Driver
from tests.faults.programs.exact import check_exact, ends, starts
from tests.faults.programs.place import Place

from holdfast.core import records as r

_STEPS = 8
_HELD: dict[str, Any] = {"steps": _STEPS, "every": 2, "faults": {"1:0:5": "hold", "1:1:5": "hold"}}
_SILENCE_S = 1.0
_ENVIRONMENT = {"HOLDFAST_AGENT_SILENCE_S": str(_SILENCE_S), "HOLDFAST_LOCAL_NODES": "2"}


def _let_time_pass(seconds: float) -> None:
    """Time itself is what these tests are about: there is no event to wait for."""
    threading.Event().wait(seconds)


def _held(place: Place, environment: dict[str, str], **options: Any) -> Driver:
    driver = place.drive(_HELD, environment, **options)
    driver.expect("CheckpointCommitted", iteration=4)
    driver.expect_step(4)
    return driver


def _check_undisturbed(place: Place) -> None:
    check_exact(place, _STEPS)
    assert len(starts(place)) == 1 and ends(place) == []
    assert not [record for record in place.records() if isinstance(record, r.AgentRemoved)]


@pytest.mark.parametrize("failure", [{}, {"progress_timeout_s": 2.0}], ids=["pings", "progress"])
def test_a_driver_stopped_for_a_while_does_not_lose_its_agents(place: Place, failure: dict[str, Any]) -> None:
    driver = _held(place, _ENVIRONMENT, failure=failure)
    driver.kill(signal.SIGSTOP)
    _let_time_pass(3 * _SILENCE_S)
    driver.kill(signal.SIGCONT)
    if not failure:
        _let_time_pass(1.5 * _SILENCE_S)  # whoever is taken for silent is taken for that by now
    place.let_go()
    driver.value()
    _check_undisturbed(place)


def test_a_stopped_agent_is_still_lost(place: Place) -> None:
    driver = _held(place, _ENVIRONMENT, failure={"max_failures": 1})
    os.kill(driver.agents()[1], signal.SIGSTOP)
    driver.expect("AgentGone")
    place.let_go()
    driver.value()
    check_exact(place, _STEPS)
    (ended,) = ends(place)
    assert "silent" in ended.failures[0].cause


_STALLS = """
import os, pathlib
if b"tests.faults.programs.drive" in pathlib.Path("/proc/self/cmdline").read_bytes():
    sync = os.fdatasync
    def stalled(fd):
        if os.path.exists({stall!r}):
            os.unlink({stall!r})
            open({gate!r}).close()
        sync(fd)
    os.fdatasync = stalled
"""


def test_a_stalled_disk_blocks_neither_the_event_loop_nor_the_run(place: Place) -> None:
    """The driver's next fdatasync takes longer than the agents' timeout. Meanwhile it still accepts connections."""
    gate, stall = place.gate("disk"), place.root / "stall"
    (place.root / "sitecustomize.py").write_text(_STALLS.format(stall=str(stall), gate=gate))
    path = os.pathsep.join([str(place.root), *filter(None, [os.environ.get("PYTHONPATH")])])
    driver = _held(place, {**_ENVIRONMENT, "PYTHONPATH": path})
    port = _port_of(driver)
    stall.touch()
    place.let_go()  # more reports, and with them a flush
    kin.until(lambda: not stall.exists(), "the flush that stalls")
    _let_time_pass(2 * _SILENCE_S)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        assert connection.recv(4), "the driver said nothing"
    place.let_go(gate)
    driver.value()
    _check_undisturbed(place)


def _port_of(driver: Driver) -> int:
    words = kin.command_of(driver.agents()[0]).split()
    return int(words[words.index("--connect") + 1].rpartition(":")[2])
