"""Parts of a log bundle that the new cluster has: pools, image configs and builds."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

from treenail.api.decode import Json
from treenail.controllers.handover.pool_progress import parse_objects
from treenail.errors import ClusterError, ConfigError, NotFoundError, UsageError
from treenail.installer.log_bundle.archive import LogBundle
from treenail.installer.log_bundle.withhold import format_objects
from treenail.kube.client import Client
from treenail.kube.resources import (
    MACHINECONFIGPOOLS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    NODES,
    Resource,
)

PREFIX = "cluster/treenail"
_RESOURCES = (MACHINEOSCONFIGS, MACHINEOSBUILDS, MACHINECONFIGPOOLS, NODES)

OpenCluster = Callable[[], AbstractContextManager[Client]]
"""Connects to the cluster; raises `UsageError`."""


def add_cluster_parts(bundle: LogBundle, open_cluster: OpenCluster) -> tuple[str, ...]:
    """Add the objects; return a sentence for each pool without its image.

    A cluster that does not answer is recorded as missing, with one attempt.
    """
    found: dict[Resource, tuple[Json, ...]] = {}
    try:
        with open_cluster() as client:
            for resource in _RESOURCES:
                try:
                    found[resource] = client.list(resource).items
                except NotFoundError as error:
                    # The controllers, which bring the kind, are not installed yet.
                    bundle.note_missing(f"{PREFIX}/{resource.plural}.yaml", str(error))
    except (ClusterError, UsageError) as error:
        bundle.note_missing(PREFIX, str(error))
    for resource, items in found.items():
        name = f"{PREFIX}/{resource.plural}.yaml"
        bundle.add_part(name, partial(_format_items, items, resource))
    return tuple(_describe_pools(found))


def _format_items(items: tuple[Json, ...], resource: Resource) -> bytes:
    # API servers leave kind and version out of the items of a list.
    kind: Json = {"apiVersion": resource.api_version, "kind": resource.kind}
    text = "".join(f"---\n{json.dumps({**kind, **each})}\n" for each in items)
    return format_objects(text.encode(), where=resource.plural)


def _describe_pools(found: dict[Resource, tuple[Json, ...]]) -> Iterator[str]:
    if not found.keys() >= {MACHINECONFIGPOOLS, MACHINEOSCONFIGS, MACHINEOSBUILDS}:
        return
    try:
        progress = parse_objects(
            found[MACHINECONFIGPOOLS], found[MACHINEOSCONFIGS], found[MACHINEOSBUILDS]
        )
    except ConfigError as error:
        yield f"cannot read the pools: {error}"
        return
    yield from (*progress.failed, *progress.missing)
