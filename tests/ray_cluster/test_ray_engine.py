"""The engine contract over the Ray engine."""

from __future__ import annotations

import asyncio

import pytest
from tests.contract.engine_contract import EngineContract
from tests.ray_cluster.conftest import RayCluster

from holdfast.core.admission import Gang
from holdfast.core.agent_phase import AgentPhase
from holdfast.engines.engine import AgentChange, ControllerEndpoint, Engine, MakeEngine, OnChange
from holdfast.storage.run_secret import make_secret

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]


class TestRayEngine(EngineContract):
    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: RayCluster) -> None:
        """On this cluster."""

    def make_engine(self) -> MakeEngine:
        def make(endpoint: ControllerEndpoint, on_change: OnChange) -> Engine:
            from holdfast.engines.ray.engine import RayEngine
            from holdfast.engines.ray.options import RayOptions

            return RayEngine(RayOptions("STRICT_PACK"), endpoint, on_change)

        return make

    def test_a_driver_that_nodes_cannot_reach_is_named_with_its_address(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from holdfast.engines.ray import engine

        monkeypatch.setattr(engine, "_DIAL_S", 1)

        async def main() -> list[AgentChange]:
            changes: list[AgentChange] = []
            made = self.make_engine()(ControllerEndpoint("127.0.0.1:9", make_secret()), changes.append)
            made.want([Gang(run="", workers=1, resources={"CPU": 1.0})])
            try:
                async with asyncio.timeout(60):
                    while len(changes) < 2:
                        await asyncio.sleep(0.02)
            finally:
                await made.close(0.0)
            return changes

        pending, gone = asyncio.run(main())
        assert (pending.phase, gone.phase) == (AgentPhase.PENDING, AgentPhase.GONE)
        assert "127.0.0.1:9" in gone.why
