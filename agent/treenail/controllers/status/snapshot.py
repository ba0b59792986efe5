"""Read the objects of a cluster that a plan or a status needs."""

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from treenail import errors
from treenail.api import annotations as key
from treenail.api import (
    decode,
    disruptionpolicy,
    machineconfig,
    machineosbuild,
    machineosconfig,
    object_meta,
)
from treenail.config.generated import sources
from treenail.controllers.pools import (
    disruption_budgets,
    node_facts,
    os_image,
    pool_membership,
    rollout_policy,
)
from treenail.controllers.render.render import ControllerConfig
from treenail.controllers.status import rollout_plan, status_table
from treenail.kube import api_client, resources

T = TypeVar("T")


def read_pools(client: api_client.Client) -> dict[str, pool_membership.ObservedPool]:
    """Read all pools by name; raise `ClusterError`."""
    pools = _list_parsed(
        client, resources.MACHINECONFIGPOOLS, pool_membership.ObservedPool.from_json
    )
    return {observed.pool.name: observed for observed in pools}


def read_metadata(
    client: api_client.Client, resource: resources.Resource
) -> Sequence[object_meta.ObjectMeta]:
    """Read the metadata of all objects of a kind; nothing when the cluster lacks the kind."""
    try:
        return client.list_parsed(
            resource,
            lambda page: [object_meta.read_metadata(document, "") for document in page.items],
            has_metadata_only=True,
        )
    except errors.NotFoundError:
        return ()


def read_image_stream(client: api_client.Client) -> os_image.OSImageStream | None:
    """Read the OS image streams; None when the cluster has none. Raises `ClusterError`."""
    streams = _list_parsed(client, resources.OSIMAGESTREAMS, os_image.OSImageStream.from_json)
    return next(iter(streams), None)


def read_strays(
    client: api_client.Client, pools: Mapping[str, pool_membership.ObservedPool]
) -> tuple[str, ...]:
    """Describe the nodes with an agent whose pool is none or not the expected one."""
    return pool_membership.list_strays(
        pools,
        (
            (node.name, node.labels, node.annotations.get(key.CURRENT_CONFIG, ""))
            for node in read_metadata(client, resources.NODES)
        ),
    )


def read_nodes(client: api_client.Client) -> dict[str, node_facts.NodeFacts]:
    """Read all nodes by name; raise `ClusterError`."""
    nodes = _list_parsed(client, resources.NODES, node_facts.NodeFacts.from_json)
    return {node.name: node for node in nodes}


def try_read_policies(client: api_client.Client) -> dict[str, rollout_policy.ObservedPolicy] | None:
    """Read all rollout policies by name; None without the permission. Raises `ClusterError`."""
    try:
        policies = _list_parsed(
            client, resources.ROLLOUTPOLICIES, rollout_policy.ObservedPolicy.from_json
        )
    except errors.ForbiddenError:
        return None
    return {policy.name: policy for policy in policies}


def can_read_builds(client: api_client.Client) -> bool:
    """Return whether the user may list the kinds of image builds, or the cluster lacks them."""
    try:
        for resource in (resources.MACHINEOSCONFIGS, resources.MACHINEOSBUILDS):
            _list_parsed(client, resource, lambda document: document)
    except errors.ForbiddenError:
        return False
    return True


def read_pool_builds(client: api_client.Client, now: float) -> dict[str, status_table.BuildRow]:
    """Read the image build of each pool; none without the permission."""
    try:
        configs = _list_parsed(
            client, resources.MACHINEOSCONFIGS, machineosconfig.MachineOSConfig.from_json
        )
        builds = _list_parsed(
            client, resources.MACHINEOSBUILDS, machineosbuild.MachineOSBuild.from_json
        )
    except (errors.ConfigError, errors.ForbiddenError):
        # The table of the nodes needs neither kind.
        return {}
    return status_table.find_pool_builds(
        {config.name: config for config in configs}, {build.name: build for build in builds}, now
    )


