"""What workers take of their machine: runs wait for each other, GPUs are each one worker's, and too much is refused.

No device is needed: GPUs are known by CUDA_VISIBLE_DEVICES, and nothing here uses one.
"""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs.sandbox import Sandbox

from holdfast import train
from holdfast.control.history import read_records
from holdfast.core import records as r
from holdfast.errors import ConfigError
from holdfast.linux.resources import cpu_count
from holdfast.storage.locate import open_store
from holdfast.train import DataParallelTrainer, RunConfig, ScalingConfig


def _trainer(sandbox: Sandbox, name: str, **scaling: Any) -> DataParallelTrainer:
    return DataParallelTrainer(
        _write_devices,
        train_loop_config={"root": str(sandbox.root)},
        scaling_config=ScalingConfig(**scaling),
        run_config=RunConfig(name=name, storage_path=sandbox.storage, verbose=0),
    )


def _write_devices(config: dict[str, str]) -> None:
    context = train.get_context()
    name = f"{context.get_experiment_name()}.{context.get_world_rank()}.{os.environ['LOCAL_RANK']}"
    Path(config["root"], name).write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "none"))


def test_runs_that_need_all_cpus_run_one_after_the_other(sandbox: Sandbox) -> None:
    trainers = [_trainer(sandbox, name, resources_per_worker={"CPU": cpu_count()}) for name in ("a", "b", "c")]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda trainer: trainer.fit(), trainers))
    spans = []
    for name in ("a", "b", "c"):
        records = list(read_records(open_store(str(sandbox.storage)).sub(name)))
        (start,) = [one.at for one in records if isinstance(one, r.GenerationStarted)]
        (end,) = [one.at for one in records if isinstance(one, r.RunFinished)]
        spans.append((start, end))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_each_worker_sees_its_own_gpus(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7,9")
    trainers = [
        _trainer(sandbox, "a", num_workers=2, use_gpu=True),
        _trainer(sandbox, "b", num_workers=1, use_gpu=True, resources_per_worker={"GPU": 2}),
        _trainer(sandbox, "c", num_workers=2, use_gpu=True, resources_per_worker={"GPU": 0.5}),
    ]
    for trainer in trainers:
        trainer.fit()
    found = {path.name: path.read_text() for path in sandbox.root.glob("?.?.?")}
    assert found == {"a.0.0": "3", "a.1.1": "5", "b.0.0": "3,5", "c.0.0": "3", "c.1.1": "3"}


@pytest.mark.parametrize(
    ("scaling", "told"),
    [
        ({"resources_per_worker": {"CPU": 10_000}}, "asks for 10000 CPU for each worker, but this machine has"),
        ({"resources_per_worker": {"memory": 2**60}}, r"asks for 1024\.0 PiB memory .* has .* GiB memory: ask"),
        ({"resources_per_worker": {"licence": 1}}, "asks for 1 licence for each worker"),
        ({"num_workers": 10_000, "resources_per_worker": {"CPU": 1}}, r"num_workers=10000, .* ask for less"),
    ],
)
def test_what_the_machine_can_never_give_is_refused(sandbox: Sandbox, scaling: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        _trainer(sandbox, "run", **scaling).fit()
    assert not sandbox.storage.exists()
