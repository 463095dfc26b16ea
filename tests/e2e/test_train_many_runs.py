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
from holdfast.control.history import read_records
from holdfast.core import records as r
from holdfast.errors import TrainingFailedError
from holdfast.storage.locate import open_store
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


_KILLS = 3


def _count(config: dict[str, Any]) -> int:
    """Counts to eight, with a checkpoint at each second step; one run in ten is killed again and again."""
    context = train.get_context()
    number = int(context.get_experiment_name().removeprefix("run"))
    checkpoint = train.get_checkpoint()
    value = 0 if checkpoint is None else value_of(checkpoint)
    assert value % 10 == 0 and value < 90, value
    for step in range(value // 10 + 1, 9):
        if step % 2 == 0:
            save(10 * step, checkpoint_upload_mode=train.CheckpointUploadMode.SYNC)
        else:
            train.report({"step": step, "run": number})
        kills = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if number % 10 == 3 and kills < _KILLS and step == 2 * kills + 3:
            os.kill(os.getpid(), signal.SIGKILL)
    return number


def _many(sandbox: Sandbox, count: int) -> None:
    agents: set[str] = set()
    trainers = [
        make_trainer(
            sandbox, _count, config={}, name=f"run{n}", verbose=0, failure_config=FailureConfig(max_failures=-1)
        )
        for n in range(count)
    ]
    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(lambda trainer: trainer.fit(), trainers))
    for number, result in enumerate(results):
        assert result.return_value == number
        assert result.checkpoint is not None and value_of(result.checkpoint) == 80
        assert [value_of(checkpoint) for checkpoint, _ in result.best_checkpoints] == [20, 40, 60, 80]
        records = list(read_records(open_store(str(sandbox.storage)).sub(f"run{number}")))
        starts = [record for record in records if isinstance(record, r.GenerationStarted)]
        assert len(starts) == (1 + _KILLS if number % 10 == 3 else 1)
        agents |= {agent for start in starts for agent in start.agents}
    assert len(agents) == 1
    assert _hub_threads() == []


def test_twenty_runs_on_one_agent_end_as_each_would_alone(sandbox: Sandbox) -> None:
    _many(sandbox, 20)


@pytest.mark.slow
def test_two_hundred_runs_on_one_agent_end_as_each_would_alone(sandbox: Sandbox) -> None:
    _many(sandbox, 200)
