"""The cluster, as far as a plan or a status needs it, read once."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TypeVar

from treenail.api import annotations as key
from treenail.api.decode import Fields, Json
from treenail.api.disruptionpolicy import DEFAULTS, ClusterPolicy, DisruptionPolicy
from treenail.api.machineconfig import MachineConfig
from treenail.controllers.plan.budgets import StuckBudget, stuck, why_never
from treenail.controllers.plan.plan import Snapshot
from treenail.controllers.render.render import ControllerConfig
from treenail.controllers.rollout.nodes import NodeFacts
from treenail.controllers.rollout.observe import SeenPool
from treenail.errors import ClusterError, Forbidden, NotFound
from treenail.kube.client import Client
from treenail.kube.resources import (
    CONTROLLERCONFIGS,
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    MACHINECONFIGURATIONS,
    NODES,
    PODDISRUPTIONBUDGETS,
    PODS,
    Resource,
)

T = TypeVar("T")


def pools(client: Client) -> dict[str, SeenPool]:
    """All pools by name; raises `ClusterError`."""
    found = _read(client, MACHINECONFIGPOOLS, SeenPool.from_json)
    return {each.pool.name: each for each in found}


def nodes(client: Client, *, image_key: str = key.DESIRED_OS_IMAGE) -> dict[str, NodeFacts]:
    """All nodes by name; raises `ClusterError`."""

    def read(found: Json) -> NodeFacts:
        return NodeFacts.from_json(found, image_key=image_key)

    return {each.name: each for each in _read(client, NODES, read)}


def snapshot(client: Client, *, image_key: str = key.DESIRED_OS_IMAGE) -> Snapshot:
    """All that a plan depends on; raises `ClusterError`."""
    clusters = _read(client, CONTROLLERCONFIGS, ControllerConfig.from_json)
    return Snapshot(
        pools=pools(client),
        nodes=nodes(client, image_key=image_key),
        configs={
            each.name: each for each in _read(client, MACHINECONFIGS, MachineConfig.from_json)
        },
        cluster=clusters[0] if clusters else ControllerConfig(),
        policy=_policy(client),
        budgets=_budgets(client),
    )


def _policy(client: Client) -> DisruptionPolicy:
    found = _read(client, MACHINECONFIGURATIONS, ClusterPolicy.from_json)
    return found[0].policy if found else DEFAULTS


def _budgets(client: Client) -> tuple[StuckBudget, ...]:
    """The budgets that can never pass; pods are read only where there is one."""
    try:
        listed = client.list(PODDISRUPTIONBUDGETS).items
        suspects: Mapping[str, list[Json]] = defaultdict(list)
        for budget in listed:
            if why_never(budget):
                namespace = Fields.of(budget, "").nested("metadata").text("namespace")
                suspects[namespace].append(budget)
        found = []
        for namespace, budgets in sorted(suspects.items()):
            pods = client.list(PODS, namespace=namespace).items
            found += [each for budget in budgets if (each := stuck(budget, pods)) is not None]
    except Forbidden as error:
        return (StuckBudget("(unknown)", f"budgets can't be read: {error}"),)
    return tuple(found)


def _read(client: Client, resource: Resource, read: Callable[[Json], T]) -> list[T]:
    """What there is of a kind; nothing where the cluster does not have the kind."""
    try:
        return [read(found) for found in client.list(resource).items]
    except NotFound:
        if resource is MACHINECONFIGPOOLS:
            raise ClusterError(
                "the cluster has no MachineConfigPools", remedy="install the controllers first"
            ) from None
        return []
