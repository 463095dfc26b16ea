"""One server of each kind for all tests of a process: started by the first test that needs it, stopped at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.contract import servers

__all__ = ["azurite", "gcs", "moto", "rclone"]


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
