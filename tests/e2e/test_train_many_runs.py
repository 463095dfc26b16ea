"""Several `fit()` at the same time in threads of one process: they share its hub, and end independently."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.small import make_trainer, save, value_of
from tests.faults.programs.sandbox import Sandbox

from holdfast import train
from holdfast.errors import TrainingFailedError
from holdfast.train import FailureConfig, Result
from holdfast.train.interrupted import Interrupted


class _Meeting:
    """Named pipes on which workers and the test wait for each other: opening one end blocks until the other is open."""

    def __init__(self, root: Path, *runs: str) -> None:
        self._root = root
        for run in runs:
            os.mkfifo(root / f"{run}.here")
            os.mkfifo(root / f"{run}.go")

    def wait_for(self, run: str) -> None:
        """Until the run's worker has come to `hold`."""
        (self._root / f"{run}.here").read_text()

    def let_go(self, run: str) -> None:
        (self._root / f"{run}.go").write_text("go")


def _hold(config: dict[str, Any]) -> str:
    """For a worker: tell that it is here, and wait until it may go on."""
    root, run = Path(config["root"]), train.get_context().get_experiment_name()
    (root / f"{run}.here").write_text("here")
    return (root / f"{run}.go").read_text()


def _start(
    pool: ThreadPoolExecutor, sandbox: Sandbox, function: Callable[..., Any], name: str, **run: Any
) -> Future[Result]:
    trainer = make_trainer(sandbox, function, config={"root": str(sandbox.root)}, name=name, verbose=0, **run)
    return pool.submit(trainer.fit)


def _hub_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("holdfast-hub")]


def test_two_runs_share_a_hub_and_end_independently(sandbox: Sandbox) -> None:
    def function(config: dict[str, Any]) -> str:
        save(1)
        return _hold(config) + train.get_context().get_experiment_name()

    meeting = _Meeting(sandbox.root, "a", "b")
    with ThreadPoolExecutor(2) as pool:
        first = _start(pool, sandbox, function, "a")
        second = _start(pool, sandbox, function, "b")
        meeting.wait_for("a")
        meeting.wait_for("b")
        assert _hub_threads() == ["holdfast-hub"]
        meeting.let_go("a")
        ended = first.result(60)
        assert ended.return_value == "goa"
        assert _hub_threads() == ["holdfast-hub"] and not second.done()
        meeting.let_go("b")
        other = second.result(60)
        assert other.return_value == "gob"
    assert _hub_threads() == []
    for result in (ended, other):
        assert result.checkpoint is not None and value_of(result.checkpoint) == 1


def test_a_run_that_fails_again_and_again_leaves_the_other_alone(sandbox: Sandbox) -> None:
    def fails(config: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    meeting = _Meeting(sandbox.root, "good")
    with ThreadPoolExecutor(2) as pool:
        good = _start(pool, sandbox, _hold, "good")
        meeting.wait_for("good")
        bad = _start(pool, sandbox, fails, "bad", failure_config=FailureConfig(max_failures=1))
        with pytest.raises(TrainingFailedError, match="SIGKILL"):
            bad.result(60)
        meeting.let_go("good")
        assert good.result(60).return_value == "go"


def test_a_signal_stops_all_runs_of_the_process(sandbox: Sandbox) -> None:
    meeting = _Meeting(sandbox.root, "main", "other")
    trainer = make_trainer(sandbox, _hold, config={"root": str(sandbox.root)}, name="main", verbose=0)

    def interrupt() -> None:
        meeting.wait_for("main")
        meeting.wait_for("other")
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(2) as pool:
        other = _start(pool, sandbox, _hold, "other")
        interrupting = pool.submit(interrupt)
        with pytest.raises(Interrupted):
            trainer.fit()
        interrupting.result(60)
        with pytest.raises(Interrupted):
            other.result(60)
    assert _hub_threads() == []
