"""Every field of every configuration is read, refused, or warned about by name."""

from __future__ import annotations

import ast
import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.control.request import TrainRequest
from holdfast.errors import ConfigError
from holdfast.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, SyncConfig, checks
from holdfast.train.torch import TorchConfig

_SOURCE = Path(holdfast.__file__).parent
_OTHER: dict[tuple[type, str], Any] = {
    (ScalingConfig, "accelerator_type"): "L4",
    (ScalingConfig, "trainer_resources"): {"CPU": 1},
    (ScalingConfig, "use_tpu"): True,
    (ScalingConfig, "topology"): "2x2",
    (ScalingConfig, "label_selector"): {"a": "b"},
    (ScalingConfig, "engine"): "slurm",
    (ScalingConfig, "elastic_resize_monitor_interval_s"): 5,
    (FailureConfig, "fail_fast"): True,
    (FailureConfig, "relax_collectives_on_preemption"): True,
    (FailureConfig, "preemption_grace_s"): 5,
    (FailureConfig, "controller_failure_limit"): 3,
    (CheckpointConfig, "checkpoint_frequency"): 1,
    (CheckpointConfig, "checkpoint_at_end"): True,
    (SyncConfig, "syncer"): "mine",
    (RunConfig, "stop"): {"a": 1},
    (RunConfig, "progress_reporter"): object(),
    (TorchConfig, "init_method"): "tcp",
}
"""A value for each field that must be refused or warned of; every other one must be read."""


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_told", set())


def _reads(*files: Path) -> set[str]:
    """The names of all attributes that these files read."""
    trees = (ast.parse(file.read_text()) for file in files)
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def _fields() -> Iterator[Any]:
    for config in (ScalingConfig, FailureConfig, CheckpointConfig, SyncConfig, RunConfig, TorchConfig):
        for field in dataclasses.fields(config):
            yield pytest.param(config, field.name, id=f"{config.__name__}.{field.name}")


@pytest.mark.parametrize(("config", "field"), list(_fields()))
def test_each_config_field_is_read_refused_or_warned_about(config: Any, field: str) -> None:
    if (config, field) not in _OTHER:
        train = _SOURCE / "train"
        names = ("request.py", "paths.py", "trainer.py", "torch/trainer.py")
        assert field in _reads(*(train / name for name in names), train / "config.py")
        return
    value = _OTHER[config, field]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            config(**{field: value})
            config(**{field: value})
        except ConfigError as error:
            assert field in str(error)
            return
    assert [str(one.message) for one in told] and len(told) == 1, "once, however often it is set"
    assert f"{config.__name__}({field}) has no effect" in str(told[0].message)
    assert told[0].filename == __file__, "at the user's own line"


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(TrainRequest)])
def test_what_the_trainer_asks_for_is_read_by_the_controller(field: str) -> None:
    assert field in _reads(*(_SOURCE / "control").rglob("*.py"))


def test_defaults_warn_of_nothing() -> None:
    for config in (ScalingConfig, FailureConfig, CheckpointConfig, SyncConfig, RunConfig, TorchConfig):
        config()
    RunConfig(log_to_file=True, verbose=0)
    SyncConfig(syncer=None)
