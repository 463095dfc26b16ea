"""Which placement groups the Ray engine asks for, and which it refuses. Needs no Ray."""

from __future__ import annotations

from collections import Counter

import pytest

from holdfast.core.admission import Gang
from holdfast.engines.ray.bundles import GroupKind, group_kinds, infeasible_text, missing_groups, spare_kinds
from holdfast.engines.ray.options import RayOptions

_CPU = (("CPU", 1.0),)
_GPU = (("CPU", 1.0), ("GPU", 1.0))


def _gang(run: str, workers: int = 1, **resources: float) -> Gang:
    return Gang(run=run, workers=workers, resources=resources)


def test_each_gang_needs_a_group_and_workers_without_resources_need_none() -> None:
    gangs = [_gang("a", 4, CPU=1.0), _gang("b", 4, CPU=1.0), _gang("c", 1, GPU=1.0, CPU=1.0), _gang("validation")]
    assert group_kinds(gangs) == {GroupKind(_CPU, 4): 2, GroupKind(_GPU, 1): 1}


def test_workers_that_an_elastic_gang_can_do_without_come_one_by_one() -> None:
    gang = Gang(run="a", workers=5, min_workers=2, resources={"CPU": 1.0})
    assert group_kinds([gang]) == {GroupKind(_CPU, 2): 1, GroupKind(_CPU, 1): 3}


def test_a_spare_takes_what_the_workers_on_a_node_do_once_there_are_any() -> None:
    gangs = [Gang(run="a", workers=4, spares=2, resources={"CPU": 1.0}), _gang("b", 4, CPU=1.0, GPU=1.0)]
    assert not spare_kinds(gangs, {})
    assert spare_kinds(gangs, {_CPU: 3, _GPU: 4}) == {GroupKind(_CPU, 3): 2}
    assert spare_kinds(gangs, {_CPU: 8}) == {GroupKind(_CPU, 4): 2}


@pytest.mark.parametrize(
    "reserved, missing",
    [
        ([], [GroupKind(_CPU, 2), GroupKind(_CPU, 2)]),
        ([GroupKind(_CPU, 2)], [GroupKind(_CPU, 2)]),
        ([GroupKind(_CPU, 2), GroupKind(_CPU, 2)], []),
        # A group that lost a bundle, and the replacement of that one.
        ([GroupKind(_CPU, 2), GroupKind(_CPU, 1)], [GroupKind(_CPU, 1)]),
        ([GroupKind(_CPU, 2), GroupKind(_CPU, 1), GroupKind(_CPU, 1)], []),
        ([GroupKind(_GPU, 2)], [GroupKind(_CPU, 2), GroupKind(_CPU, 2)]),
        ([GroupKind(_CPU, 8)], []),
    ],
)
def test_what_is_reserved_already_is_not_asked_for_again(reserved: list[GroupKind], missing: list[GroupKind]) -> None:
    assert missing_groups(Counter({GroupKind(_CPU, 2): 2}), reserved) == missing


@pytest.mark.parametrize(
    "kind, strategy, nodes, told",
    [
        (GroupKind(_CPU, 100), "PACK", [{"CPU": 1.0}], None),  # nodes may be added
        (GroupKind(_CPU, 2), "STRICT_PACK", [{"CPU": 2.0}], None),
        (GroupKind(_CPU, 4), "STRICT_PACK", [{"CPU": 2.0}] * 2, "asks for 4 CPU on one node, but the largest node"),
        (GroupKind(_GPU, 1), "PACK", [{"CPU": 8.0}], "no node of the Ray cluster has a GPU: set use_gpu=False"),
        (
            GroupKind((("CPU", 16.0),), 1),
            "SPREAD",
            [{"CPU": 2.0}, {"CPU": 8.0}],
            "asks for 16 CPU for each worker, but the largest node of the Ray cluster has 8 CPU, 0 GPU: lower",
        ),
        (GroupKind((("disk", 1.0),), 1), "PACK", [{"CPU": 8.0}], "has 8 CPU, 0 GPU, 0 disk"),
        (GroupKind(_CPU, 1), "PACK", [], "has 0 CPU, 0 GPU"),
    ],
)
def test_what_no_node_could_hold_is_refused_in_a_sentence(
    kind: GroupKind, strategy: str, nodes: list[dict[str, float]], told: str | None
) -> None:
    sentence = infeasible_text(kind, strategy, nodes)
    assert sentence is None if told is None else told in str(sentence)


def test_options_are_equal_where_they_ask_for_the_same() -> None:
    assert RayOptions(runtime_env={"a": 1, "b": 2}) == RayOptions(runtime_env={"b": 2, "a": 1})
    assert RayOptions(runtime_env={"a": 1}) != RayOptions(runtime_env={"a": 2})
    assert len({RayOptions(), RayOptions(runtime_env={}), RayOptions("SPREAD")}) == 2
