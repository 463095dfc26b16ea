"""Ray's older names of `train.torch`, and `unwrap_model`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.errors import ConfigError
from holdfast.train import checks
from holdfast.train.torch import TorchCheckpoint, accelerate, backward, prepare_optimizer, unwrap_model


def test_a_state_dict_comes_back_without_the_prefix_of_ddp() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
    checkpoint = TorchCheckpoint.from_state_dict(wrapped)
    assert isinstance(checkpoint, TorchCheckpoint)
    assert torch.equal(checkpoint.get_model(other).state_dict()["weight"], model.weight)
    directory = Path(checkpoint.path)
    del checkpoint
    assert not directory.exists()


def test_the_class_of_a_model_is_not_kept() -> None:
    model = nn.Linear(2, 1)
    checkpoint = TorchCheckpoint.from_model(model)
    assert torch.equal(checkpoint.get_model(nn.Linear(2, 1)).state_dict()["bias"], model.bias)
    with pytest.raises(ConfigError, match=r"get_model\(\) needs the model: no code is read from storage"):
        checkpoint.get_model()
    with pytest.raises(ConfigError, match="is a part of Ray Data and is not kept"):
        TorchCheckpoint.from_model(model, preprocessor=object())


def test_names_of_mixed_precision_work_and_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_told", set())
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    accelerate()
    with pytest.warns(UserWarning, match=r"accelerate\(amp=True\) has no effect: call the model within torch.autocast"):
        accelerate(amp=True)
    with pytest.warns(UserWarning, match="use the optimizer as it is"):
        assert prepare_optimizer(optimizer) is optimizer
    with pytest.warns(UserWarning, match=r"it is loss.backward\(\)"):
        backward((weight * 2).sum())
    assert weight.grad is not None and weight.grad.item() == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_model_is_unwrapped() -> None:
    model = nn.Linear(2, 1)
    assert unwrap_model(model) is model
    assert unwrap_model(torch.compile(model)) is model
