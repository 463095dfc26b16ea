"""What a trainer hands to its workers: data sets, metadata, a context around the function, variables of `init`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.faults.programs.sandbox import Sandbox

import holdfast
from holdfast import train
from holdfast.train import BackendConfig, DataConfig, RunConfig, ScalingConfig


class WithVariable(BackendConfig):
    @property
    def train_func_context(self) -> Any:
        @contextmanager
        def context() -> Iterator[None]:
            os.environ["IN_CONTEXT"] = "yes"
            yield

        return context


def train_loop() -> None:
    context = train.get_context()
    shard, whole = train.get_dataset_shard("train"), train.get_dataset_shard("val")
    assert shard is not None and whole is not None
    mine = [row for batch in shard.iter_batches(batch_size=2) for row in batch.tolist()]
    assert train.get_preemption_info() is None
    found = [mine, len(whole), context.get_metadata(), os.environ["IN_CONTEXT"], os.environ["FROM_INIT"]]
    every = train.collective.broadcast_from_rank_zero(found)
    if context.get_world_rank() == 1:
        train.collective.barrier()
        assert (mine, every[0]) == ([1, 3, 5], [0, 2, 4])
        return
    train.collective.barrier()
    train.report({"rows": len(mine), "whole": found[1], "metadata": found[2], "variables": found[3:]})


@pytest.mark.parametrize("workers", [0, 2])
def test_inputs_reach_the_workers(sandbox: Sandbox, workers: int) -> None:
    holdfast.init(runtime_env={"env_vars": {"FROM_INIT": "too"}})
    try:
        result = train.DataParallelTrainer(
            train_loop,
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig("run", sandbox.storage),
            backend_config=WithVariable(),
            datasets={"train": range(7), "val": lambda: [1, 2, 3]},
            dataset_config=DataConfig(["train"]),
            metadata={"author": "me"},
        ).fit()
    finally:
        holdfast.shutdown()
    rows = 3 if workers else 7
    assert result.metrics == {"rows": rows, "whole": 3, "metadata": {"author": "me"}, "variables": ["yes", "too"]}
    assert "IN_CONTEXT" not in os.environ
