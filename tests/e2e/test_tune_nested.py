"""Trials that call a trainer's `fit()`: a run of its own below each trial's worker, which lives and ends with the
trial, goes on where it was when the trial does, and whose reports are the trial's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs import processes
from tests.faults.programs.sandbox import Sandbox

from holdfast import train, tune
from holdfast.core import records as r
from holdfast.train import DataParallelTrainer
from holdfast.tune.integration.ray_train import TuneReportCallback
from holdfast.worker import session as sessions
from holdfast.worker.stdio import DUMP_SIGNAL

_REPOSITORY = Path(__file__).resolve().parents[2]


def steps(config: dict[str, Any]) -> None:
    """Epochs with a checkpoint each, of rank 0."""
    first, rank = 0, train.get_context().get_world_rank()
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            first = int(Path(directory, "epoch").read_text()) + 1
    for epoch in range(first, config["epochs"]):
        if config.get("at") == epoch and rank == 0:
            config["do"](config)
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "epoch").write_text(str(epoch))
            given = train.Checkpoint.from_directory(directory) if rank == 0 else None
            train.report({"epoch": epoch, "first": first, "rank": rank}, given)
        train.get_checkpoint()  # waits for the commit


def fit(config: dict[str, Any], **others: Any) -> train.Result:
    """What a trial does."""
    workers = config.get("workers", 2)
    return DataParallelTrainer(
        steps,
        train_loop_config=config,
        scaling_config=train.ScalingConfig(num_workers=workers),
        run_config=train.RunConfig(
            name=f"run-{tune.get_context().get_trial_id()}",
            storage_path=config["storage"],
            callbacks=[TuneReportCallback()],
            **others,
        ),
    ).fit()


def trial(config: dict[str, Any]) -> None:
    fit(config)


def run(sandbox: Sandbox, trainable: Any, config: dict[str, Any], **settings: Any) -> tune.ResultGrid:
    tuning = {"name": "tuning", "storage_path": sandbox.storage, **settings}
    return tune.Tuner(
        trainable,
        param_space={"storage": str(sandbox.storage), "epochs": 3, **config},
        run_config=tune.RunConfig(**tuning),
    ).fit()


def inner_name(sandbox: Sandbox) -> str:
    (found,) = sandbox.storage.glob("run-*")
    return found.name


def epochs(result: tune.Result) -> list[int]:
    frame = result.metrics_dataframe
    assert frame is not None
    assert frame["training_iteration"].tolist() == list(range(1, len(frame) + 1))
    told: list[int] = frame["epoch"].tolist()
    return told


# ---------------------------------------------------------------------- reports


def look_around(config: dict[str, Any]) -> None:
    """In a worker of the run below: it knows its own run, and nothing of the trial's."""
    context = train.get_context()
    found = [context.get_world_size(), context.get_metadata(), context.get_experiment_name()]
    assert found == [2, {}, config["run"]], found
    assert Path(os.environ["TUNE_ORIG_WORKING_DIR"]) == Path(config["start"])
    os.kill(os.getpid(), DUMP_SIGNAL)  # as the agent asks for stacks: it must not end the worker


def trial_that_goes_on(config: dict[str, Any]) -> None:
    name = f"run-{tune.get_context().get_trial_id()}"
    result = fit({**config, "at": 1, "do": look_around, "run": name})
    assert result.metrics is not None
    tune.report({"epoch": 10 + result.metrics["epoch"], "trial": tune.get_context().get_trial_id()})


def test_what_a_trainer_in_a_trial_reports_reaches_the_trial(sandbox: Sandbox) -> None:
    results = run(sandbox, trial_that_goes_on, {"start": str(Path.cwd())})
    (result,) = results
    assert result.error is None
    assert epochs(result) == [0, 1, 2, 12]
    assert result.metrics is not None and inner_name(sandbox) == f"run-{result.metrics['trial']}"
    assert sandbox.check_stored(inner_name(sandbox)) == [f"checkpoint_00000{n}" for n in range(3)]
    frame = result.metrics_dataframe
    assert frame is not None
    run_directory = sandbox.storage / inner_name(sandbox)
    assert frame["checkpoint_path"].tolist()[:3] == [str(run_directory / f"checkpoint_00000{n}") for n in range(3)]
    assert frame["rank"].tolist()[:3] == [0, 0, 0]
    assert result.checkpoint is None  # they are the trainer's


