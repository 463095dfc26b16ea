"""For every test: hypothesis judges what it finds, never how long the machine took; tests that need root are skipped
for other users. One storage server of each kind serves all tests of a process: started by the first test that needs it,
stopped at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from tests.contract import servers

settings.register_profile("holdfast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("holdfast")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    for item in items:
        if item.get_closest_marker("hosts"):
            item.add_marker(pytest.mark.skip(reason="needs root: mounts, control groups, users or namespaces"))


@pytest.fixture(scope="session", autouse=True)
def _state_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test makes a run secret in the user's home."""
    os.environ["HOLDFAST_STATE_DIR"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def moto() -> Iterator[servers.Server]:
    """S3 that obeys put-if-absent."""
    with servers.moto() as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """S3 that answers success to every put-if-absent."""
    with servers.rclone_s3(tmp_path_factory.mktemp("rclone-s3")) as server:
        yield server


@pytest.fixture(scope="session")
def azurite() -> Iterator[servers.Server]:
    """Azure blobs."""
    with servers.azurite() as server:
        yield server


@pytest.fixture(scope="session")
def gcs() -> Iterator[servers.Server]:
    """Google Cloud Storage."""
    with servers.gcs() as server:
        yield server
