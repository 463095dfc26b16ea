"""The engine contract over the local engine."""

from __future__ import annotations

import pytest
from tests.contract.engine_contract import EngineContract

from holdfast.engines.engine import MakeEngine
from holdfast.engines.local import LocalEngine


class TestLocalEngine(EngineContract):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TMPDIR", str(tmp_path))

    def make_engine(self) -> MakeEngine:
        return LocalEngine
