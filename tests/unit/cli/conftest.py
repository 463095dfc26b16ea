"""A fixed width and environment for output that is compared exactly."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("HOLDFAST_DEBUG", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
