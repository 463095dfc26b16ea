"""Many random kills in one run: the result is bit for bit that of an undisturbed run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.faults.programs import processes
from tests.faults.programs.exact import check_exact, ends, starts
from tests.faults.programs.random_kills import RandomKills
from tests.faults.programs.sandbox import Sandbox

_UNLIMITED = {"max_failures": -1}


@pytest.fixture(autouse=True)
def no_patience(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """No back-off: workers are killed again and again on purpose."""
    monkeypatch.setenv("HOLDFAST_BACKOFF_S", "0")


@contextmanager
def _killing(sandbox: Sandbox, kills: int, seed: int, agents_every: int = 0) -> Iterator[RandomKills]:
    killing = RandomKills(sandbox, kills, seed=seed, agents_every=agents_every)
    try:
        yield killing
    finally:
        killing.stop()


def _config(steps: int, killing: RandomKills) -> dict[str, object]:
    last = steps - 1
    return {
        "steps": steps,
        "every": 3,
        "announce": killing.path,
        "faults": {f"*:0:{last}": "hold", f"*:1:{last}": "hold"},
    }


def _survive(sandbox: Sandbox, kills: int, agents_every: int) -> None:
    with _killing(sandbox, kills, seed=kills, agents_every=agents_every) as killing:
        sandbox.fit(_config(3 * kills, killing), failure=_UNLIMITED)
    assert killing.kills == kills
    check_exact(sandbox, 3 * kills)
    counted = [end for end in ends(sandbox) if end.counted]
    assert kills / 3 < len(counted) <= kills  # a second kill may hit a generation that is ending already
    assert len(starts(sandbox)) == len(counted) + 1


def test_many_killed_workers(sandbox: Sandbox) -> None:
    _survive(sandbox, 50, agents_every=0)


def test_killed_workers_and_agents(sandbox: Sandbox) -> None:
    _survive(sandbox, 20, agents_every=6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thousands_of_kills(sandbox: Sandbox) -> None:
    _survive(sandbox, 2000, agents_every=20)


def _survive_drivers(sandbox: Sandbox, drivers: int, seed: int) -> None:
    """Each driver is killed at a random moment, together with whatever it was doing."""
    dice = random.Random(seed)
    steps = 50 * drivers  # more than they can reach before they are killed
    with _killing(sandbox, 10**9, seed=seed, agents_every=25) as killing:
        for _ in range(drivers):
            driver = sandbox.start_driver(_config(steps, killing), failure=_UNLIMITED)
            wanted = dice.randrange(1, 25)
            driver.expect_any("Reported", count=wanted)
            driver.kill()
            driver.end()
    sandbox.open_gate()
    last = sandbox.start_driver(_config(steps, killing), failure=_UNLIMITED)
    last.value()
    check_exact(sandbox, steps)
    processes.wait_gone(*processes.with_environment(sandbox.marker))


def test_killed_drivers_workers_and_agents(sandbox: Sandbox) -> None:
    _survive_drivers(sandbox, 5, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_killed_drivers(sandbox: Sandbox) -> None:
    _survive_drivers(sandbox, 100, seed=2)
