"""Many random kills in one run: the result is bit for bit that of an undisturbed run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.faults.programs import kin
from tests.faults.programs.exact import check_exact, ends, starts
from tests.faults.programs.killer import Killer
from tests.faults.programs.place import Place

_UNLIMITED = {"max_failures": -1}


@pytest.fixture(autouse=True)
def no_patience(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """No back-off: workers are killed again and again on purpose."""
    monkeypatch.setenv("HOLDFAST_BACKOFF_S", "0")


@contextmanager
def _killing(place: Place, kills: int, seed: int, agents_every: int = 0) -> Iterator[Killer]:
    killer = Killer(place, kills, seed=seed, agents_every=agents_every)
    try:
        yield killer
    finally:
        killer.stop()


def _config(steps: int, killer: Killer) -> dict[str, object]:
    last = steps - 1
    return {
        "steps": steps,
        "every": 3,
        "announce": killer.path,
        "faults": {f"*:0:{last}": "hold", f"*:1:{last}": "hold"},
    }


def _survive(place: Place, kills: int, agents_every: int) -> None:
    with _killing(place, kills, seed=kills, agents_every=agents_every) as killer:
        place.fit(_config(3 * kills, killer), failure=_UNLIMITED)
    assert killer.kills == kills
    check_exact(place, 3 * kills)
    counted = [end for end in ends(place) if end.counted]
    assert kills / 3 < len(counted) <= kills  # a second kill may hit a generation that is ending already
    assert len(starts(place)) == len(counted) + 1


def test_many_killed_workers(place: Place) -> None:
    _survive(place, 80, agents_every=0)


def test_killed_workers_and_agents(place: Place) -> None:
    _survive(place, 30, agents_every=6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thousands_of_kills(place: Place) -> None:
    _survive(place, 2000, agents_every=20)


def _survive_drivers(place: Place, drivers: int, seed: int) -> None:
    """Each driver is killed at a random moment, together with whatever it was doing."""
    dice = random.Random(seed)
    steps = 50 * drivers  # more than they can reach before they are killed
    with _killing(place, 10**9, seed=seed, agents_every=25) as killer:
        for _ in range(drivers):
            driver = place.drive(_config(steps, killer), failure=_UNLIMITED)
            wanted = dice.randrange(1, 25)
            driver.expect_any("Reported", count=wanted)
            driver.kill()
            driver.end()
    place.let_go()
    last = place.drive(_config(steps, killer), failure=_UNLIMITED)
    last.value()
    check_exact(place, steps)
    kin.gone(*kin.marked(place.marker))


def test_killed_drivers_workers_and_agents(place: Place) -> None:
    _survive_drivers(place, 5, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_killed_drivers(place: Place) -> None:
    _survive_drivers(place, 100, seed=2)
