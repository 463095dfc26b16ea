"""Every call of Ray's, as plain functions that block: the engine calls them in a thread of its own.

The driver connects to a cluster that is there (`RAY_ADDRESS`, or one that was started on this machine), and starts one
on this machine otherwise, which ends with the driver.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from holdfast.engines.ray.agent_actor import AgentActor, assigned_gpus
from holdfast.engines.ray.bundles import GroupKind, Shape, infeasible_text
from holdfast.engines.ray.options import RayOptions
from holdfast.errors import ConfigError, MissingExtra

__all__ = [
    "AgentProcess",
    "Node",
    "PlacementGroup",
    "check_feasible",
    "connect",
    "create_group",
    "draining_nodes",
    "driver_address",
    "group_nodes",
    "import_ray",
    "kill_actor",
    "nodes",
    "reason_of",
    "remove_group",
    "start_agent",
]

_VERSIONS = (2, 49), (3, 0)
"""The first version of Ray that is supported, and the first that is not."""
_NODE_LABEL = "ray.io/node-id"
"""Every node has its id as a label."""
PlacementGroup = Any
"""Ray's."""


class Node(NamedTuple):
    """A node of the cluster that is alive."""

    id: str
    address: str
    port: int
    """The raylet's."""
    resources: Mapping[str, float]
    """All that it has, whether or not it is in use."""


class AgentProcess(NamedTuple):
    """An actor and the result of its `run`."""

    actor: Any
    ended: Future[str]


def connect() -> None:
    """Connect this process to a cluster, unless it is. Raises `ConfigError`, or `MissingExtra` without Ray."""
    ray = import_ray()
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "").strip()
    try:
        ray.init(address=address or "auto", logging_level=logging.WARNING)
    except ConnectionError as error:
        if address and address not in ("auto", "local"):
            raise ConfigError(
                f"No Ray cluster answers at RAY_ADDRESS={address}: check that its head runs, or unset RAY_ADDRESS to "
                "start a cluster on this machine."
            ) from error
        ray.init(address="local", logging_level=logging.WARNING, include_dashboard=False)


def import_ray() -> Any:
    """Ray, if it is installed in a version that is supported."""
    try:
        import ray
        import ray.util.client
    except ImportError as error:
        raise MissingExtra("ScalingConfig(engine=\"ray\") needs Ray; run: pip install 'holdfast[ray]'") from error
    found = tuple(map(int, re.findall(r"\d+", ray.__version__)[:2]))
    if not _VERSIONS[0] <= found < _VERSIONS[1]:
        first, last = (".".join(map(str, one)) for one in _VERSIONS)
        raise ConfigError(
            f"Ray {ray.__version__} is installed, but the Ray engine is for versions from {first} up to, but not "
            f"including, {last}: run pip install 'holdfast[ray]'."
        )
    return ray


def driver_address() -> str:
    """The address of this machine at which the cluster's nodes reach it."""
    import ray.util

    return str(ray.util.get_node_ip_address())


def nodes() -> list[Node]:
    """The nodes that are alive."""
    import ray

    return [
        Node(one["NodeID"], one["NodeManagerAddress"], one["NodeManagerPort"], one["Resources"])
        for one in ray.nodes()
        if one["Alive"]
    ]


def check_feasible(kind: GroupKind, options: RayOptions) -> None:
    """Refuse what no node has, nor any that an autoscaler could add."""
    there = [node.resources for node in nodes()]
    sentence = infeasible_text(kind, options.placement_strategy, [*there, *_nodes_to_come()])
    if sentence is not None:
        raise ConfigError(sentence)


def _nodes_to_come() -> list[dict[str, float]]:
    """What each kind of node has that the cluster's autoscaler may add, as far as the cluster says."""
    from ray._private.state import state

    config = state.get_cluster_config()
    groups = [] if config is None else config.node_group_configs
    return [{name: float(amount) for name, amount in one.resources.items()} for one in groups if one.max_count]


def draining_nodes() -> dict[str, float | None]:
    """Nodes that Ray takes away, each with the seconds that are left, if that is known."""
    from ray._private.state import state

    now = time.time()
    return {
        node: max(0.0, deadline_ms / 1000 - now) if deadline_ms else None
        for node, deadline_ms in state.get_draining_nodes().items()
    }


# ------------------------------------------------------------ placement groups


def create_group(kind: GroupKind, options: RayOptions, without: Collection[str] = ()) -> PlacementGroup:
    """Ask for bundles; Ray places them as soon as it can, though not on the nodes `without`, and its autoscaler adds
    nodes for them."""
    from ray.util import placement_group

    selectors = [dict(one) for one in options.label_selectors]
    if without:
        elsewhere = {_NODE_LABEL: f"!in({','.join(sorted(without))})"}
        selectors = [elsewhere | one for one in selectors or [{}]]
    if selectors:
        selectors = [selectors[n % len(selectors)] for n in range(kind.workers)]
    return placement_group(
        [dict(kind.shape) for _ in range(kind.workers)],
        strategy=options.placement_strategy,
        bundle_label_selector=selectors or None,
    )


def group_nodes(group: PlacementGroup) -> tuple[bool, dict[int, str]]:
    """Whether all bundles are placed, and the nodes of those that are."""
    from ray.util import placement_group_table

    table = placement_group_table(group)
    placed = {int(index): str(node) for index, node in table.get("bundles_to_node_id", {}).items()}
    is_placed = table.get("state") == "CREATED"
    there = () if is_placed else {node.id for node in nodes()}  # the others are nowhere
    return is_placed, {index: node for index, node in placed.items() if is_placed or node in there}


def remove_group(group: PlacementGroup) -> None:
    from ray.util import remove_placement_group

    remove_placement_group(group)


# ------------------------------------------------------------ agents


def start_agent(
    bundles: Sequence[tuple[PlacementGroup, int, Shape]],
    arguments: list[str],
    secret: str,
    runtime_env: Mapping[str, Any],
) -> AgentProcess:
    """Start an actor in the first of these bundles, all of which are on one node, with an agent that has them all."""
    import ray

    environment = {name: value for name, value in runtime_env.items() if name not in _OURS} or None
    gpus = [
        ray.remote(assigned_gpus).options(**_placed(*one), runtime_env=environment).remote()
        for one in bundles[1:]
        if dict(one[2]).get("GPU")
    ]
    actor = ray.remote(AgentActor).options(**_placed(*bundles[0]), runtime_env=environment, max_restarts=0).remote()
    ended = actor.run.remote(arguments, secret, *gpus)
    return AgentProcess(actor, ended.future())


_OURS = ("working_dir", "excludes")
"""A local working directory is packed and sent by the driver (`control.working_dir`), as to every agent."""


def _placed(group: PlacementGroup, index: int, shape: Shape) -> dict[str, Any]:
    """The options of what runs in this bundle. Its other resources are reserved with the bundle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    resources = dict(shape)
    return {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    }


def kill_actor(actor: Any) -> None:
    import ray

    ray.kill(actor)


def reason_of(error: BaseException) -> str:
    """Why an actor's `run` has failed, as a phrase for people."""
    from ray import exceptions

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, exceptions.RuntimeEnvSetupError):
        return f"its runtime_env could not be set up: {lines[-1] if lines else error}"
    if isinstance(error, exceptions.ActorUnavailableError):
        return "its Ray node does not answer"
    if isinstance(error, exceptions.ActorDiedError):
        return "its Ray node died" if "node has died" in str(error) else "its Ray actor died"
    return f"its Ray actor failed: {lines[-1] if lines else type(error).__name__}"
