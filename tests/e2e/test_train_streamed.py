"""Runs whose storage path only the driver sees: the agent's mount namespace has another directory there."""

from __future__ import annotations

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.joined_agents import agent_without, can_hide, free_port
from tests.faults.programs import processes
from tests.faults.programs.sandbox import Sandbox

from holdfast import train
from holdfast.storage.run_secret import open_secret
from holdfast.train import Checkpoint, DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig, SyncConfig

pytestmark = [
    pytest.mark.skipif(not can_hide(), reason="mount namespaces are not permitted here"),
    pytest.mark.timeout(240),
]


@pytest.fixture(autouse=True)
def _secret(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_secret()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOLDFAST_AGENTS_TIMEOUT_S", "90")
    monkeypatch.setenv("HOLDFAST_BACKOFF_S", "0.01")
    sandbox.storage.mkdir()


def _trainer(
    sandbox: Sandbox, port: int, function: Any, workers: int = 1, config: dict[str, Any] | None = None, **run: Any
) -> DataParallelTrainer:
    return DataParallelTrainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers, engine="join", listen=f"127.0.0.1:{port}"),
        run_config=RunConfig(name="run", storage_path=sandbox.storage, **run),
    )


def _seen_by(agent: subprocess.Popen[bytes], sandbox: Sandbox) -> list[str]:
    """What lies at the storage path in the agent's own mount namespace."""
    return sorted(path.name for path in Path(f"/proc/{agent.pid}/root{sandbox.storage}").iterdir())


def _train_and_resume() -> dict[str, Any]:
    """Report directories; fail once; read the checkpoint back in all ways."""
    found = train.get_checkpoint()
    step = 0
    seen: dict[str, Any] = {}
    if found is not None:
        with found.as_directory() as directory:
            step = int(Path(directory, "step").read_text())
            seen["mode"] = Path(directory, "step").stat().st_mode & 0o700
        seen["copied"] = Path(found.to_directory(), "step").read_text()
        seen["again"] = Path(Checkpoint(found.path).to_directory(), "step").read_text()
        seen["path"] = found.path
        seen["there"] = Path(found.path).exists()
        seen["metadata"] = found.get_metadata()
    Path("artifact.txt").write_text(f"after {step}")
    print("a line for the log")
    while step < 4:
        step += 1
        target = Path(f"state_{step}").absolute()
        target.mkdir()
        Path(target, "step").write_text(str(step))
        Path(target, "step").chmod(0o500)
        Path(target, "large").write_bytes(b"x" * 3_000_000)
        given = Checkpoint.from_directory(target)
        given.set_metadata({"step": step})
        train.report({"step": step}, checkpoint=given)
        if step == 2 and found is None:
            raise RuntimeError("once")
    return seen


def test_checkpoints_logs_and_artifacts_of_a_node_without_the_path_go_to_the_driver(sandbox: Sandbox) -> None:
    port = free_port()
    with agent_without(sandbox.storage, port, "a") as agent, ThreadPoolExecutor() as threads:
        trainer = _trainer(
            sandbox,
            port,
            _train_and_resume,
            failure_config=FailureConfig(max_failures=1),
            sync_config=SyncConfig(sync_artifacts=True),
        )
        result = threads.submit(trainer.fit).result(timeout=180)
        assert _seen_by(agent, sandbox) == [], "nothing is written to another directory of the same path"
    seen = result.return_value
    assert seen["copied"] == seen["again"] == "2" and seen["mode"] == 0o500
    assert seen["path"] == str(sandbox.storage / "run" / "checkpoint_000001") and not seen["there"]
    assert seen["metadata"] == {"step": 2}
    assert sandbox.check_stored() == [f"checkpoint_00000{n}" for n in range(4)]
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path, "step").stat().st_mode & 0o700 == 0o500
    assert "a line for the log" in sandbox.log(2, 0)
    assert (sandbox.storage / "run" / "artifact.txt").read_text() == "after 2"


