"""The Ray engine where nodes vanish and come back, on a cluster that is a table. tests/ray_cluster has real ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.core.admission import Gang
from holdfast.core.agent_phase import AgentPhase
from holdfast.engines.engine import AgentChange, ControllerEndpoint
from holdfast.engines.ray import engine as module
from holdfast.engines.ray.bundles import GroupKind
from holdfast.engines.ray.engine import RayEngine
from holdfast.engines.ray.options import RayOptions

_GANG = Gang(run="run", workers=2, resources={"CPU": 1.0})


class _Cluster:
    """Stands in for the functions of `engines.ray.cluster`. A group lies on the first node that it may."""

    def __init__(self) -> None:
        self.alive = ["n1", "n2", "n3"]
        self.silent: set[str] = set()
        """Nodes that do not answer, and that Ray takes to be alive."""
        self.placed: dict[int, tuple[str, int]] = {}
        """By group: its node, and how many bundles it has."""
        self.ended: dict[str, Future[str]] = {}
        """By agent."""
        self.killed: list[str] = []
        self.asked: list[str] = []
        """Nodes that were looked at."""
        self.failures = 0
        """So many questions for the nodes fail."""

    def nodes(self) -> list[Any]:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the head is busy")
        return [SimpleNamespace(id=node) for node in self.alive]

    def draining_nodes(self) -> dict[str, float | None]:
        return {}

    def create_group(self, kind: GroupKind, options: RayOptions, without: Collection[str] = ()) -> int:
        group = len(self.placed) + 1
        self.placed[group] = next(node for node in self.alive if node not in without), kind.workers
        return group

    def remove_group(self, group: int) -> None:
        self.placed[group] = "", 0

    def group_nodes(self, group: int) -> tuple[bool, dict[int, str]]:
        node, workers = self.placed[group]
        return True, dict.fromkeys(range(workers), node)

    def start_agent(self, bundles: Sequence[Any], arguments: list[str], secret: str, environment: Any) -> Any:
        name = arguments[arguments.index("--agent-id") + 1]
        self.ended[name] = Future()
        return SimpleNamespace(actor=name, ended=self.ended[name])

    def kill_actor(self, actor: str) -> None:
        self.killed.append(actor)

    def reason_of(self, error: BaseException) -> str:
        return str(error)

    async def answers(self, node: Any) -> bool:
        self.asked.append(node.id)
        return node.id not in self.silent

    @property
    def used(self) -> list[tuple[str, int]]:
        return [one for one in self.placed.values() if one[1]]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> _Cluster:
    made = _Cluster()
    monkeypatch.setattr(module, "cluster", made)
    monkeypatch.setattr(module, "_answers", made.answers)
    monkeypatch.setattr(module, "_REPLACE_S", 600.0)
    return made


def _run(test: Callable[[RayEngine, list[AgentChange]], Coroutine[Any, Any, None]]) -> None:
    """With an engine whose task does not run, so that the test makes its steps."""

    async def main() -> None:
        changes: list[AgentChange] = []
        engine = RayEngine(RayOptions(), ControllerEndpoint("10.0.0.1:1", "secret"), changes.append)
        engine._task = asyncio.create_task(asyncio.sleep(0))
        async with asyncio.timeout(60):
            engine.want([_GANG])
            await engine._step()
            assert [one.phase for one in changes] == [AgentPhase.PENDING]
            await test(engine, changes)

    asyncio.run(main())


async def _close(engine: RayEngine, cluster: _Cluster) -> None:
    for ended in cluster.ended.values():
        if not ended.done():
            ended.set_result("it was told to end")
    await engine.close(0.0)
    assert cluster.used == []


def test_a_node_that_lost_an_agent_is_looked_at_although_ray_fails_meanwhile(cluster: _Cluster) -> None:
    async def test(engine: RayEngine, changes: list[AgentChange]) -> None:
        cluster.silent.add("n1")
        cluster.failures = 1
        engine.abandon(changes[0].agent)
        with pytest.raises(ConnectionError):
            await engine._step()
        await engine._step()
        assert (changes[1].phase, changes[1].why) == (AgentPhase.GONE, "its Ray node does not answer")
        assert cluster.used == [("n2", 2)], "on a node that answers, and what was on the other is given back"
        await _close(engine, cluster)

    _run(test)


def test_a_node_that_does_not_answer_holds_up_no_step_but_one_a_second(
    cluster: _Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To find out takes as long as it may take to answer."""
    monkeypatch.setattr(module, "_POLL_S", 600.0)

    async def test(engine: RayEngine, changes: list[AgentChange]) -> None:
        cluster.silent.add("n1")
        engine.abandon(changes[0].agent)
        for _ in range(5):
            await engine._step()
        assert cluster.asked == ["n1"]
        monkeypatch.setattr(module, "_POLL_S", 0.0)
        engine._look_again_at = 0.0
        cluster.silent.clear()
        await engine._step()
        assert cluster.asked == ["n1", "n1"] and not engine._unreachable
        await _close(engine, cluster)

    _run(test)


def test_the_bundles_of_an_agent_that_lives_are_used_again_once_its_node_answers(cluster: _Cluster) -> None:
    """Another agent was lost there, and the network was away for a moment."""

    async def test(engine: RayEngine, changes: list[AgentChange]) -> None:
        cluster.silent.add("n1")
        engine._doubted.add("n1")
        await engine._step()
        assert cluster.used == [("n1", 2), ("n2", 2)], "in case that the node is dead"
        cluster.silent.clear()
        engine._look_again_at = 0.0
        await engine._step()
        assert [one.kind.workers for one in engine._groups] == [2, 2]
        assert len(changes) == 2, "the other agent is there already; the first one goes on"
        await _close(engine, cluster)

    _run(test)


def test_a_group_that_is_being_made_when_the_engine_ends_is_given_back(
    cluster: _Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray keeps what it has reserved for as long as the driver's process lives."""
    begun, go = threading.Event(), threading.Event()
    create = cluster.create_group

    def slow(*arguments: Any) -> int:
        begun.set()
        assert go.wait(60)
        return create(*arguments)

    monkeypatch.setattr(cluster, "create_group", slow)

    async def main() -> None:
        engine = RayEngine(RayOptions(), ControllerEndpoint("10.0.0.1:1", "secret"), lambda change: None)
        engine.want([_GANG])
        await asyncio.to_thread(begun.wait, 60)
        closing = asyncio.create_task(engine.close(0.0))
        await asyncio.sleep(0)  # the engine's task is cancelled
        go.set()
        async with asyncio.timeout(60):
            await closing

    asyncio.run(main())
    assert cluster.placed == {1: ("", 0)}


def test_a_group_that_cannot_be_given_back_keeps_no_other(
    cluster: _Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remove = cluster.remove_group

    async def test(engine: RayEngine, changes: list[AgentChange]) -> None:
        engine.want([_GANG, Gang(run="other", workers=1, resources={"CPU": 1.0})])
        await engine._step()
        assert len(cluster.used) == 2

        def failing(group: int) -> None:
            if group == 1:
                raise ConnectionError("the head is gone")
            remove(group)

        monkeypatch.setattr(cluster, "remove_group", failing)
        for ended in cluster.ended.values():
            ended.set_result("it was told to end")
        await engine.close(0.0)

    _run(test)
    assert cluster.used == [("n1", 2)]
    assert "could not be removed: the head is gone" in caplog.text
