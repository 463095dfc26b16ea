"""An elastic run grows when an agent joins and shrinks when one is drained: no step is lost, no sample seen twice."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.joined_agents import free_port, joined_agent
from tests.faults.programs.processes import wait_until
from tests.faults.programs.sandbox import Sandbox

from holdfast import train
from holdfast.cli.main import main
from holdfast.core import records as r
from holdfast.errors import NotFound
from holdfast.storage.run_secret import open_secret
from holdfast.train import Checkpoint, RunConfig, ScalingConfig, collective

SIZE = 50


def consume(config: dict[str, Any]) -> int:
    """Train until the test has seen enough, and keep a ledger of the samples in the checkpoint, which is only made when
    it is asked for. Gives the number of epochs."""
    context = train.get_context()
    rank = context.get_world_rank()
    seen: list[list[int]] = []
    epoch = 0
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            parts = [json.loads(path.read_text()) for path in Path(directory).glob("rank_*.json")]
        epoch = parts[0]["epoch"]
        seen = [one for part in parts for one in part["seen"]] if rank == 0 else []
    shard = train.get_dataset_shard("train", elastic=True, global_batch_size=4)
    assert shard is not None
    while not collective.broadcast_from_rank_zero(Path(config["enough"]).exists()):
        shard.set_epoch(epoch)
        for batch in shard.iter_batches():
            if shard.loss_weight:
                seen += [[epoch, int(one)] for one in batch]
            collective.barrier()  # as a step of data-parallel training would
            _save(epoch, seen, rank, train.should_checkpoint())
        epoch += 1
    _save(epoch, seen, rank, True)
    return epoch


def _save(epoch: int, seen: list[list[int]], rank: int, is_due: bool) -> None:
    if not is_due:
        train.report({"epoch": epoch})
        return
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, f"rank_{rank}.json").write_text(json.dumps({"epoch": epoch, "seen": seen}))
        train.report({"epoch": epoch}, checkpoint=Checkpoint.from_directory(directory))


def _records(sandbox: Sandbox, kind: type[Any]) -> list[Any]:
    with suppress(NotFound):  # the run's directory is being made
        return [record for record in sandbox.records() if isinstance(record, kind)]
    return []


def _runs(sandbox: Sandbox, world_size: int) -> bool:
    """Whether a generation of this size runs."""
    started = _records(sandbox, r.GenerationStarted)
    running = _records(sandbox, r.GenerationRunning)
    return bool(started and running) and (
        started[-1].world_size == world_size and running[-1].generation == started[-1].generation
    )


def _trainer(sandbox: Sandbox, port: int, bounds: tuple[int, int]) -> train.DataParallelTrainer:
    """Trains until the file `enough` is there."""
    return train.DataParallelTrainer(
        consume,
        train_loop_config={"enough": str(sandbox.root / "enough")},
        scaling_config=ScalingConfig(
            num_workers=bounds,
            engine="join",
            listen=f"127.0.0.1:{port}",
            elastic_resize_monitor_interval_s=0.1,
            last_call_timeout=0,
        ),
        run_config=RunConfig(name="run", storage_path=sandbox.storage, verbose=0),
        datasets={"train": list(range(SIZE))},
    )


def _check_ledger(found: train.Result) -> None:
    """Every sample was seen once in each epoch."""
    assert found.checkpoint is not None
    with found.checkpoint.as_directory() as directory:
        parts = [json.loads(path.read_text()) for path in Path(directory).glob("rank_*.json")]
    ledger = Counter((epoch, one) for part in parts for epoch, one in part["seen"])
    assert ledger == Counter((epoch, one) for epoch in range(found.return_value) for one in range(SIZE))


def test_a_run_grows_and_shrinks_without_losing_a_step_or_a_sample(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_secret()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # what is sent to agents, so it is a small one
    port, enough = free_port(), sandbox.root / "enough"
    trainer = _trainer(sandbox, port, (1, 2))
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor())
        stack.callback(enough.touch)
        result = threads.submit(trainer.fit)
        first = stack.enter_context(joined_agent(port, "a", "--slots", "1"))
        wait_until(lambda: _runs(sandbox, 1), "one worker runs")
        stack.enter_context(joined_agent(port, "b", "--slots", "1"))
        wait_until(lambda: _runs(sandbox, 2), "two workers run")
        first.terminate()
        wait_until(lambda: _runs(sandbox, 1), "one worker runs again")
        enough.touch()
        found = result.result(60)
    starts, ends = _records(sandbox, r.GenerationStarted), _records(sandbox, r.GenerationEnded)
    assert [one.world_size for one in starts] == [1, 2, 1]
    assert [(one.planned, one.counted) for one in ends] == [(True, False)] * 2
    assert [one.iteration for one in ends] == [one.iteration for one in starts[1:]], "no step is lost"
    assert [one.why for one in ends] == ["there is room for 2 workers", "agent a is being drained: SIGTERM"]
    _check_ledger(found)


def test_bounds_that_are_changed_while_a_run_goes_on_resize_it_without_losing_a_step_or_a_sample(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    open_secret()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    port, enough, run = free_port(), sandbox.root / "enough", str(sandbox.storage / "run")
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor())
        stack.callback(enough.touch)
        result = threads.submit(_trainer(sandbox, port, (1, 2)).fit)
        for agent in ("a", "b"):
            stack.enter_context(joined_agent(port, agent, "--slots", "2"))
        wait_until(lambda: _runs(sandbox, 2), "two workers run")
        capsys.readouterr()
        assert main(["scale", run, "3:4"]) == 0
        told = "Run run may have 3 to 4 workers from now on: it has 2, and gets the others as soon as there is room"
        assert told in capsys.readouterr().out
        wait_until(lambda: _runs(sandbox, 4), "four workers run")
        assert main(["scale", run, "1"]) == 0
        assert "may have 1 worker from now on: it has 4, and gives up the others" in capsys.readouterr().out
        wait_until(lambda: _runs(sandbox, 1), "one worker runs")
        assert main(["status", run]) == 0
        assert "1 of 1\n" in capsys.readouterr().out
        for bad in ("0", "3:2", "two"):
            assert main(["scale", run, bad]) != 0
            assert "WORKERS" in capsys.readouterr().err
        enough.touch()
        found = result.result(60)
    starts, ends = _records(sandbox, r.GenerationStarted), _records(sandbox, r.GenerationEnded)
    assert starts[-1].world_size == 1 and 4 in [one.world_size for one in starts]
    assert all(one.planned and not one.counted for one in ends)
    assert [one.iteration for one in ends] == [one.iteration for one in starts[1:]], "no step is lost"
    assert [one.why for one in ends[-2:]] == ["there is room for 4 workers", "1 worker at most may run now"]
    bounds = _records(sandbox, r.BoundsChanged)
    assert [(one.workers_min, one.workers_max, one.why) for one in bounds] == [
        (3, 4, "holdfast scale"),
        (1, 1, "holdfast scale"),
    ]
    _check_ledger(found)
    assert main(["scale", run, "2"]) == 3
    assert "Nothing runs in" in capsys.readouterr().err
