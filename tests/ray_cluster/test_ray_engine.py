"""The engine contract over the Ray engine."""

from __future__ import annotations

import pytest
from tests.contract.engine_contract import EngineContract
from tests.ray_cluster.conftest import RayCluster

from holdfast.engines.engine import ControllerEndpoint, Engine, MakeEngine, OnChange

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
