"""An experiment on nodes that join by themselves and do not see its storage. One is lost in the middle: its trials go
on elsewhere, and the others notice nothing."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.joined_agents import agent_without, can_hide, free_port
from tests.faults.programs import processes
from tests.faults.programs.sandbox import Sandbox

from holdfast import train, tune
from holdfast.checkpoint.verify import verify
from holdfast.core import records as r
from holdfast.linux.resources import cpu_count
from holdfast.storage.locate import open_store
from holdfast.storage.run_secret import open_secret
from holdfast.tune.run_experiment import read_lines

_TRIALS = 4
_STEPS = 4
_HELD_AT = 3


def make_climb() -> Any:
    """Made in a function, so that it is sent by value: workers cannot import this module."""
    steps, held_at = _STEPS, _HELD_AT

    def climb(config: dict[str, Any]) -> None:
        """Notes each step. The first time, at the third, it says which zygote it has and waits; the steps before are
        committed then."""
        step = 0
        if (checkpoint := tune.get_checkpoint()) is not None:
            step = checkpoint.to_dict()["step"]
        print("a line for the log")
        root, name = Path(config["root"]), f"trial{config['x']}"
        while step < steps:
            step += 1
            with (root / f"{name}.steps").open("a") as file:
                file.write(f"{step}\n")
            if step == held_at and not (root / f"{name}.zygote").exists():
                (root / f"{name}.zygote").write_text(str(os.getppid()))
                (root / f"{name}.here").write_text("here")
                (root / f"{name}.go").read_text()
            tune.report(
                {"step": step},
                checkpoint=tune.Checkpoint.from_dict({"step": step}),
                checkpoint_upload_mode=train.CheckpointUploadMode.SYNC,
            )

    return climb


@pytest.mark.timeout(180)
def test_a_lost_node_takes_its_own_trials_with_it_which_go_on_elsewhere(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    open_secret()
    sandbox.storage.mkdir()
    (sandbox.root / "here").mkdir()
    monkeypatch.chdir(sandbox.root / "here")
    monkeypatch.setenv("HOLDFAST_ENGINE", "join")
    monkeypatch.setenv("HOLDFAST_LISTEN", f"127.0.0.1:{port}")
    names = [f"trial{n}" for n in range(_TRIALS)]
    for name in names:
        os.mkfifo(sandbox.root / f"{name}.here")
        os.mkfifo(sandbox.root / f"{name}.go")
    tuner = tune.Tuner(
        tune.with_resources(make_climb(), {"cpu": 0}),
        param_space={"x": tune.grid_search(list(range(_TRIALS))), "root": str(sandbox.root)},
        tune_config=tune.TuneConfig(max_concurrent_trials=_TRIALS),
        run_config=tune.RunConfig(
            name="tuning", storage_path=sandbox.storage, failure_config=tune.FailureConfig(max_failures=1)
        ),
    )
    hide = can_hide()
    with (
        agent_without(sandbox.storage, port, "a", slots=2, hide=hide) as lost,
        agent_without(sandbox.storage, port, "b", slots=2, hide=hide) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        fitting = pool.submit(tuner.fit)
        for name in names:
            (sandbox.root / f"{name}.here").read_text()
        zygotes = {name: int((sandbox.root / f"{name}.zygote").read_text()) for name in names}
        on_lost = {name for name, zygote in zygotes.items() if processes.parent_of(zygote) == lost.pid}
        assert len(on_lost) == 2, "two trials are on each node"
        below = processes.descendants(lost.pid)
        lost.kill()
        lost.wait()
        processes.wait_gone(*below)
        for name in set(names) - on_lost:
            (sandbox.root / f"{name}.go").write_text("go")
        results = fitting.result(120)
        if hide:
            seen = Path(f"/proc/{other.pid}/root{sandbox.storage}")
            assert "\n".join(str(one.relative_to(seen)) for one in seen.rglob("*")) == "", (
                "written where only this node sees it"
            )
    assert not results.errors
    assert [one.metrics["step"] for one in results if one.metrics] == [_STEPS] * _TRIALS
    numbers = {one.metrics["trial_id"]: number for number, one in enumerate(results) if one.metrics}
    generations: list[list[r.GenerationStarted]] = [[] for _ in names]
    for line in read_lines(open_store(sandbox.storage / "tuning"))[1]:
        if isinstance(line.record, r.GenerationStarted):
            generations[numbers[line.run]].append(line.record)
    for number, name in enumerate(names):
        steps = [int(step) for step in (sandbox.root / f"{name}.steps").read_text().split()]
        if name in on_lost:
            assert steps == [1, 2, 3, 3, 4], "it went on from somewhere else than its last commit"
            assert [(one.agents, one.iteration) for one in generations[number]] == [(("a",), 0), (("b",), 2)]
        else:
            assert steps == [1, 2, 3, 4], "it was on another node"
            assert [(one.agents, one.iteration) for one in generations[number]] == [(("b",), 0)]
        assert verify(open_store(results[number].path), deep=True).intact
        log = Path(results[number].path, "logs", f"generation_{len(generations[number]):06d}", "rank_0.log")
        assert "a line for the log" in log.read_text()


@pytest.mark.timeout(120)
def test_local_agents_that_stand_in_for_nodes_share_the_trials(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two trials takes a whole machine, and waits for the other."""
    monkeypatch.setenv("HOLDFAST_LOCAL_NODES", "2")
    pipe = sandbox.root / "pipe"
    os.mkfifo(pipe)

    def meet(config: dict[str, Any]) -> None:
        with Path(config["pipe"]).open("w" if config["x"] else "r") as other:
            other.write("here") if config["x"] else other.read()
        tune.report({"x": config["x"]})

    results = tune.Tuner(
        tune.with_resources(meet, {"cpu": cpu_count()}),
        param_space={"x": tune.grid_search([0, 1]), "pipe": str(pipe)},
        run_config=tune.RunConfig(name="tuning", storage_path=sandbox.storage),
    ).fit()
    assert not results.errors
    lines = read_lines(open_store(sandbox.storage / "tuning"))[1]
    assert len({line.record.agent for line in lines if isinstance(line.record, r.AgentAdded)}) == 2
