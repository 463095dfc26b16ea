"""A run whose workers compute, and report nothing, wakes nobody but who renews its lease."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.small import make_trainer
from tests.e2e.test_train_many_runs import _hold, _Meeting
from tests.faults.programs import processes
from tests.faults.programs.sandbox import Sandbox

from holdfast.control.lease import Lease
from holdfast.control.loop import Settings

_BEATS = 10
"""So many renewals are waited for until nothing else happens any more."""
_VIEWS = ("holdfast-terminal", "holdfast-resultfiles", "holdfast-foldwriter")


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """Released whenever a lease was renewed, which is done more often than usual."""
    renewed = threading.Semaphore(0)
    beat = Lease.beat

    def noting(lease: Lease) -> None:
        beat(lease)
        renewed.release()

    monkeypatch.setattr(Lease, "beat", noting)
    monkeypatch.setattr("holdfast.control.setup._settings", lambda _: Settings(beat_s=0.7))
    yield renewed


def _switches(tasks: dict[str, Path]) -> dict[str, int]:
    """How often each thread has gone to sleep so far."""
    found = {}
    for name, task in tasks.items():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            lines = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            found[name] = int(lines["voluntary_ctxt_switches"])
    return found


def _tasks_of(pid: int) -> dict[str, Path]:
    with suppress(FileNotFoundError):  # a trial import, which has ended
        return {f"{pid}/{task.name}": task for task in Path(f"/proc/{pid}/task").iterdir()}
    return {}


def _idle_tasks(driver: int, others: list[int]) -> dict[str, Path]:
    """The threads of the run's views, and all threads of its agent, zygote and worker; `others` are children of the
    driver that are none of these."""
    tasks: dict[str, Path] = {}
    for number, thread in enumerate(threading.enumerate()):
        if thread.name in _VIEWS:
            tasks[f"{thread.name} {number}"] = Path(f"/proc/{driver}/task/{thread.native_id}")
    for child in processes.children(driver):
        if child not in others:
            for pid in (child, *processes.descendants(child)):
                tasks |= _tasks_of(pid)
    return tasks


def test_an_idle_run_wakes_nobody_between_renewals(sandbox: Sandbox, beats: threading.Semaphore) -> None:
    """Between some two renewals nothing else may happen: views, agent, zygote and worker sleep on."""
    meeting = _Meeting(sandbox.root, "a", "b")
    others = processes.children(os.getpid())  # servers of other tests
    with ThreadPoolExecutor(2) as pool:
        config: dict[str, Any] = {"root": str(sandbox.root)}
        ended = [pool.submit(make_trainer(sandbox, _hold, config=config, name=name).fit) for name in ("a", "b")]
        for name in ("a", "b"):
            meeting.wait_for(name)
        try:
            for _ in range(_BEATS):
                while beats.acquire(blocking=False):
                    continue  # of renewals before
                tasks = _idle_tasks(os.getpid(), others)  # anew: a trial import may end, and a zygote have a successor
                assert sum(name.startswith(_VIEWS) for name in tasks) == 2 * len(_VIEWS)
                before = _switches(tasks)
                for _ in range(4):  # two of each run: so some time passes
                    assert beats.acquire(timeout=60)
                now = _switches(tasks)
                woken = {name for name in before if now.get(name) != before[name]}
                if not woken:
                    break
            assert not woken, f"these are woken again and again: {woken}"
        finally:
            for name in ("a", "b"):
                meeting.let_go(name)
        for one in ended:
            assert one.result(60).return_value == "go"
