"""Five hundred seeds of faults against the controller's real shell and core, in chunks that run side by side."""

from __future__ import annotations

import pytest
from tests.sim.__main__ import run_seeds
from tests.sim.simulation import Simulation

_CHUNK = 50


@pytest.mark.parametrize("start", range(0, 500, _CHUNK))
def test_every_promise_holds_under_faults(start: int) -> None:
    endings = run_seeds(range(start, start + _CHUNK))
    assert endings["finished"] > _CHUNK // 2, endings


def test_a_seed_decides_everything() -> None:
    first, second = Simulation(7), Simulation(7)
    assert first.run() == second.run()
    assert first.bucket.objects == second.bucket.objects
    assert (first.loop.time(), first.loop.steps) == (second.loop.time(), second.loop.steps)


def test_a_broken_promise_names_the_command_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.sim.simulation._PATIENCE_S", -1000.0)
    with pytest.raises(AssertionError, match=r"^Seed 0: .*\nReplay it with: python -m tests.sim --seed 0 --trace$"):
        run_seeds([0])
