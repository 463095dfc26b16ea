"""The frameworks' callbacks in trials: what is reported when, with which checkpoints."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from tests.faults.programs.sandbox import Sandbox

from holdfast import tune
from holdfast.errors import ConfigError

# Some of the frameworks warn when they are imported.
pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _by_value() -> Iterator[None]:
    """Workers cannot import this module."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def run(sandbox: Sandbox, trainable: Any, config: dict[str, Any], **settings: Any) -> tune.Result:
    results = tune.Tuner(
        trainable,
        param_space=config,
        run_config=tune.RunConfig(name="tuning", storage_path=sandbox.storage, **settings),
    ).fit()
    (result,) = results
    assert result.error is None, result.error
    return result


def names_in(directory: str) -> list[str]:
    return [path.name for path in Path(directory).iterdir() if not path.name.startswith(".")]


def boost_xgboost(config: dict[str, Any]) -> None:
    import numpy as np
    import xgboost

    from holdfast.tune.integration.xgboost import TuneReportCheckpointCallback

    rows = np.arange(20.0).reshape(-1, 1)
    data = xgboost.DMatrix(rows, label=rows[:, 0])
    callback = TuneReportCheckpointCallback({"loss": "eval-rmse"}, filename="mine.ubj", frequency=2)
    xgboost.train(
        {"nthread": 1},
        data,
        num_boost_round=5,
        evals=[(data, "eval")],
        callbacks=[callback],
        verbose_eval=False,
    )


def test_xgboost_reports_rounds_and_models_to_its_trial(sandbox: Sandbox) -> None:
    pytest.importorskip("xgboost")
    get_model: Any = importlib.import_module("holdfast.tune.integration.xgboost").TuneReportCheckpointCallback.get_model
    result = run(sandbox, boost_xgboost, {})
    frame = result.metrics_dataframe
    assert frame is not None and len(frame) == 6  # five rounds, and the model at the end
    assert {"training_iteration", "loss"} <= set(frame.columns) and "eval-rmse" not in frame.columns
    assert result.checkpoint is not None and len(result.best_checkpoints) == 3
    with result.checkpoint.as_directory() as directory:
        assert names_in(directory) == ["mine.ubj"]
    assert get_model(result.checkpoint, "mine.ubj").num_boosted_rounds() == 5


def boost_lightgbm(config: dict[str, Any]) -> None:
    import lightgbm
    import numpy as np

    from holdfast.tune.integration.lightgbm import TuneReportCheckpointCallback

    rows = np.arange(20.0).reshape(-1, 1)
    data = lightgbm.Dataset(rows, label=rows[:, 0])
    lightgbm.train(
        {"objective": "regression", "num_threads": 1, "verbosity": -1, "min_data_in_leaf": 1},
        data,
        num_boost_round=config["rounds"],
        valid_sets=[data],
        valid_names=["eval"],
        callbacks=[TuneReportCheckpointCallback(["eval-l2"], checkpoint_at_end=config["at_end"])],
    )


@pytest.mark.parametrize("at_end", [True, False])
def test_lightgbm_reports_rounds_and_models_to_its_trial(sandbox: Sandbox, at_end: bool) -> None:
    pytest.importorskip("lightgbm")
    result = run(sandbox, boost_lightgbm, {"rounds": 4, "at_end": at_end}, stop={"training_iteration": 4})
    frame = result.metrics_dataframe
    assert frame is not None and len(frame) == 4 and frame["eval-l2"].is_monotonic_decreasing
    assert (result.checkpoint is not None) == at_end


def train_lightning(config: dict[str, Any]) -> None:
    import torch

    from holdfast.train.lightning.strategies import pl
    from holdfast.tune.integration import pytorch_lightning

    class Model(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.layer(batch).square().mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.layer(batch).square().mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def batches() -> Any:
        return torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=2)

    callback = getattr(pytorch_lightning, config["callback"])(**config["arguments"])
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(Model(), batches(), batches())


@pytest.mark.parametrize(
    ("callback", "arguments", "columns", "reports", "checkpoints"),
    [
        ("TuneReportCheckpointCallback", {"metrics": {"mine": "val_loss"}, "filename": "mine.ckpt"}, {"mine"}, 3, 3),
        ("TuneReportCheckpointCallback", {"save_checkpoints": False}, {"loss", "val_loss"}, 3, 0),
        (
            "TuneReportCheckpointCallback",
            {"metrics": ["loss", "none"], "save_checkpoints": False, "on": ["train_epoch_end", "train_batch_end"]},
            {"loss"},
            9,
            0,
        ),
        ("TuneReportCallback", {"metrics": "val_loss", "on": "train_epoch_end"}, {"val_loss"}, 3, 0),
        ("TuneReportCheckpointCallback", {"metrics": "none"}, set(), 0, 0),
    ],
)
def test_lightning_reports_at_its_hooks(
    sandbox: Sandbox, callback: str, arguments: dict[str, Any], columns: set[str], reports: int, checkpoints: int
) -> None:
    pytest.importorskip("lightning")
    result = run(sandbox, train_lightning, {"callback": callback, "arguments": arguments})
    frame = result.metrics_dataframe
    assert (0 if frame is None else len(frame)) == reports
    assert (set() if frame is None else {"mine", "loss", "val_loss", "none"} & set(frame.columns)) == columns
    assert len(result.best_checkpoints) == checkpoints
    if result.checkpoint is not None:
        with result.checkpoint.as_directory() as directory:
            assert names_in(directory) == ["mine.ckpt"]


def test_lightning_refuses_a_hook_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("lightning")
    from holdfast.tune.integration.pytorch_lightning import TuneCallback, TuneReportCheckpointCallback

    with pytest.raises(ConfigError, match=r"TuneReportCheckpointCallback\(on\) names 'tea': choose from .*fit_end"):
        TuneReportCheckpointCallback(on="tea")
    with caplog.at_level(logging.WARNING):
        assert TuneReportCheckpointCallback("acc")._select({}) == {}
    assert "names 'acc', which was not logged: there is nothing." in caplog.text
    assert issubclass(TuneReportCheckpointCallback, TuneCallback)
