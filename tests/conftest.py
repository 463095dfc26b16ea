"""For every test: hypothesis judges what it finds, never how long the machine took; tests that need root are skipped
for other users."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("holdfast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("holdfast")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    for item in items:
        if item.get_closest_marker("hosts"):
            item.add_marker(pytest.mark.skip(reason="needs root: mounts, control groups, users or namespaces"))
