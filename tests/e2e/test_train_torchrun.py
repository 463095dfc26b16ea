"""A script with local mode under torchrun: each process is a rank of one run, and rank 0 alone writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from typing import Any

import pytest
from tests.faults.programs import processes
from tests.faults.programs.sandbox import Sandbox

from holdfast.train import Result

_HEAD = """
    import json, os, sys, tempfile
    from pathlib import Path
    from holdfast import train
    from holdfast.train.torch import TorchTrainer, prepare_data_loader, prepare_model

    def tell(what, **values):
        path = Path({told!r}) / f"{{what}}_{{os.environ['RANK']}}.json"
        path.write_text(json.dumps(values))

    def run_config(**others):
        return train.RunConfig(name="run", storage_path={storage!r}, **others)

    LOCAL = train.ScalingConfig(num_workers=0)
"""

_DDP = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    def train_loop(config):
        here = train.get_context()
        rank = here.get_world_rank()
        model = prepare_model(torch.nn.Linear(1, 1, bias=False))
        with torch.no_grad():
            model.module.weight.fill_(1.0)
        first = 0
        checkpoint = train.get_checkpoint()
        if checkpoint:
            with checkpoint.as_directory() as directory:
                saved = torch.load(os.path.join(directory, "model.pt"))
            model.module.load_state_dict(saved["model"])
            first = saved["step"] + 1
        tell(
            "start", checkpoint=checkpoint and checkpoint.path, first=first, weight=model.module.weight.item(),
            rank=rank, local_rank=here.get_local_rank(), world_size=here.get_world_size(),
            local_world_size=here.get_local_world_size(), node_rank=here.get_node_rank(),
            name=here.get_experiment_name(),
            group=[torch.distributed.get_rank(), torch.distributed.get_world_size()],
            master=[os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]],
        )
        dataset = TensorDataset(torch.tensor([[1.0], [3.0]]))
        seen = [x.item() for (x,) in prepare_data_loader(DataLoader(dataset, batch_size=1))]
        for step in range(first, config["steps"]):
            model.zero_grad()
            model(torch.tensor([seen])).sum().backward()
            gradient = model.module.weight.grad.item()
            due = train.should_checkpoint()
            with tempfile.TemporaryDirectory() as directory:
                torch.save({{"model": model.module.state_dict(), "step": step}}, os.path.join(directory, "model.pt"))
                train.report(
                    {{"step": step, "rank": rank}},
                    checkpoint=train.Checkpoint.from_directory(directory) if rank == 0 or step % 2 else None,
                    checkpoint_upload_mode=train.CheckpointUploadMode.SYNC,
                )
            if step == config["stop_at"]:
                train.collective.barrier()
                (Path({told!r}) / f"gate_{{rank}}").open().read()
        word = train.collective.broadcast_from_rank_zero(f"from {{rank}}")
        tell("end", seen=seen, gradient=gradient, word=word, due=due)
        return rank

    result = TorchTrainer(
        train_loop,
        train_loop_config={{"steps": 4, "stop_at": int(sys.argv[1])}},
        scaling_config=LOCAL,
        run_config=run_config(),
    ).fit()
    tell("result", metrics=result.metrics, returned=result.return_value, checkpoint=result.checkpoint.path)
"""


class _Script:
    """A script run by torchrun, and the directory to which its ranks write what they observed."""

    def __init__(self, sandbox: Sandbox, body: str) -> None:
        self.told = sandbox.root / "told"
        self.told.mkdir()
        self._path = sandbox.root / "script.py"
        head = textwrap.dedent(_HEAD) + textwrap.dedent(body)
        self._path.write_text(head.format(told=str(self.told), storage=str(sandbox.storage)))

    def command(self, *arguments: str, count: int = 2, options: tuple[str, ...] = ()) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        return [*torchrun, *options, str(self._path), *arguments]

    def run(self, *arguments: str, count: int = 2, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        command = self.command(*arguments, count=count, options=options)
        return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=200, check=False)

    def run_alone(self, attempt: int) -> subprocess.CompletedProcess[str]:
        """With the variables that torchrun gives the only process of its group, without torchrun."""
        variables = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
        variables |= {"GROUP_WORLD_SIZE": 1, "TORCHELASTIC_RESTART_COUNT": attempt, "TORCHELASTIC_MAX_RESTARTS": 1}
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        command = [sys.executable, str(self._path)]
        return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)

    def of(self, what: str, rank: int) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.told / f"{what}_{rank}.json").read_text())
        return values


