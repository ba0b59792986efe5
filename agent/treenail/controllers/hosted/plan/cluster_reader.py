"""Read the objects of a management cluster that a plan of NodePools needs."""

import dataclasses
from collections import defaultdict

from treenail import errors
from treenail.api.hosted import clusterapi, nodepool
from treenail.controllers.hosted.plan import hosted_plan
from treenail.kube import api_client, discovery, resources


def read_objects(
    client: api_client.Client, changes: hosted_plan.Objects
) -> tuple[dict[hosted_plan.Key, api_client.Json], hosted_plan.Machines]:
    """Read the NodePools of the changed namespaces, and what the reached ones depend on.

    Raises `ClusterError`; a HostedCluster or ConfigMap that does not exist is absent.
    """
    objects: dict[hosted_plan.Key, api_client.Json] = {}
    for namespace in sorted({namespace for _, namespace, _ in changes}):
        try:
            pools = client.list(resources.NODEPOOLS, namespace=namespace).items
        except errors.NotFoundError as error:
            raise errors.ClusterError(
                "the cluster has no NodePools",
                remedy="connect to the management cluster of HyperShift with --kubeconfig",
            ) from error
        for pool in pools:
            name = str(resources.get_object(pool, "metadata").get("name"))
            objects[hosted_plan.NODE_POOL, namespace, name] = pool
    reached = hosted_plan.find_pools(hosted_plan.apply_objects(objects, changes), changes)
    # Also what the NodePools name before the change.
    named = (*reached.values(), *hosted_plan.find_pools(objects, reached).values())
    machines = defaultdict(list)
    for key in sorted({key for references in named for key in references}):
        is_cluster = key[0] == hosted_plan.HOSTED_CLUSTER
        resource = resources.HOSTEDCLUSTERS if is_cluster else resources.CONFIGMAPS
        if not key[2] or (found := client.find(resource, key[2], namespace=key[1])) is None:
            continue
        objects[key] = found
        if is_cluster:
            version = discovery.find_served_version(client, clusterapi.GROUP, clusterapi.VERSIONS)
            resource = dataclasses.replace(resources.MACHINES, version=version)
            namespace = nodepool.HostedCluster.from_json(found).control_plane_namespace
            for document in client.list(resource, namespace=namespace).items:
                machine = clusterapi.ClusterMachine.from_json(document)
                machines[machine.node_pool].append(machine)
    return objects, machines
