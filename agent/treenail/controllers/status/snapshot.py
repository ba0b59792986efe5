"""Reads the objects of a cluster that a plan or a status needs."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TypeVar

from treenail.api import annotations as key
from treenail.api.decode import Fields, Json
from treenail.api.disruptionpolicy import DEFAULT_POLICY, ClusterDisruptionPolicy, DisruptionPolicy
from treenail.api.machineconfig import MachineConfig
from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.api.object_meta import ObjectMeta
from treenail.controllers.pools.disruption_budgets import (
    BlockingBudget,
    find_blocking_budget,
    find_blocking_reason,
)
from treenail.controllers.pools.node_facts import NodeFacts
from treenail.controllers.pools.pool_membership import ObservedPool
from treenail.controllers.pools.rollout_policy import ObservedPolicy
from treenail.controllers.render.render import ControllerConfig
from treenail.controllers.status.plan import PlanInput
from treenail.controllers.status.status_table import BuildRow, find_pool_builds
from treenail.errors import ClusterError, ConfigError, ForbiddenError, GoneError, NotFoundError
from treenail.kube.api_client import Client
from treenail.kube.resources import (
    CONTROLLERCONFIGS,
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    MACHINECONFIGURATIONS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    NODES,
    PODDISRUPTIONBUDGETS,
    PODS,
    ROLLOUTPOLICIES,
    Resource,
)

T = TypeVar("T")


def read_pools(client: Client) -> dict[str, ObservedPool]:
    """Read all pools by name; raise `ClusterError`."""
    found = _list_parsed(client, MACHINECONFIGPOOLS, ObservedPool.from_json)
    return {each.pool.name: each for each in found}


def read_metadata(client: Client, resource: Resource) -> list[ObjectMeta]:
    """Read the metadata of all objects of a kind; nothing when the cluster lacks the kind."""
    try:
        pages = [*client.list_pages(resource, has_metadata_only=True)]
    except GoneError:
        pages = [*client.list_pages(resource, has_metadata_only=True, is_paged=False)]
    except NotFoundError:
        return []
    return [
        ObjectMeta.from_fields(Fields.from_json(each, "").get_object("metadata"))
        for page in pages
        for each in page.items
    ]


def read_nodes(client: Client, *, image_key: str = key.DESIRED_OS_IMAGE) -> dict[str, NodeFacts]:
    """Read all nodes by name; raise `ClusterError`."""
    found = _list_parsed(client, NODES, lambda each: parse_node(each, image_key=image_key))
    return {each.name: each for each in found}


def parse_node(document: Json, *, image_key: str = key.DESIRED_OS_IMAGE) -> NodeFacts:
    """Parse a Node."""
    return NodeFacts.from_json(document, image_key=image_key)


def try_read_policies(client: Client) -> dict[str, ObservedPolicy] | None:
    """Read all rollout policies by name; None without the permission. Raises `ClusterError`."""
    try:
        found = _list_parsed(client, ROLLOUTPOLICIES, ObservedPolicy.from_json)
    except ForbiddenError:
        return None
    return {each.name: each for each in found}


def can_read_builds(client: Client) -> bool:
    """Return whether the user may list the kinds of image builds, or the cluster lacks them."""
    try:
        for resource in (MACHINEOSCONFIGS, MACHINEOSBUILDS):
            _list_parsed(client, resource, lambda each: each)
    except ForbiddenError:
        return False
    return True


def read_pool_builds(client: Client, now: float) -> dict[str, BuildRow]:
    """Read the image build of each pool; none without the permission."""
    try:
        configs = _list_parsed(client, MACHINEOSCONFIGS, MachineOSConfig.from_json)
        builds = _list_parsed(client, MACHINEOSBUILDS, MachineOSBuild.from_json)
    except (ConfigError, ForbiddenError):
        # The table of the nodes needs neither kind.
        return {}
    return find_pool_builds(
        {each.name: each for each in configs}, {each.name: each for each in builds}, now
    )


def read_snapshot(client: Client, *, image_key: str = key.DESIRED_OS_IMAGE) -> PlanInput:
    """Read all objects that a plan depends on; raise `ClusterError`."""
    clusters = _list_parsed(client, CONTROLLERCONFIGS, ControllerConfig.from_json)
    return PlanInput(
        pools=read_pools(client),
        nodes=read_nodes(client, image_key=image_key),
        configs={
            each.name: each
            for each in _list_parsed(client, MACHINECONFIGS, MachineConfig.from_json)
        },
        controller_config=clusters[0] if clusters else ControllerConfig(),
        disruption_policy=_read_disruption_policy(client),
        budgets=_read_blocking_budgets(client),
        policies={
            each.name: each
            for each in _list_parsed(client, ROLLOUTPOLICIES, ObservedPolicy.from_json)
        },
        image_configs={
            each.name: each
            for each in _list_permitted(client, MACHINEOSCONFIGS, MachineOSConfig.from_json)
        },
        image_builds={
            each.name: each
            for each in _list_permitted(client, MACHINEOSBUILDS, MachineOSBuild.from_json)
        },
    )


def _read_disruption_policy(client: Client) -> DisruptionPolicy:
    found = _list_parsed(client, MACHINECONFIGURATIONS, ClusterDisruptionPolicy.from_json)
    return found[0].policy if found else DEFAULT_POLICY


def _read_blocking_budgets(client: Client) -> tuple[BlockingBudget, ...]:
    """Read the budgets that never allow an eviction; list pods only in their namespaces."""
    try:
        listed = client.list(PODDISRUPTIONBUDGETS).items
        suspects: Mapping[str, list[Json]] = defaultdict(list)
        for budget in listed:
            if find_blocking_reason(budget):
                namespace = (
                    Fields.from_json(budget, "").get_object("metadata").get_text("namespace")
                )
                suspects[namespace].append(budget)
        found = []
        for namespace, budgets in sorted(suspects.items()):
            pods = client.list(PODS, namespace=namespace).items
            found += [
                each
                for budget in budgets
                if (each := find_blocking_budget(budget, pods)) is not None
            ]
    except ForbiddenError as error:
        return (BlockingBudget("(unknown)", f"cannot list PodDisruptionBudgets: {error}"),)
    return tuple(found)


def _list_permitted(client: Client, resource: Resource, read: Callable[[Json], T]) -> list[T]:
    """List and parse the objects of a kind; nothing without the permission."""
    try:
        return _list_parsed(client, resource, read)
    except ForbiddenError:
        return []


def _list_parsed(client: Client, resource: Resource, read: Callable[[Json], T]) -> list[T]:
    """List and parse the objects of a kind; nothing when the cluster lacks the kind."""
    try:
        return [read(found) for found in client.list(resource).items]
    except NotFoundError:
        if resource is MACHINECONFIGPOOLS:
            raise ClusterError(
                "the cluster has no MachineConfigPools",
                remedy="run: treenail-controller manifests | kubectl apply -f -",
            ) from None
        return []