def test_a_trainer_in_local_mode_leaves_the_trial_as_it_was(sandbox: Sandbox) -> None:
    (result,) = run(sandbox, trial_that_goes_on_locally, {"workers": 0})
    assert result.error is None
    assert epochs(result) == [0, 1, 2, 12]


def trial_that_goes_on_locally(config: dict[str, Any]) -> None:
    result = fit(config)
    assert result.metrics is not None
    tune.report({"epoch": 10 + result.metrics["epoch"]})


class WasInWorker:
    """Becomes whether there is a session when it is unpickled: a worker has none yet, unless it is the outer run's."""

    def __reduce__(self) -> Any:
        return sessions.is_installed, ()


def note_metadata(config: dict[str, Any]) -> None:
    Path(config["note"]).write_text(f"{train.get_context().get_metadata()} {config['was_in_worker']}")
    train.report({})


def start_run(config: dict[str, Any]) -> None:
    assert train.get_context().get_metadata() == {"whose": "the outer run's"}
    DataParallelTrainer(
        note_metadata,
        train_loop_config={**config, "was_in_worker": WasInWorker()},
        run_config=train.RunConfig(name="inner", storage_path=config["storage"]),
    ).fit()
    assert train.get_context().get_metadata() == {"whose": "the outer run's"}


@pytest.mark.parametrize("workers", [1, 0])
def test_a_run_in_a_trainers_worker_has_a_session_of_its_own(sandbox: Sandbox, workers: int) -> None:
    note = sandbox.root / "note"
    DataParallelTrainer(
        start_run,
        train_loop_config={"storage": str(sandbox.storage), "note": str(note)},
        scaling_config=train.ScalingConfig(num_workers=workers),
        run_config=train.RunConfig(name="outer", storage_path=sandbox.storage),
        metadata={"whose": "the outer run's"},
    ).fit()
    # In local mode the worker is this process, which has threads, and so cannot be forked.
    assert note.read_text() == "{} False"


def fail_once(config: dict[str, Any]) -> None:
    if not (flag := Path(config["flag"])).exists():
        flag.touch()
        raise ValueError("not today")


def trial_with_failures(config: dict[str, Any]) -> None:
    fit({**config, "at": 2, "do": fail_once}, failure_config=train.FailureConfig(max_failures=1))


def test_what_a_trainer_does_again_is_reported_once(sandbox: Sandbox) -> None:
    (result,) = run(sandbox, trial_with_failures, {"flag": str(sandbox.root / "failed"), "epochs": 4})
    assert epochs(result) == [0, 1, 2, 3]
    kept = [one.metrics["first"] for one in sandbox.records(inner_name(sandbox)) if isinstance(one, r.Reported)]
    assert kept == [0, 0, 2, 2]  # so the failure was one


# ---------------------------------------------------------------------- the end of a trial


def wait_for_ever(config: dict[str, Any]) -> None:
    signal.pause()


def trial_with_end(config: dict[str, Any]) -> None:
    try:
        fit({**config, "epochs": 4, "at": 3, "do": wait_for_ever})
        Path(config["flag"]).write_text("fit() has returned")
    finally:
        Path(config["flag"]).write_text("left")


@pytest.mark.parametrize("workers", [2, 0])
def test_a_trial_that_is_stopped_stops_its_trainer(sandbox: Sandbox, workers: int) -> None:
    flag = sandbox.root / "left"
    config = {"flag": str(flag), "workers": workers}
    (result,) = run(sandbox, trial_with_end, config, stop={"training_iteration": 3})
    assert result.error is None and flag.read_text() == "left"
    assert epochs(result) == [0, 1, 2]
    end = sandbox.records(inner_name(sandbox))[-1]
    assert isinstance(end, r.RunInterrupted) and end.why == "the trial does not go on"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill_trial(config: dict[str, Any]) -> None:
    """Once, and note who is below the trial: this worker, its zygote, and the agent."""
    if not (flag := Path(config["flag"])).exists():
        zygote = os.getppid()
        flag.write_text(" ".join(map(str, (os.getpid(), zygote, parent_of(zygote)))))
        os.kill(config["trial_pid"], signal.SIGKILL)
        signal.pause()


