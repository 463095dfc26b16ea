"""The names of the integrations, their parameters and defaults are Ray Train's, except for what is listed here."""

from __future__ import annotations

import importlib

import pytest
from tests.compat.surface import compare

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

_PREPROCESSOR = "a part of Ray Data"
_FILENAME = "None stands for Ray's default"

MODULES = {
    "train.lightning": "lightning",
    "train.huggingface.transformers": "transformers",
    "train.xgboost": "xgboost",
    "train.lightgbm": "lightgbm",
    "train.v2.jax": "jax",
}
MISSING = {
    "train.xgboost.XGBoostCheckpoint.get_preprocessor": _PREPROCESSOR,
    "train.xgboost.XGBoostCheckpoint.set_preprocessor": _PREPROCESSOR,
    "train.lightgbm.LightGBMCheckpoint.get_preprocessor": _PREPROCESSOR,
    "train.lightgbm.LightGBMCheckpoint.set_preprocessor": _PREPROCESSOR,
}
OTHER_DEFAULTS = {
    "train.xgboost.RayTrainReportCallback(filename)": _FILENAME,
    "train.lightgbm.RayTrainReportCallback(filename)": _FILENAME,
}


@pytest.mark.parametrize("module", MODULES)
def test_every_difference_is_listed_with_its_reason(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    pytest.importorskip("ray")
    pytest.importorskip(MODULES[module])
    found = compare(importlib.import_module(f"ray.{module}"), importlib.import_module(f"holdfast.{module}"), module)
    assert found.missing == sorted(name for name in MISSING if name.startswith(f"{module}."))
    assert found.default == [name for name in OTHER_DEFAULTS if name.startswith(f"{module}.")]
    assert found.order == []
    plain = {"DDPStrategy", "DeepSpeedStrategy", "FSDPStrategy", "LightningEnvironment", "ReportCallback"}
    assert {name.rpartition(".")[2] for name in found.ours} <= plain
