"""XGBoost and LightGBM on two workers, one of which is killed on the way: the same model as undisturbed."""

from __future__ import annotations

import pytest
from tests.faults.programs.sandbox import Sandbox
from tests.frameworks.examples import check_survives

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]


def test_xgboost_survives_a_killed_worker(sandbox: Sandbox) -> None:
    pytest.importorskip("xgboost")
    check_survives(sandbox, "train_xgboost.py", "rmse", kill="1:5")


def test_lightgbm_survives_a_killed_worker(sandbox: Sandbox) -> None:
    pytest.importorskip("lightgbm")
    check_survives(sandbox, "train_lightgbm.py", "rmse", kill="1:5")
