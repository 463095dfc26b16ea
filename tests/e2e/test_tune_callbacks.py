"""Callbacks of real experiments: told of what is durable, and able to end the experiment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs.sandbox import Sandbox

from holdfast import tune
from holdfast.core.records import Reported
from holdfast.journal.reader import JournalReader
from holdfast.storage.locate import open_store


def objective(config: dict[str, Any]) -> None:
    for step in range(3):
        tune.report({"loss": config["x"] + step})


class Ledger(tune.Callback):
    """Notes what was told, and how many records of reports the journal had by then."""

    def __init__(self, place: Path) -> None:
        self.place, self.fails = place, True
        self.told: list[Any] = []

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
        lines = [line for _, line in JournalReader(open_store(self.place)).read() if line.run == trial.trial_id]
        stored = [line.record.metrics for line in lines if isinstance(line.record, Reported)]
        assert {"loss": result["loss"]} in stored
        self.told.append((trial.config["x"], result["loss"], result["training_iteration"]))
        if self.fails and result["training_iteration"] == 2:
            raise RuntimeError("the ledger is full")

    def on_experiment_end(self, trials: Any, **info: Any) -> None:
        self.told.append([trial.status for trial in trials])


def test_a_callback_is_told_what_is_durable_and_its_error_ends_the_experiment(
    sandbox: Sandbox, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_QUIET", raising=False)
    ledger = Ledger(sandbox.storage / "told")

    def fit() -> tune.ResultGrid:
        return tune.Tuner(
            objective,
            param_space={"x": tune.grid_search([0, 10])},
            tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=1),
            run_config=tune.RunConfig(name="told", storage_path=sandbox.storage, callbacks=[ledger]),
        ).fit()

    with pytest.raises(tune.TuneError, match=r"Ledger\.on_trial_result raised RuntimeError: the ledger is full"):
        fit()
    assert ledger.told[:2] == [(0, 0, 1), (0, 1, 2)] and isinstance(ledger.told[-1], list)
    ledger.told, ledger.fails = [], False
    results = fit()
    assert results.num_terminated == 2
    assert [one for one in ledger.told if one[0] == 10] == [(10, 10, 1), (10, 11, 2), (10, 12, 3)]
    assert ledger.told[-1] == ["TERMINATED", "TERMINATED"]
    text = capfd.readouterr().err
    assert "2 TERMINATED; best: " in text and "loss 2" in text

    monkeypatch.setenv("HOLDFAST_JSON", "1")
    assert len(fit()) == 2
    kinds = [json.loads(line)["kind"] for line in capfd.readouterr().out.splitlines()]
    assert (kinds[0], kinds[-1]) == ("ExperimentStarted", "ExperimentEnded")
