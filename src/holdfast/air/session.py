"""`air.session`: what functions of trials and trainers call, in the names of Ray AIR."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.checkpoint.handle import Checkpoint
from holdfast.train.config import PlacementGroupFactory
from holdfast.train.functions import get_checkpoint, get_dataset_shard
from holdfast.tune.functions import get_context
from holdfast.worker.session import current

__all__ = [
    "get_checkpoint",
    "get_dataset_shard",
    "get_experiment_name",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_trial_dir",
    "get_trial_id",
    "get_trial_name",
    "get_trial_resources",
    "get_world_rank",
    "get_world_size",
    "report",
]


def report(
    metrics: Mapping[str, Any], *, checkpoint: Checkpoint | None = None, checkpoint_dir_name: str | None = None
) -> None:
    """As `tune.report` in a trial, as `train.report` in a trainer's function."""
    current("session.report()").report(metrics, checkpoint, checkpoint_dir_name)


def get_experiment_name() -> str:
    return get_context().get_experiment_name()


def get_trial_name() -> str:
    return get_context().get_trial_name()


def get_trial_id() -> str:
    return get_context().get_trial_id()


def get_trial_dir() -> str:
    return get_context().get_trial_dir()


def get_trial_resources() -> PlacementGroupFactory:
    return get_context().get_trial_resources()


def get_world_size() -> int:
    return get_context().get_world_size()


def get_world_rank() -> int:
    return get_context().get_world_rank()


def get_local_rank() -> int:
    return get_context().get_local_rank()


def get_local_world_size() -> int:
    return get_context().get_local_world_size()


def get_node_rank() -> int:
    return get_context().get_node_rank()