def read_snapshot(client: api_client.Client) -> rollout_plan.RolloutPlanInput:
    """Read all objects that a plan depends on; raise `ClusterError`."""
    clusters = _list_parsed(client, resources.CONTROLLERCONFIGS, ControllerConfig.from_json)
    return rollout_plan.RolloutPlanInput(
        pools=read_pools(client),
        nodes=read_nodes(client),
        configs={
            config.name: config
            for config in _list_parsed(
                client, resources.MACHINECONFIGS, machineconfig.MachineConfig.from_json
            )
        },
        controller_config=clusters[0] if clusters else ControllerConfig(),
        image_stream=read_image_stream(client),
        disruption_policy=_read_disruption_policy(client),
        budgets=_read_blocking_budgets(client),
        policies={
            policy.name: policy
            for policy in _list_parsed(
                client, resources.ROLLOUTPOLICIES, rollout_policy.ObservedPolicy.from_json
            )
        },
        image_configs={
            config.name: config
            for config in _list_permitted(
                client, resources.MACHINEOSCONFIGS, machineosconfig.MachineOSConfig.from_json
            )
        },
        image_builds={
            build.name: build
            for build in _list_permitted(
                client, resources.MACHINEOSBUILDS, machineosbuild.MachineOSBuild.from_json
            )
        },
    )


def add_generator_objects(
    client: api_client.Client, before: rollout_plan.RolloutPlanInput
) -> rollout_plan.RolloutPlanInput:
    """Return the snapshot with the objects that become MachineConfigs, as far as permitted."""
    documents = [
        {**document, "kind": resource.kind}
        for resource in resources.GENERATOR_SOURCES
        for document in _list_permitted(client, resource, lambda document: document)
    ]
    kubeadm = None
    with contextlib.suppress(errors.ForbiddenError):
        kubeadm = client.find(resources.CONFIGMAPS, sources.KUBEADM_CONFIG, namespace="kube-system")
    objects = map(sources.SourceObject.from_json, documents)
    return dataclasses.replace(
        before,
        source_objects={source.key: source for source in objects},
        kubeadm=kubeadm or {},
    )


def _read_disruption_policy(client: api_client.Client) -> disruptionpolicy.DisruptionPolicy:
    policies = _list_parsed(
        client, resources.MACHINECONFIGURATIONS, disruptionpolicy.ClusterDisruptionPolicy.from_json
    )
    return policies[0].policy if policies else disruptionpolicy.DEFAULT_POLICY


def _read_blocking_budgets(
    client: api_client.Client,
) -> tuple[disruption_budgets.BlockingBudget, ...]:
    """Read the budgets that never allow an eviction; list pods only in their namespaces."""
    try:
        suspects: Mapping[str, list[decode.Json]] = defaultdict(list)
        for budget in client.list_parsed(
            resources.PODDISRUPTIONBUDGETS,
            lambda page: filter(disruption_budgets.find_blocking_reason, page.items),
        ):
            fields = decode.Fields.from_json(budget, "")
            suspects[fields.get_object("metadata").get_text("namespace")].append(budget)
        blocking_budgets = []
        for namespace, budgets in sorted(suspects.items()):
            pods = client.list(resources.PODS, namespace=namespace).items
            blocking_budgets += [
                blocking
                for budget in budgets
                if (blocking := disruption_budgets.find_blocking_budget(budget, pods)) is not None
            ]
    except errors.ForbiddenError as error:
        return (
            disruption_budgets.BlockingBudget(
                "(unknown)", f"cannot list PodDisruptionBudgets: {error}"
            ),
        )
    return tuple(blocking_budgets)


def _list_permitted(
    client: api_client.Client, resource: resources.Resource, read: Callable[[decode.Json], T]
) -> list[T]:
    """List and parse the objects of a kind; nothing without the permission."""
    try:
        return _list_parsed(client, resource, read)
    except errors.ForbiddenError:
        return []


def _list_parsed(
    client: api_client.Client, resource: resources.Resource, read: Callable[[decode.Json], T]
) -> list[T]:
    """List and parse the objects of a kind; nothing when the cluster lacks the kind."""
    try:
        return [read(document) for document in client.list(resource).items]
    except errors.NotFoundError:
        if resource is resources.MACHINECONFIGPOOLS:
            raise errors.ClusterError(
                "the cluster has no MachineConfigPools",
                remedy="run: treenail-controller manifests | kubectl apply -f -",
            ) from None
        return []
