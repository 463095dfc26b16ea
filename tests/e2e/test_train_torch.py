"""A real model on two workers, which are in a process group of torch: with workers killed, the final weights are bit
for bit the same."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs.exact import ends
from tests.faults.programs.sandbox import Sandbox

from holdfast import train
from holdfast.train import Checkpoint, Result, RunConfig, ScalingConfig
from holdfast.train.torch import TorchTrainer

_EPOCHS = 4


def _train(config: dict[str, Any]) -> list[float]:
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    ones = torch.ones(2) * (dist.get_rank() + 1)
    dist.all_reduce(ones)
    group = [dist.get_backend(), dist.get_world_size(), ones.tolist(), str(train.torch.get_device())]
    assert group == ["gloo", 2, [3.0, 3.0], "cpu"], group
    torch.manual_seed(7)
    inner = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = train.torch.prepare_model(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    inputs = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    loader = train.torch.prepare_data_loader(
        DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    )
    start = 0
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            saved = torch.load(Path(directory, "state.pt"), weights_only=True)
        inner.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"]
    rank = train.get_context().get_world_rank()
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
    for epoch in range(start, _EPOCHS):
        loader.sampler.set_epoch(epoch)
        for number, (batch, wanted) in enumerate(loader):
            if number == 2 and config["deaths"].get(f"{generation}:{epoch}") == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = torch.nn.functional.mse_loss(model(batch), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as directory:
            own = None
            if rank == 0:
                state = {"model": inner.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
                torch.save(state, Path(directory, "state.pt"))
                own = Checkpoint.from_directory(directory)
            train.report({"loss": loss.item(), "epoch": epoch}, checkpoint=own)
    return [float(value) for parameter in inner.parameters() for value in parameter.detach().flatten()]


def _fit(sandbox: Sandbox, name: str, deaths: dict[str, int]) -> Result:
    return TorchTrainer(
        _train,
        train_loop_config={"deaths": deaths},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=name, storage_path=sandbox.storage, failure_config=train.FailureConfig(max_failures=3)
        ),
    ).fit()


def test_killed_workers_do_not_change_the_weights(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HOLDFAST_QUIET", raising=False)
    quiet = _fit(sandbox, "quiet", {})
    shown = capfd.readouterr()
    assert "The process group is set up: gloo, world size 2" in shown.out + shown.err
    assert "The model is moved to cpu" in shown.out + shown.err
    killed = _fit(sandbox, "run", {"1:0": 1, "2:2": 0})
    assert killed.return_value == quiet.return_value
    assert len(quiet.return_value) == 6 * 8 + 8 + 8 + 1
    first, second = quiet.metrics_dataframe, killed.metrics_dataframe
    assert first is not None and second is not None
    assert list(first["loss"]) == list(second["loss"])
    assert len(first) == _EPOCHS
    blamed = [{failure.rank for failure in end.failures if "SIGKILL" in failure.cause} for end in ends(sandbox)]
    assert blamed == [{1}, {0}]
