"""What a run waits for, as views in other threads see it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from tests.unit.control.test_agent_pool import _PREPARATION

from holdfast.control import run_agents as module
from holdfast.control.agent_pool import AgentPool
from holdfast.control.publisher import Publisher
from holdfast.control.run_agents import RunAgents
from holdfast.core.admission import Gang


class _Pool:
    """Says what the run's places wait for."""

    text = ""

    def enter(self, run: RunAgents) -> None: ...

    def request(self, run: RunAgents) -> None: ...

    def waiting_for(self, run: RunAgents) -> str:
        return self.text


class _Watched(RunAgents):
    """Keeps every value that another thread could have read."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "waiting_for":
            self.__dict__.setdefault("seen", []).append(value)
        super().__setattr__(name, value)


def test_who_reads_what_is_waited_for_never_sees_nothing_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view that read "" once would sleep until the run begins to wait anew, which it then does not."""
    monkeypatch.setattr(module, "_LOOK_S", 0.0)

    async def main() -> tuple[list[str], int]:
        pool, began = _Pool(), []
        run = _Watched(
            cast("AgentPool", pool),
            Gang(run="run", workers=2, slots_per_worker=1),
            _PREPARATION,
            lambda event: None,
            Publisher([]),
            lambda kind, data: data,
        )
        run.on_waiting = lambda: began.append(run.waiting_for)
        run.links = cast("Any", {"a": None})
        run.request(2)
        while len(run.__dict__["seen"]) < 5:
            await asyncio.sleep(0)
        run._look_no_more()
        return run.__dict__["seen"], len(began)

    seen, began = asyncio.run(main())
    text = "1 agent to import the training function"
    assert (seen[0], set(seen[1:-1]), seen[-1]) == ("", {text}, "")
    assert began == 1