def _write_and_wait(config: dict[str, Any]) -> str:
    """Leave an artifact and a line; rank 0 alone gives a checkpoint. Then wait to be let go, so that it is not the end
    of the run that stores them."""
    rank = train.get_context().get_world_rank()
    Path(f"from_{rank}.txt").write_text(f"of rank {rank}")
    print(f"a line of rank {rank}")
    if rank == 0:
        target = Path("state").absolute()
        target.mkdir()
        Path(target, "step").write_text("1")
        train.report({}, checkpoint=Checkpoint.from_directory(target))
    else:
        train.report({})
    processes.wait_until(Path(config["go"]).exists, "the artifacts are stored", 60)
    return os.getcwd()  # noqa: PTH109


@pytest.mark.parametrize(
    "sync",
    [{"sync_period": 0.2, "sync_artifacts_on_checkpoint": False}, {"sync_period": 300}],
    ids=["period", "checkpoint"],
)
def test_artifacts_and_logs_of_every_node_are_stored_when_sync_config_says(
    sync: dict[str, Any], sandbox: Sandbox
) -> None:
    port, go, run = free_port(), sandbox.root / "go", sandbox.storage / "run"
    trainer = _trainer(
        sandbox,
        port,
        _write_and_wait,
        workers=2,
        config={"go": str(go)},
        sync_config=SyncConfig(sync_artifacts=True, **sync),
    )
    with (
        agent_without(sandbox.storage, port, "a", cache=sandbox.root / "cache-a"),
        agent_without(sandbox.storage, port, "b", cache=sandbox.root / "cache-b"),
        ThreadPoolExecutor() as threads,
    ):
        fitting = threads.submit(trainer.fit)
        try:
            wanted = [run / f"from_{rank}.txt" for rank in (0, 1)]
            if sync["sync_period"] < 1:
                wanted += [run / "logs" / "generation_000001" / f"rank_{rank}.log" for rank in (0, 1)]
            for path in wanted:
                processes.wait_until(path.exists, f"{path} is stored while the run goes on", 60)
            assert not fitting.done()
        finally:
            go.touch()
        assert fitting.result(timeout=60).return_value.startswith(str(sandbox.root / "cache-"))
    for rank in (0, 1):
        assert (run / f"from_{rank}.txt").read_text() == f"of rank {rank}"
        assert f"a line of rank {rank}" in sandbox.log(1, rank)


def _from_state() -> float:
    import numpy as np

    found = train.get_checkpoint()
    state: dict[str, Any] = {"weights": np.zeros(300_000), "step": 0}
    if found is not None:
        state = found.load_state()
    while state["step"] < 3:
        state = {"weights": state["weights"] + 1, "step": state["step"] + 1}
        train.report({"step": state["step"]}, checkpoint=Checkpoint.from_state(state))
    return float(state["weights"].sum())


def test_a_node_that_sees_the_path_writes_itself_and_another_streams_in_one_run(sandbox: Sandbox) -> None:
    port = free_port()
    trainer = _trainer(sandbox, port, _from_state, workers=2)
    with (
        agent_without(sandbox.storage, port, "a"),
        agent_without(sandbox.storage, port, "b", hide=False),
        ThreadPoolExecutor() as threads,
    ):
        result = threads.submit(trainer.fit).result(timeout=180)
    assert result.return_value == 900_000.0
    assert sandbox.check_stored()[-1] == "checkpoint_000002"


