"""A package that is missing: one sentence with the command that installs it, before a run starts."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from holdfast.errors import MissingExtra
from holdfast.train import Result
from holdfast.train.torch import TorchTrainer


def test_a_torch_trainer_without_torch_is_refused_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"TorchTrainer needs torch; run: pip install 'holdfast\[torch\]'"):
        TorchTrainer(print)


def test_a_data_frame_without_pandas_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setattr("holdfast.control.view.read_reports", lambda store: ["a report"])
    result = SimpleNamespace(_place=SimpleNamespace(_open=object), _reports=None)
    with pytest.raises(MissingExtra, match="pip install pandas"):
        vars(Result)["metrics_dataframe"].func(result)
