"""`holdfast status`, `logs`, `stop`, `scale` and `join` on drivers that run, and on runs that nobody runs any more."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.small import make_trainer, save, value_of
from tests.faults.programs.processes import wait_until
from tests.faults.programs.sandbox import Sandbox

from holdfast import train
from holdfast.cli.main import main
from holdfast.core import records as r
from holdfast.train import CheckpointConfig, Result
from holdfast.train.interrupted import Interrupted


def _hold(config: dict[str, Any]) -> str:
    """Report a checkpoint, print, tell that it is here, and wait until it may go on."""
    name = train.get_context().get_experiment_name()
    print(f"hello of {name}", flush=True)
    save(1, checkpoint_upload_mode=train.CheckpointUploadMode.SYNC)
    Path(config["root"], f"{name}.here").write_text("here")
    return Path(config["root"], f"{name}.go").read_text()


def _start(pool: ThreadPoolExecutor, sandbox: Sandbox, name: str) -> Future[Result]:
    """Start a run, and wait until its worker holds."""
    for end in ("here", "go"):
        os.mkfifo(sandbox.root / f"{name}.{end}")
    started = pool.submit(make_trainer(sandbox, _hold, config={"root": str(sandbox.root)}, name=name, verbose=0).fit)
    (sandbox.root / f"{name}.here").read_text()
    return started


@contextmanager
def _threads(sandbox: Sandbox, *runs: str) -> Iterator[ThreadPoolExecutor]:
    """For the runs' `fit()`, which are stopped if the test fails."""
    with ThreadPoolExecutor(len(runs) + 1) as pool:
        try:
            yield pool
        except BaseException:
            for run in runs:
                main(["stop", str(sandbox.storage / run), "--force"])
            raise


def _let_go(sandbox: Sandbox, name: str) -> None:
    (sandbox.root / f"{name}.go").write_text("go")


