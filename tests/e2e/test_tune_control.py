"""`holdfast status`, `stop` and `logs` on an experiment and on its trials, while a driver has it and afterwards."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs import processes
from tests.faults.programs.sandbox import Sandbox

from holdfast import tune
from holdfast.cli.main import main
from holdfast.train.interrupted import Interrupted


def make_tuner(sandbox: Sandbox) -> tune.Tuner:
    def hold(config: dict[str, Any]) -> None:
        """The first ends at once; the others print, say that they are here, and wait for good."""
        print(f"hello of {config['x']}", flush=True)
        tune.report({"loss": config["x"]})
        here = Path(config["root"], f"{config['x']}.here")
        if here.exists():
            here.write_text("here")
            Path(config["root"], "go").read_text()
        tune.report({"loss": -config["x"]})

    return tune.Tuner(
        hold,
        param_space={"x": tune.grid_search([0, 1, 2]), "root": str(sandbox.root), "api_key": "hush"},
        tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=2),
        run_config=tune.RunConfig(name="tuning", storage_path=sandbox.storage, stop={"training_iteration": 3}),
    )


@pytest.mark.timeout(120)
def test_an_experiment_and_its_trials_are_shown_and_stopped(
    sandbox: Sandbox,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOLDFAST_STORAGE", str(sandbox.storage))

    def run(*arguments: str) -> str:
        capsys.readouterr()
        assert main(list(arguments)) == 0
        return capsys.readouterr().out

    for n in (1, 2):
        os.mkfifo(sandbox.root / f"{n}.here")
    experiment = str(sandbox.storage / "tuning")
    with ThreadPoolExecutor(1) as pool:
        fitting = pool.submit(make_tuner(sandbox).fit)
        for n in (1, 2):
            (sandbox.root / f"{n}.here").read_text()
            (sandbox.root / f"{n}.here").unlink()
        told = json.loads(run("status", "tuning", "--json"))
        assert (told["running"], told["pid"], told["counts"]) == (True, os.getpid(), {"TERMINATED": 1, "RUNNING": 2})
        assert told["best"]["config"]["x"] == 0 and "hush" not in json.dumps(told)
        assert told["total_trials"] == 3 and told["best"]["metrics"] == {"loss": 0}
        first, second = (one["directory"] for one in told["live"])
        assert first.endswith("x=1") and second.endswith("x=2")
        shown = run("status", experiment)
        assert f"Experiment tuning: running, in process {os.getpid()} on " in shown
        assert "3 of 3  2 RUNNING, 1 TERMINATED" in shown and first in shown

        assert "Run tuning: running, in process" in run("status", f"{experiment}/{first}")
        # What is printed takes its own way to the driver, and a while.
        hello = "(rank 0) hello of 1\n"
        processes.wait_until(lambda: run("logs", f"{experiment}/{first}") == hello, "the output has arrived")
        assert main(["logs", "tuning"]) != 0
        assert "is an experiment: name one of its trials" in capsys.readouterr().err
        assert main(["scale", "tuning", "2"]) != 0
        assert "is an experiment: name one of its trials" in capsys.readouterr().err

        run("stop", f"{experiment}/{first}")
        assert json.loads(run("status", "tuning", "--json"))["pid"] == os.getpid(), "the experiment goes on"
        shown = run("stop", "tuning")
        assert "Experiment tuning: not ended" in shown and "To continue, run the same script again." in shown
        with pytest.raises(Interrupted):
            fitting.result(60)
    assert run("status", f"{experiment}/{first}").startswith(f"Trial {first}: TERMINATED after 1 iteration")
    assert run("logs", f"{experiment}/{second}") == "(rank 0) hello of 2\n"
    assert json.loads(run("status", f"{experiment}/{second}", "--json"))["status"] == "PENDING"
    assert "Nothing runs in" in run("stop", f"{experiment}/{second}")
    results = make_tuner(sandbox).fit()
    assert [one.metrics["training_iteration"] for one in results if one.metrics] == [2, 1, 2]
    assert "Experiment tuning: ended\n" in run("status", "tuning")
    told = run("events", "tuning")
    assert "DAMAGED" not in told
    assert [told.count(text) for text in ("is created.", "stopped after 1 report by the user", "ends.")] == [3, 1, 3]
    assert "Generation 1" in run("events", f"{experiment}/{first}")
    runs = {one["run"] for one in json.loads(run("events", "tuning", "--json"))["records"]}
    assert len(runs) == 4
    assert not [one for one in caplog.messages if "another run" in one]
    assert main(["status", f"{experiment}/nothing"]) != 0
    assert "is no training run" in capsys.readouterr().err