def trial_to_kill(config: dict[str, Any]) -> None:
    """The second trial is there all the time, in the zygote of the first."""
    if config["x"] == 1:
        Path(config["wait"]).read_text()
        return
    if (flag := Path(config["flag"])).exists():
        agents = Path(os.environ["HOLDFAST_LOCAL_CACHE_DIR"], "agents")
        left = [pid for pid in flag.read_text().split() if Path("/proc", pid).exists()]
        left += [path.name for path in agents.iterdir() if f"-{config['pid']}-" not in path.name]
        Path(config["left"]).write_text(" ".join(left))
        Path(config["wait"]).write_text("go")
    fit({**config, "at": 2, "do": kill_trial, "trial_pid": os.getpid()})


@pytest.mark.parametrize("forked", ["1", "0"])
def test_a_trial_that_is_killed_takes_its_trainer_along_and_goes_on_with_it(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, forked: str
) -> None:
    monkeypatch.setenv("HOLDFAST_FORK_DRIVER", forked)
    space = {name: str(sandbox.root / name) for name in ("flag", "wait", "left")}
    os.mkfifo(space["wait"])
    results = run(
        sandbox,
        trial_to_kill,
        {**space, "pid": os.getpid(), "epochs": 4, "x": tune.grid_search([0, 1])},
        failure_config=tune.FailureConfig(max_failures=1),
    )
    assert results.num_errors == 0
    assert Path(space["left"]).read_text() == ""
    (result,) = [one for one in results if one.metrics]
    assert epochs(result) == [0, 1, 2, 3]  # those before the kill, too, which the first worker had reported
    frame = result.metrics_dataframe
    assert frame is not None and frame["first"].tolist() == [0, 0, 2, 2]
    assert all(Path(path).is_dir() for path in frame["checkpoint_path"])


def trial_that_fails_afterwards(config: dict[str, Any]) -> None:
    fit(config)
    fail_once(config)


def test_a_trial_whose_trainer_is_complete_is_told_of_its_reports(sandbox: Sandbox) -> None:
    settings = {"failure_config": tune.FailureConfig(max_failures=1)}
    (result,) = run(sandbox, trial_that_fails_afterwards, {"flag": str(sandbox.root / "failed")}, **settings)
    assert result.error is None
    assert epochs(result) == [0, 1, 2]
    assert len([one for one in sandbox.records(inner_name(sandbox)) if isinstance(one, r.Reported)]) == 3


_SCRIPT = """
import sys
from tests.e2e.test_tune_nested import hold, fit
from holdfast import tune

def trial(config):
    fit({**config, "at": 1, "do": hold})

tune.Tuner(
    trial,
    param_space={"storage": sys.argv[1], "epochs": 3, "here": sys.argv[2]},
    run_config=tune.RunConfig(name="tuning", storage_path=sys.argv[1]),
).fit()
"""


def hold(config: dict[str, Any]) -> None:
    Path(config["here"]).write_text("here")
    wait_for_ever(config)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_of_a_trainer_outlives_the_experiment(sandbox: Sandbox, number: int) -> None:
    here = sandbox.root / "here"
    os.mkfifo(here)
    command = [sys.executable, "-c", _SCRIPT, str(sandbox.storage), str(here)]
    with subprocess.Popen(command, cwd=_REPOSITORY, stderr=subprocess.DEVNULL) as driver:
        assert here.read_text() == "here"
        driver.send_signal(number)
    processes.wait_gone(*processes.with_environment(sandbox.marker))
    assert list(sandbox.cache.glob("agents/*")) == []
