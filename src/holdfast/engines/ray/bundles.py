"""Which bundles have to be reserved for which gangs, and whether any node could hold one. Pure.

One bundle is one worker's resources. A gang gets a placement group of its own, since strategies such as STRICT_PACK are
about the workers of one run. A group outlives its gang, and serves the next one of its kind: trials come and go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from holdfast.core.admission import Gang

__all__ = [
    "GroupKind",
    "Shape",
    "fits",
    "group_kinds",
    "infeasible_text",
    "missing_groups",
    "resources_text",
    "spare_kinds",
]

Shape = tuple[tuple[str, float], ...]
"""The resources of one bundle, by name."""


class GroupKind(NamedTuple):
    """What is reserved at once."""

    shape: Shape
    workers: int
    """One bundle each."""


def group_kinds(gangs: Iterable[Gang]) -> Counter[GroupKind]:
    """What these gangs would take: a group of those that each cannot do without, and one for each further worker of an
    elastic gang, which come one by one. Workers that take nothing (validation) go wherever an agent is."""
    found: Counter[GroupKind] = Counter()
    for gang in gangs:
        if gang.resources:
            shape = tuple(sorted(gang.resources.items()))
            found[GroupKind(shape, gang.needed)] += 1
            found[GroupKind(shape, 1)] += gang.workers - gang.needed
    return +found


def spare_kinds(gangs: Iterable[Gang], held: Mapping[Shape, int]) -> Counter[GroupKind]:
    """What the spare agents of these gangs would take: each so much as the workers on one node, of which there are
    `held` at most; nothing while there are none."""
    found: Counter[GroupKind] = Counter()
    for gang in gangs:
        shape = tuple(sorted(gang.resources.items()))
        if gang.spares and held.get(shape):
            found[GroupKind(shape, min(held[shape], gang.workers))] += gang.spares
    return found


def missing_groups(wanted: Counter[GroupKind], reserved: Sequence[GroupKind]) -> list[GroupKind]:
    """What has to be reserved besides; smaller parts of a gang that replace what it lost are counted together."""
    spare = Counter(reserved)
    missing = wanted - spare
    loose: Counter[Shape] = Counter()
    for kind, count in (spare - wanted).items():
        loose[kind.shape] += kind.workers * count
    found: list[GroupKind] = []
    for kind in missing.elements():
        count = kind.workers - min(kind.workers, loose[kind.shape])
        loose[kind.shape] -= kind.workers - count
        if count:
            found.append(GroupKind(kind.shape, count))
    return found


def fits(shape: Mapping[str, float], node: Mapping[str, float], count: int = 1) -> bool:
    """Whether an empty node with these resources holds so many bundles."""
    return all(node.get(name, 0) >= amount * count for name, amount in shape.items())


def resources_text(resources: Mapping[str, float]) -> str:
    """Resources for people: "4 CPU, 1 GPU"."""
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items()))


def infeasible_text(
    kind: GroupKind, strategy: str, nodes: Sequence[Mapping[str, float]], listed: Sequence[str] = ("CPU", "GPU")
) -> str | None:
    """Why no cluster of such nodes could hold the group, as a sentence for a person; None if one could. That there are
    too few such nodes now is no reason, since nodes may be added."""
    shape = dict(kind.shape)
    together = kind.workers if strategy == "STRICT_PACK" else 1
    if any(fits(shape, node, together) for node in nodes):
        return None
    asked = f"{resources_text(shape)} for each worker"
    if together > 1:
        asked = f"{resources_text({name: amount * together for name, amount in shape.items()})} on one node"
    if shape.get("GPU") and not any(node.get("GPU") for node in nodes):
        return f"The run asks for {asked}, but no node of the Ray cluster has a GPU: set use_gpu=False, or add one."
    names = [*listed, *(name for name in sorted(shape) if name not in listed)]
    largest = max(nodes, default={}, key=lambda node: [node.get(name, 0) for name in names])
    has = resources_text({name: largest.get(name, 0) for name in names})
    return (
        f"The run asks for {asked}, but the largest node of the Ray cluster has {has}: lower "
        "ScalingConfig(resources_per_worker), or add a larger node."
    )
