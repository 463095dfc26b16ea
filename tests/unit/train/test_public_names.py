"""The names that scripts import, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "pyarrow", "pandas", "obstore", "asyncio", "cloudpickle")


def modules_after(statement: str) -> set[str]:
    program = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement", ["import holdfast.train", "from holdfast import train", "import holdfast.train.torch"]
)
def test_importing_the_api_imports_no_heavy_library(statement: str) -> None:
    assert not modules_after(statement).intersection(HEAVY)


def test_a_trainer_is_made_without_torch() -> None:
    made = "from holdfast.train.torch import TorchTrainer; TorchTrainer(lambda: None)"
    assert "torch" not in modules_after(made)


def test_both_import_paths_give_the_same_objects() -> None:
    program = (
        "from holdfast import train; from holdfast.train import RunConfig; import holdfast.train.torch;"
        "assert train.RunConfig is RunConfig and train.torch.TorchTrainer is holdfast.train.torch.TorchTrainer;"
        "assert train.collective.barrier and 'report' in dir(train);"
        "from holdfast.train.v2.api.data_parallel_trainer import DataParallelTrainer as first;"
        "from holdfast.train.data_parallel_trainer import DataParallelTrainer as second;"
        "assert first is second is train.DataParallelTrainer"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_name_resolves_and_unknown_ones_do_not() -> None:
    from holdfast import train
    from holdfast.train import torch as train_torch

    for module in (train, train_torch):
        for name in module.__all__:
            assert getattr(module, name) is not None
        with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
            module.nonsense  # noqa: B018
