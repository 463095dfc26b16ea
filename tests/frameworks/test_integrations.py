"""What the integrations do besides training: checks, models from checkpoints, local mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs.sandbox import Sandbox

from holdfast import train
from holdfast.train import Result, RunConfig, ScalingConfig

# Some of the frameworks warn when they are imported.
pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

_XGBOOST = {"objective": "reg:squarederror", "nthread": 1}
_LIGHTGBM = {"objective": "regression", "num_threads": 1, "verbosity": -1, "min_data_in_leaf": 1}


def test_lightning_refuses_a_strategy_that_would_start_processes() -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from holdfast.train.lightning import DDPStrategy, RayDDPStrategy, prepare_trainer

    assert DDPStrategy is RayDDPStrategy
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    with pytest.raises(RuntimeError, match=r"Trainer\(strategy\) is a SingleDeviceStrategy: give it RayDDPStrategy"):
        prepare_trainer(pl.Trainer(**options))
    trainer = pl.Trainer(strategy=RayDDPStrategy(), **options)
    with pytest.raises(RuntimeError, match=r"plugins=\[holdfast.train.lightning.RayLightningEnvironment\(\)\]"):
        prepare_trainer(trainer)


def test_transformers_trains_on_an_iterable_of_batches(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    from holdfast.train.huggingface.transformers import prepare_trainer

    class Batches:
        def __iter__(self) -> Any:
            return iter(
                [{"input_ids": torch.ones(2, 4, dtype=torch.long), "labels": torch.ones(2, 4, dtype=torch.long)}]
            )

    config = transformers.GPT2Config(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=1)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    trainer = transformers.Trainer(transformers.GPT2LMHeadModel(config), arguments, train_dataset=Batches())
    assert prepare_trainer(trainer) is trainer
    assert trainer.train().global_step == 2
    assert type(trainer).__name__ == "Trainer"


def test_an_xgboost_model_goes_through_a_checkpoint() -> None:
    xgboost = pytest.importorskip("xgboost")
    import numpy as np

    from holdfast.train.xgboost import XGBoostCheckpoint

    data = xgboost.DMatrix(np.arange(8.0).reshape(8, 1), label=np.arange(8.0))
    model = xgboost.train(_XGBOOST, data, num_boost_round=2)
    checkpoint = XGBoostCheckpoint.from_model(model)
    assert checkpoint.get_model().predict(data).tolist() == model.predict(data).tolist()
    directory = Path(checkpoint.path)
    del checkpoint
    assert not directory.exists()


def test_a_lightgbm_model_goes_through_a_checkpoint() -> None:
    lightgbm = pytest.importorskip("lightgbm")
    import numpy as np

    from holdfast.train.lightgbm import LightGBMCheckpoint

    rows = np.arange(8.0).reshape(8, 1)
    model = lightgbm.train(_LIGHTGBM, lightgbm.Dataset(rows, label=np.arange(8.0)), num_boost_round=2)
    checkpoint = LightGBMCheckpoint.from_model(model)
    assert checkpoint.get_model().predict(rows).tolist() == model.predict(rows).tolist()


def test_columns_in_arrow_memory_become_nullable_ones() -> None:
    pytest.importorskip("lightgbm")
    import pandas as pd
    import pyarrow as pa

    from holdfast.train.lightgbm import normalize_pandas_for_lightgbm

    frame = pd.DataFrame({"a": pd.array([1, None], dtype=pd.ArrowDtype(pa.int32())), "b": [1.5, 2.5]})
    frame["c"] = pd.array([True, False], dtype=pd.ArrowDtype(pa.bool_()))
    assert [str(kind) for kind in normalize_pandas_for_lightgbm(frame).dtypes] == ["Int32", "float64", "boolean"]


def _fit_xgboost(sandbox: Sandbox, workers: int, **callback: Any) -> Result:
    from holdfast.train.xgboost import XGBoostTrainer

    def function() -> None:
        import numpy as np
        import xgboost

        from holdfast.train.xgboost import RayTrainReportCallback

        data = xgboost.DMatrix(np.arange(8.0).reshape(8, 1), label=np.arange(8.0))
        xgboost.train(
            _XGBOOST,
            data,
            num_boost_round=3,
            evals=[(data, "train")],
            verbose_eval=False,
            callbacks=[RayTrainReportCallback(**callback)],
        )

    return XGBoostTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="run", storage_path=sandbox.storage),
    ).fit()


@pytest.mark.parametrize("workers", [0, 1])
def test_xgboost_in_one_process(sandbox: Sandbox, workers: int) -> None:
    """The model is saved at the end only, with the metrics of the last round."""
    pytest.importorskip("xgboost")
    from holdfast.train.xgboost import RayTrainReportCallback

    result = _fit_xgboost(sandbox, workers)
    assert result.checkpoint is not None
    assert RayTrainReportCallback.get_model(result.checkpoint).num_boosted_rounds() == 3
    assert result.metrics is not None and set(result.metrics) >= {"train-rmse"}
    assert sandbox.check_stored() == ["checkpoint_000000"]


def test_the_old_way_to_use_the_trainers_is_refused() -> None:
    pytest.importorskip("xgboost")
    from holdfast.train.xgboost import XGBoostTrainer

    with pytest.raises(DeprecationWarning, match=r"XGBoostTrainer\(params\) has gone: call the framework's own train"):
        XGBoostTrainer(lambda: None, params={"eta": 1})


def test_network_parameters_outside_of_a_trainer_are_none() -> None:
    pytest.importorskip("lightgbm")
    from holdfast.train.lightgbm import get_network_params

    with pytest.warns(UserWarning, match="call it in the training function of a LightGBMTrainer"):
        assert get_network_params() == {}


def test_one_jax_worker_needs_no_coordinator(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("jax")
    from holdfast.train.v2.jax import JaxTrainer

    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "mine"))

    def function() -> list[Any]:
        import jax

        return [jax.process_count(), jax.config.jax_compilation_cache_dir, float(jax.numpy.ones(3).sum())]

    result = JaxTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=train.RunConfig(name="run", storage_path=sandbox.storage),
    ).fit()
    assert result.return_value == [1, str(tmp_path / "mine"), 3.0]