def _fail_when_told(config: dict[str, Any]) -> float:
    """Rank 0 reports two states; then rank 1 dies, and all ranks start from the second one."""
    import numpy as np

    rank, found = train.get_context().get_world_rank(), train.get_checkpoint()
    if found is not None:
        weights = found.load_state()["weights"]
        Path(config["directory"], f"rank_{rank}").write_text(str(weights.sum()))
        return float(weights.sum())
    for step in (1, 2):
        state = Checkpoint.from_state({"weights": np.full(300_000, float(step))})
        if rank == 0:
            train.report({"step": step}, checkpoint=state, checkpoint_upload_mode=train.CheckpointUploadMode.SYNC)
        else:
            train.report({"step": step})
    agent = Path(os.environ["HOLDFAST_LOCAL_CACHE_DIR"]).name
    Path(config["directory"], f"reached_{rank}_on_{agent}").touch()
    processes.wait_until(Path(config["directory"], "go").exists, "the test lets it die")
    if rank == 1:
        os.kill(os.getpid(), 9)
    signal.pause()
    raise AssertionError


@pytest.mark.parametrize("lost", ["worker", "node"])
def test_a_state_comes_from_the_memory_of_the_node_that_made_it_and_not_from_the_driver(
    lost: str, sandbox: Sandbox
) -> None:
    """The driver's copy is replaced by other bytes: whoever read it would not start from there."""
    port, run, shared = free_port(), sandbox.storage / "run", sandbox.root / "shared"
    shared.mkdir()
    config = {"directory": str(shared)}
    failures = FailureConfig(max_failures=1)
    trainer = _trainer(sandbox, port, _fail_when_told, workers=2, config=config, failure_config=failures)
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        agents = {
            name: stack.enter_context(agent_without(sandbox.storage, port, name, cache=sandbox.root / name))
            for name in "ab"
        }
        result = threads.submit(trainer.fit)
        processes.wait_until(lambda: len(list(shared.glob("reached_*"))) == 2, "two states are committed", 90)
        files = {path: path.read_bytes() for path in (run / "checkpoint_000001").glob("state*")}
        assert files
        for path, data in files.items():
            path.write_bytes(bytes(len(data)))
        if lost == "node":
            stack.enter_context(agent_without(sandbox.storage, port, "c", cache=sandbox.root / "c"))
            (second,) = (path.name[-1] for path in shared.glob("reached_1_*"))
            agents[second].kill()
        else:
            (shared / "go").touch()
        assert result.result(timeout=180).return_value == 600_000.0
        for path, data in files.items():
            path.write_bytes(data)
    assert (shared / "rank_1").read_text() == "600000.0"
    assert sandbox.check_stored() == ["checkpoint_000000", "checkpoint_000001"]


def _hold(config: dict[str, Any]) -> int:
    step = 0
    found = train.get_checkpoint()
    if found is not None:
        with found.as_directory() as directory:
            step = int(Path(directory, "step").read_text())
    while step < 6:
        step += 1
        target = Path(f"state_{step}_{os.getpid()}").absolute()
        target.mkdir()
        Path(target, "step").write_text(str(step))
        Path(target, "large").write_bytes(os.urandom(2_000_000))
        train.report(
            {"step": step},
            checkpoint=Checkpoint.from_directory(target),
            checkpoint_upload_mode=train.CheckpointUploadMode.SYNC,
        )
        if step == 3:
            Path(config["reached"]).touch()
            processes.wait_until(Path(config["go"]).exists, "the test lets it go on")
    return step


def test_a_storage_server_that_is_killed_is_started_again(sandbox: Sandbox, tmp_path: Path) -> None:
    port = free_port()
    trainer = _trainer(sandbox, port, _hold)
    trainer.train_loop_config = {"reached": str(tmp_path / "reached"), "go": str(tmp_path / "go-on")}
    with agent_without(sandbox.storage, port, "a"), ThreadPoolExecutor() as threads:
        result = threads.submit(trainer.fit)
        processes.wait_until((tmp_path / "reached").exists, "three steps are done")
        running = processes.with_environment(sandbox.marker)
        servers = [pid for pid in running if processes.name_of(pid) == "hf-storage"]
        assert len(servers) == 1
        os.kill(servers[0], 9)
        (tmp_path / "go-on").touch()
        assert result.result(timeout=180).return_value == 6
    assert sandbox.check_stored()[-1] == "checkpoint_000005"