def test_ddp_over_the_processes_of_torchrun_resumes_on_every_rank_from_one_checkpoint(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at step 1 with torchrun itself, and run again: both ranks load the checkpoint of step 1. The first time
    torchrun serves the store over which they meet, the second time rank 0 does."""
    script = _Script(sandbox, _DDP)
    for rank in range(2):
        os.mkfifo(script.told / f"gate_{rank}")
    with subprocess.Popen(script.command("1"), cwd="/") as torchrun:
        gates = [(script.told / f"gate_{rank}").open("w") for rank in range(2)]  # opens when the rank has come to it
        for rank in range(2):
            start = script.of("start", rank)
            assert (start["rank"], start["local_rank"], start["world_size"]) == (rank, rank, 2)
            assert (start["local_world_size"], start["node_rank"], start["name"]) == (2, 0, "run")
            assert start["group"] == [rank, 2]
            assert (start["checkpoint"], start["first"], start["weight"]) == (None, 0, 1.0)
        assert script.of("start", 0)["master"] == script.of("start", 1)["master"]
        assert torchrun.poll() is None
        for pid in processes.with_environment(sandbox.marker):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for gate in gates:
        gate.close()
    committed = sandbox.check_stored()
    assert len(committed) == 2

    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    done = script.run("-1")
    assert done.returncode == 0, done.stderr
    newest = str(sandbox.storage / "run" / committed[-1])
    for rank in range(2):
        start, end = script.of("start", rank), script.of("end", rank)
        assert (start["checkpoint"], start["first"]) == (newest, 2)
        assert end["gradient"] == 2.0, "the mean of both ranks' gradients, 1 and 3"
        assert end["word"] == "from 0"
        result = script.of("result", rank)
        assert result["metrics"] == {"step": 3, "rank": rank}
        assert result["returned"] == 0
        assert result["checkpoint"].endswith(sandbox.check_stored()[-1])
    assert sorted(script.of("end", 0)["seen"] + script.of("end", 1)["seen"]) == [1.0, 3.0]
    assert script.of("end", 0)["due"] == script.of("end", 1)["due"]
    assert len(sandbox.check_stored()) == 4, "each step is committed once"
    frame = Result.from_path(sandbox.storage / "run").metrics_dataframe
    assert frame is not None
    assert (list(frame["step"]), set(frame["rank"])) == ([0, 1, 2, 3], {0})


_SEVERAL = """
    def train_loop(config):
        train.report({{"a": config["a"] + train.get_context().get_world_rank()}})

    def fit(a, **others):
        return train.DataParallelTrainer(
            train_loop, train_loop_config={{"a": a}}, scaling_config=LOCAL,
            run_config=train.RunConfig(name=f"run{{a}}", storage_path={storage!r}, **others),
        ).fit().metrics

    try:
        fit(0, resume="must")
    except Exception as error:
        tell("failure", kind=type(error).__name__, error=str(error))
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    tell(f"metrics_{{attempt}}", metrics=[fit(10), fit(20)])
    if attempt == "0":
        sys.exit(1)
"""

_FAILS = """
    def give_parts():
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, f"part_{{os.environ['RANK']}}").write_text("x")
            train.report({{}}, checkpoint=train.Checkpoint.from_directory(directory))

    trainer = train.DataParallelTrainer(
        give_parts, scaling_config=LOCAL, run_config=train.RunConfig(storage_path={storage!r})
    )
    try:
        trainer.fit()
    except Exception as error:
        tell("parts", kind=type(error).__name__, error=str(error))
"""


def _check_several(script: _Script, count: int) -> None:
    """A run that rank 0 refuses is refused on all ranks, the others are run, and once complete they are returned."""
    for rank in range(count):
        assert script.of("metrics_0", rank)["metrics"] == [{"a": 10 + rank}, {"a": 20 + rank}]
        assert script.of("metrics_1", rank)["metrics"] == [{"a": 10}, {"a": 20}], "the runs' own, which are rank 0's"
        assert script.of("failure", rank)["kind"] == ("ConfigError" if rank == 0 else "RunError")
        assert 'RunConfig(resume="must")' in script.of("failure", rank)["error"]


def test_several_runs_in_one_script_that_torchrun_restarts(sandbox: Sandbox) -> None:
    """In the last one rank 1 gives a checkpoint. That is refused, and the run is not finished without that rank, also
    where the script catches the error, so that torchrun sees no failure. Both processes make up a name for that run;
    rank 0's counts."""
    script = _Script(sandbox, _SEVERAL + _FAILS)
    done = script.run(count=2, options=("--max-restarts=1",))
    assert done.returncode == 0, done.stderr
    _check_several(script, 2)
    other = script.of("parts", 1)
    assert other["kind"] == "ConfigError"
    assert (
        "on rank 1: with num_workers=0 under torchrun only rank 0 can give a checkpoint with 'part_1'" in other["error"]
    )
    assert "num_workers=2" in other["error"]
    assert script.of("parts", 0)["kind"] == "WorkerGroupError"
    assert "Rank 1 has ended before rank 0 was done" in script.of("parts", 0)["error"]
    (run,) = [run for run in sandbox.storage.iterdir() if run.name not in ("run10", "run20")]
    (checkpoint,) = sandbox.check_stored(run.name)
    assert (run / checkpoint / "part_0").exists()
    assert not (run / checkpoint / "part_1").exists()


def test_a_single_process_of_torchrun_is_plain_local_mode(sandbox: Sandbox) -> None:
    script = _Script(sandbox, _SEVERAL)
    for attempt in (0, 1):
        done = script.run_alone(attempt)
        assert done.returncode == 1 - attempt, done.stderr
    _check_several(script, 1)
    assert sorted(run.name for run in sandbox.storage.iterdir()) == ["run10", "run20"]
