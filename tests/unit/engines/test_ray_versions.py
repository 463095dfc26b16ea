"""What is said where Ray is missing, or is a version that the engine is not for."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from holdfast.engines.ray import cluster
from holdfast.errors import ConfigError, MissingExtra


def _install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    for name in ("ray", "ray.util", "ray.util.client"):
        module = ModuleType(name)
        module.__version__ = version  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("version", ["2.48.1", "3.0.0", "1.13"])
def test_a_version_out_of_range_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    _install(monkeypatch, version)
    with pytest.raises(ConfigError) as caught:
        cluster.import_ray()
    assert str(caught.value) == (
        f"Ray {version} is installed, but the Ray engine is for versions from 2.49 up to, but not including, 3.0: run "
        "pip install 'holdfast[ray]'."
    )


@pytest.mark.parametrize("version", ["2.49.0", "2.60.0", "2.100.0rc1"])
def test_a_version_in_range_is_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    _install(monkeypatch, version)
    assert cluster.import_ray().__version__ == version


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"needs Ray; run: pip install 'holdfast\[ray\]'"):
        cluster.import_ray()
