"""The names of the integrations, their parameters and defaults are those of Ray Train and Ray Tune, except for what is
listed here, and in `differences_tune`."""

from __future__ import annotations

import importlib

import pytest
from tests.compat.differences_tune import INTEGRATIONS, MISSING_INTEGRATIONS
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
    "tune.integration.pytorch_lightning": "lightning",
    "tune.integration.xgboost": "xgboost",
    "tune.integration.lightgbm": "lightgbm",
}
MISSING = {
    **MISSING_INTEGRATIONS,
    "train.xgboost.XGBoostCheckpoint.get_preprocessor": _PREPROCESSOR,
    "train.xgboost.XGBoostCheckpoint.set_preprocessor": _PREPROCESSOR,
    "train.lightgbm.LightGBMCheckpoint.get_preprocessor": _PREPROCESSOR,
    "train.lightgbm.LightGBMCheckpoint.set_preprocessor": _PREPROCESSOR,
}
OTHER_DEFAULTS = {
    "train.xgboost.RayTrainReportCallback(filename)": _FILENAME,
    "train.lightgbm.RayTrainReportCallback(filename)": _FILENAME,
    "tune.integration.xgboost.TuneReportCheckpointCallback(filename)": _FILENAME,
    "tune.integration.lightgbm.TuneReportCheckpointCallback(filename)": _FILENAME,
}


@pytest.mark.parametrize("module", MODULES)
def test_every_difference_is_listed_with_its_reason(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    pytest.importorskip("ray")
    pytest.importorskip(MODULES[module])
    theirs, mine = importlib.import_module(f"ray.{module}"), importlib.import_module(f"holdfast.{module}")
    found = compare(theirs, mine, module, INTEGRATIONS.get(module, ()))
    assert found.missing == sorted(name for name in MISSING if name.startswith(f"{module}."))
    assert found.default == [name for name in OTHER_DEFAULTS if name.startswith(f"{module}.")]
    assert found.order == []
    plain = {"DDPStrategy", "DeepSpeedStrategy", "FSDPStrategy", "LightningEnvironment", "ReportCallback"}
    assert {name.rpartition(".")[2] for name in found.ours} <= plain
