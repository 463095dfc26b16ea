"""The driver of a caller outside a cluster: what its actor starts and keeps, without Ray, on the local engine."""

from __future__ import annotations

import asyncio
import copy
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.faults.programs import processes

from holdfast import train
from holdfast.control.history import read_history
from holdfast.core.records import RunInterrupted
from holdfast.engines.ray import driver_actor
from holdfast.errors import ConfigError, WorkerGroupError
from holdfast.storage.locate import open_store
from holdfast.train import DataParallelTrainer, RunConfig, ScalingConfig
from holdfast.train.remote_driver import DriverOutcome, decode_outcome
from holdfast.train.remote_fit import _MODULE, _checked, _job, for_cluster
from holdfast.train.request import build_request


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    monkeypatch.chdir(tmp_path / "code")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(
        driver_actor, "_environment", lambda: {**os.environ, "HOLDFAST_ENGINE": "local", "PYTHONUNBUFFERED": "1"}
    )
    monkeypatch.setattr(driver_actor, "_end_this_actor", lambda: None)


def _drive(path: Path, function: Any, config: dict[str, Any]) -> tuple[DriverOutcome, str]:
    """What came of it, and what it printed."""
    trainer = DataParallelTrainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="run", storage_path=path),
    )
    request = build_request(trainer, True, None, ())
    sent = copy.copy(trainer)
    sent.run_config = for_cluster(trainer.run_config, request.storage_path)
    job = msgspec.msgpack.encode(_job(request, sent, {"env_vars": {"FROM_CALLER": "yes"}}))

    async def main() -> tuple[bytes | None, str]:
        actor = driver_actor.DriverActor()
        assert await actor.state("one") == ("", True)
        await actor.start(_MODULE, job, "one", 60.0)
        assert await actor.state("other") == ("running", False)
        await actor.start(_MODULE, job, "one", 60.0)  # another caller, at the same time
        position, has_ended, text = 0, False, ""
        while not has_ended:
            position, pieces, has_ended, outcome, _ = await actor.read(position)
            text += "".join(one for _, one in pieces)
        assert await actor.state("one") == ("ended", True)
        assert "".join(one for _, one in (await actor.read(0))[1]) == text
        await actor.taken()
        assert await actor.state("one") == ("", True)
        return outcome, text

    outcome, text = asyncio.run(main())
    assert outcome is not None, text
    assert not list(path.parent.glob("holdfast-driver-*"))
    return decode_outcome(outcome), text


def _train(config: dict[str, Any]) -> tuple[int, ...]:
    print("variable", os.environ["FROM_CALLER"])
    train.report({"loss": float("nan"), "step": 1})
    if "error" in config:
        raise ValueError(config["error"])
    return (1, 2)


def test_the_output_and_the_view_of_the_run_come_back(tmp_path: Path) -> None:
    outcome, text = _drive(tmp_path / "storage", _train, {})
    view = _checked(outcome).view
    assert view is not None and view.metrics is not None
    assert view.metrics["step"] == 1 and view.metrics["loss"] != view.metrics["loss"]
    assert view.return_value == {"$tuple": [1, 2]}
    assert "variable yes" in text and "Training completed" in text


def test_a_failure_comes_back_as_the_records_have_it(tmp_path: Path) -> None:
    outcome, _ = _drive(tmp_path / "storage", _train, {"error": "no such luck"})
    with pytest.raises(WorkerGroupError, match="rank 0 raised ValueError: no such luck") as caught:
        _checked(outcome)
    assert repr(caught.value.worker_failures[0]) == "ValueError('no such luck')"


def test_what_keeps_a_run_from_starting_comes_back_with_its_class(tmp_path: Path) -> None:
    (tmp_path / "storage").write_text("a file")
    outcome, _ = _drive(tmp_path / "storage", _train, {})
    assert outcome.error is not None
    with pytest.raises(Exception, match="storage") as caught:
        _checked(outcome)
    assert type(caught.value).__module__ == ConfigError.__module__


def test_a_driver_stops_its_run_when_its_actor_is_gone(tmp_path: Path) -> None:
    started = tmp_path / "started"

    def wait(config: dict[str, Any]) -> None:
        started.touch()
        while True:
            train.report({"step": 1})

    trainer = DataParallelTrainer(
        wait, scaling_config=ScalingConfig(num_workers=1), run_config=RunConfig(name="run", storage_path=tmp_path)
    )
    job = msgspec.msgpack.encode(_job(build_request(trainer, True, None, ()), trainer, {}))

    async def main() -> None:
        actor = driver_actor.DriverActor()
        await actor.start(_MODULE, job, "", 60.0)
        async with asyncio.timeout(60):
            while not started.exists():
                await asyncio.sleep(0.02)
            assert actor._process is not None and actor._process.stdin is not None
            below = processes.descendants(actor._process.pid)
            actor._process.stdin.close()
            assert actor._task is not None
            await actor._task
        processes.wait_gone(*below)
        assert actor._outcome is None  # the driver has removed its directory

    asyncio.run(main())
    outcome = read_history(open_store(str(tmp_path / "run"))).durable.outcome
    assert isinstance(outcome, RunInterrupted) and outcome.why == "SIGTERM"
    assert not list(tmp_path.glob("holdfast-driver-*"))


def test_an_outcome_that_is_not_to_be_kept_is_there_for_those_who_wait(tmp_path: Path) -> None:
    """HOLDFAST_KEEP_OUTCOME_S=0: the actor must not end before it has answered."""

    async def main() -> float:
        actor = driver_actor.DriverActor()
        await actor.start("no_such_module", b"", "one", 0.0)
        position, has_ended = 0, False
        while not has_ended:
            position, _, has_ended, _, _ = await actor.read(position)
        assert actor._end is not None
        return actor._end.when() - asyncio.get_running_loop().time()

    assert asyncio.run(main()) > 1.0
