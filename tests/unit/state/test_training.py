"""Real optimizers: training resumed from a state is bit for bit the same as uninterrupted training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.state.trips import same

from holdfast.checkpoint.handle import Checkpoint

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Training:
    def __init__(self, optimizer: str) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(16, 1),
        )
        groups = [{"params": self.model[0].parameters()}, {"params": self.model[4].parameters(), "weight_decay": 0.01}]
        self.optimizer = OPTIMIZERS[optimizer](groups)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], gamma=0.5)
        self.step = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 6)).square().mean().backward()
            self.optimizer.step()
            self.schedule.step()
            self.step += 1

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "rng": torch.get_rng_state(),
            "step": self.step,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["rng"])
        self.step = state["step"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_resumes_bit_exactly(optimizer: str, tmp_path: Path) -> None:
    whole = Training(optimizer)
    whole.run(3)
    given = whole.state()
    directory = Checkpoint.from_state(given).to_directory(tmp_path / "checkpoint")
    at_three = Checkpoint.from_directory(directory).load_state()
    assert same({**given, "model": dict(given["model"])}, at_three)
    assert list(at_three["optimizer"]["state"]) == list(range(len(at_three["optimizer"]["state"])))
    whole.run(4)

    again = Training(optimizer)
    again.restore(at_three)
    again.run(4)
    assert same(whole.state(), again.state())


def test_the_model_is_filled_in_place(tmp_path: Path) -> None:
    trained = Training("adamw")
    trained.run(2)
    directory = Checkpoint.from_state(trained.state()).to_directory(tmp_path / "checkpoint")
    trained.run(1)
    fresh = Training("adamw")
    where = {name: tensor.data_ptr() for name, tensor in fresh.model.state_dict().items()}
    state = Checkpoint(directory).load_state(into={"model": fresh.model.state_dict()})
    assert {name: tensor.data_ptr() for name, tensor in fresh.model.state_dict().items()} == where
    fresh.restore(state)
    fresh.run(1)
    assert same(trained.state(), fresh.state())