def test_status_logs_and_stop_of_one_of_two_runs(
    sandbox: Sandbox, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_STORAGE", str(sandbox.storage))
    with _threads(sandbox, "a", "b") as pool:
        first, second = _start(pool, sandbox, "a"), _start(pool, sandbox, "b")
        capsys.readouterr()

        assert main(["status", str(sandbox.storage / "a")]) == 0
        shown = capsys.readouterr().out
        assert f"Run a: running, in process {os.getpid()} on " in shown
        assert "checkpoint_000000 (iteration 1)" in shown and "1 of 1" in shown and "joined" in shown
        assert main(["status", "b", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["name"], told["running"], told["phase"], told["iteration"]) == ("b", True, "running", 1)
        assert [one["ranks"] for one in told["agents"]] == [[0]]

        assert main(["logs", "a"]) == 0
        assert capsys.readouterr().out == "(rank 0) hello of a\n"
        assert main(["logs", "a", "--rank", "1"]) == 0
        assert capsys.readouterr().out == ""
        assert main(["join", "a"]) == 0
        assert capsys.readouterr().out.startswith("holdfast://127.0.0.1:")

        assert main(["scale", "a", "1:2"]) != 0
        assert "has a fixed number of workers, 1: set ScalingConfig(num_workers=" in capsys.readouterr().err

        following = pool.submit(main, ["logs", "b", "-f"])
        assert main(["stop", "a"]) == 0
        shown = capsys.readouterr().out
        assert "stopped (holdfast stop) after 1 iteration" in shown
        with pytest.raises(Interrupted, match="holdfast stop"):
            first.result(60)
        assert not second.done() and not following.done()
        _let_go(sandbox, "b")
        assert second.result(60).return_value == "go"
        assert following.result(60) == 0

    assert (shown + capsys.readouterr().out).count("(rank 0) hello of b\n") == 1
    assert main(["stop", "a"]) == 0
    assert capsys.readouterr().out == f"Nothing runs in {sandbox.storage / 'a'}.\n"
    assert main(["status", "a"]) == 0
    shown = capsys.readouterr().out
    assert "stopped (holdfast stop)" in shown and "To continue from checkpoint_000000" in shown
    assert main(["logs", "a"]) == 0
    assert capsys.readouterr().out == "(rank 0) hello of a\n"
    assert main(["logs", "a", "--rank", "7"]) == 3
    assert main(["join", "a"]) == 3
    assert "Nothing runs in" in capsys.readouterr().err
    assert main(["status", "c"]) == 3
    assert f"There is no run c in {sandbox.storage}, where a name alone is looked for" in capsys.readouterr().err


def test_a_run_in_local_mode_is_interrupted_in_its_function(sandbox: Sandbox) -> None:
    """Its function waits for something that never comes; Ctrl+C would interrupt it, too."""
    here = sandbox.root / "here"
    os.mkfifo(here)

    def function(config: dict[str, str]) -> None:
        Path(config["here"]).write_text("here")
        threading.Event().wait(60)
        raise AssertionError("it was not interrupted")

    def stop() -> int:
        here.read_text()
        return main(["stop", str(sandbox.storage / "run")])

    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop)
        with pytest.raises(Interrupted, match="holdfast stop"):
            make_trainer(sandbox, function, workers=0, config={"here": str(here)}, verbose=0).fit()
        assert stopping.result(60) == 0


def test_another_users_secret_opens_nothing(
    sandbox: Sandbox, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(sandbox.storage / "a")
    with _threads(sandbox, "a") as pool:
        started = _start(pool, sandbox, "a")
        with monkeypatch.context() as other:
            other.setenv("HOLDFAST_TOKEN", "wrong")
            assert main(["stop", run]) == 1
            assert "is not the controller's" in capsys.readouterr().err
            assert main(["status", run]) == 0  # what storage says needs no secret
            told = capsys.readouterr()
            assert "is not the controller's" in told.err and "not ended after 1 iteration" in told.out
        with monkeypatch.context() as other:
            other.setenv("HOLDFAST_STATE_DIR", str(sandbox.root / "elsewhere"))
            assert main(["stop", run]) == 2
            assert "HOLDFAST_TOKEN_FILE" in capsys.readouterr().err
        assert not started.done()
        _let_go(sandbox, "a")
        assert started.result(60).return_value == "go"


def _steps(config: dict[str, Any]) -> int:
    """One checkpoint after the other, until the test has seen enough."""
    found = train.get_checkpoint()
    step = 0 if found is None else value_of(found)
    while not Path(config["enough"]).exists():
        step += 1
        save(step, checkpoint_upload_mode=train.CheckpointUploadMode.SYNC)
    return step


def test_a_drained_agent_is_left_after_a_checkpoint_and_nothing_is_spent(
    sandbox: Sandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    run, enough = str(sandbox.storage / "run"), sandbox.root / "enough"
    keep = CheckpointConfig(num_to_keep=2)
    trainer = make_trainer(sandbox, _steps, config={"enough": str(enough)}, verbose=0, checkpoint_config=keep)
    with _threads(sandbox, "run") as pool:
        started = pool.submit(trainer.fit)
        wait_until(lambda: _places(run, capsys), "workers run")
        (before,) = _places(run, capsys)
        assert main(["drain", run, "nowhere"]) == 1
        assert "no agent named 'nowhere'" in capsys.readouterr().err
        assert main(["drain", run, before]) == 0
        assert f"{before} gets no new workers." in capsys.readouterr().out
        wait_until(lambda: _places(run, capsys) not in ({}, {before: "joined"}, {before: "draining"}), "they moved")
        assert list(_places(run, capsys).values()) == ["joined"]
        enough.touch()
        steps = started.result(60).return_value
    ended = [one for one in sandbox.records() if isinstance(one, r.GenerationEnded)]
    assert [(one.counted, "is being drained: holdfast drain" in one.why) for one in ended] == [(False, True)]
    committed = [one.iteration for one in sandbox.records() if isinstance(one, r.CheckpointCommitted)]
    assert committed == list(range(1, steps + 1)), "no step was lost, and none was committed twice"


def _places(run: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The phase of each agent on which workers of the run are; nothing while there is no driver to ask."""
    capsys.readouterr()
    if main(["status", run, "--json"]):
        return {}
    agents: list[dict[str, Any]] = json.loads(capsys.readouterr().out).get("agents", [])
    return {one["agent"]: one["phase"] for one in agents if one.get("ranks")}


def _asks(config: dict[str, Any]) -> None:
    """Report each step, with a checkpoint where one is due."""
    step = 0
    while True:
        step += 1
        if train.should_checkpoint():
            save(step)
        else:
            train.report({"value": step})
        time.sleep(0.01)


def test_a_run_that_asks_for_checkpoints_is_stopped_without_a_lost_step(
    sandbox: Sandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(sandbox.storage / "run")
    with _threads(sandbox, "run") as pool:
        started = pool.submit(make_trainer(sandbox, _asks, verbose=0, config={}).fit)
        wait_until(lambda: _iteration(run, capsys) >= 2, "some steps are done")
        assert main(["stop", run]) == 0
        with pytest.raises(Interrupted):
            started.result(60)
    reported = [one.iteration for one in sandbox.records() if isinstance(one, r.Reported)]
    committed = [one.iteration for one in sandbox.records() if isinstance(one, r.CheckpointCommitted)]
    assert committed[-1] == reported[-1], "the last step was saved"


def _iteration(run: str, capsys: pytest.CaptureFixture[str]) -> int:
    """How far the run is; 0 while there is no driver to ask."""
    capsys.readouterr()
    return 0 if main(["status", run, "--json"]) else int(json.loads(capsys.readouterr().out).get("iteration", 0))


def _hold_first(config: dict[str, Any]) -> str:
    return _hold(config) if train.get_context().get_world_rank() == 0 else ""


def test_bounds_are_refused_that_this_machine_can_never_hold(
    sandbox: Sandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    for end in ("here", "go"):
        os.mkfifo(sandbox.root / f"a.{end}")
    trainer = train.DataParallelTrainer(
        _hold_first,
        train_loop_config={"root": str(sandbox.root)},
        scaling_config=train.ScalingConfig(num_workers=(1, 2), resources_per_worker={"CPU": 0.01}),
        run_config=train.RunConfig(name="a", storage_path=sandbox.storage, verbose=0),
    )
    with _threads(sandbox, "a") as pool:
        running = pool.submit(trainer.fit)
        (sandbox.root / "a.here").read_text()
        assert main(["scale", str(sandbox.storage / "a"), "1000000"]) != 0
        told = capsys.readouterr().err
        assert "The run cannot have 1000000 workers: this machine has room for " in told
        _let_go(sandbox, "a")
        assert running.result(60).return_value == "go"
    assert not [one for one in sandbox.records("a") if isinstance(one, r.BoundsChanged)]
