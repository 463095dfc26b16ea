"""`make bench-hub` in small: runs on a warm agent and agents of a load generator are measured, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import agents, hub


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_agents_over_sockets_are_measured(tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "_EVENTS", 2_000)
    found = agents.measure(20, tmp_path, tls=tls)
    assert found["CPU an event, us"] > 0
    assert min(found["formed, s"], found["5 % lost, s"], found["30 % lost, s"]) > 0


@pytest.mark.slow
def test_runs_on_a_warm_agent_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_LOCAL_CACHE_DIR", str(tmp_path / "cache"))
    found = hub.measure([1, 3], tmp_path)
    assert found[3]["fit() to first line, ms"] > 0
    assert found[3]["fsyncs of the driver"] > 0 and found[3]["messages"] > 0
    assert hub.bare_fork_ms() > 0
