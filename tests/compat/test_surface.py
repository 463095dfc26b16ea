"""Public names, parameters, their order and defaults are Ray's, except for what `differences` lists, or the same of
Tune."""

from __future__ import annotations

import importlib
import itertools
import warnings
from typing import Any

import pytest
from tests.compat import differences, differences_tune
from tests.compat.differences import MISSING, OTHER_DEFAULTS, OURS
from tests.compat.surface import compare

pytestmark = pytest.mark.ray

MODULES: dict[str, tuple[str, ...]] = {
    "train": (),
    "train.torch": (),
    "train.collective": (),
    "train.context": ("get_context",),
    "train.backend": ("Backend", "BackendConfig"),
}
"""What is compared; where Ray has no `__all__`, these names."""


@pytest.mark.parametrize(
    ("modules", "listed"), [(MODULES, differences), (differences_tune.MODULES, differences_tune)], ids=["train", "tune"]
)
def test_every_difference_is_listed_with_its_reason(modules: dict[str, tuple[str, ...]], listed: Any) -> None:
    missing, ours, default, order = [], [], [], []
    for name, only in modules.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own
            theirs = importlib.import_module(f"ray.{name}")
            found = compare(theirs, importlib.import_module(f"holdfast.{name}"), name, only)
        missing += found.missing
        ours += found.ours
        default += found.default
        order += found.order
    assert sorted(set(missing)) == sorted(listed.MISSING)
    assert sorted(ours) == sorted(listed.OURS)
    assert sorted(default) == sorted(listed.OTHER_DEFAULTS)
    assert order == []


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_workers": 3, "resources_per_worker": {"CPU": 2, "GPU": 0, "custom": 0.5}},
        {"num_workers": 2, "use_gpu": True},
        {"num_workers": 2, "use_gpu": True, "resources_per_worker": {"CPU": 4}},
        {"num_workers": 2, "use_gpu": True, "accelerator_type": "L4", "placement_strategy": "SPREAD"},
    ],
)
@pytest.mark.filterwarnings("ignore:.* has no effect")
def test_resources_are_counted_alike(settings: dict[str, Any]) -> None:
    import ray.train

    import holdfast.train

    theirs, mine = ray.train.ScalingConfig(**settings), holdfast.train.ScalingConfig(**settings)
    names = ("total_resources", "num_cpus_per_worker", "num_gpus_per_worker", "num_tpus_per_worker")
    for name in (*names, "additional_resources_per_worker", "min_workers", "max_workers", "elasticity_enabled"):
        assert getattr(mine, name) == getattr(theirs, name), name
    there, here = theirs.as_placement_group_factory(), mine.as_placement_group_factory()
    assert here.bundles == there.bundles
    assert (here.strategy, here.required_resources) == (there.strategy, there.required_resources)


def test_the_list_names_nothing_twice() -> None:
    for one, other in itertools.combinations((MISSING, OURS, OTHER_DEFAULTS), 2):
        assert not set(one) & set(other)
