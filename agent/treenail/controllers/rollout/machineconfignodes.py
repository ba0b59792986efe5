"""MachineConfigNode controller: one object for each Node of a pool, with the Node's desired target.

The agent and the drain controller report an update in its conditions. Its owner reference deletes
it together with its Node.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import decode, machineconfignode, object_meta, pullspec
from treenail.api.component_names import PART_OF_LABELS
from treenail.controllers.pools import node_facts, pool_index, pool_membership
from treenail.controllers.runtime import informer_set, workers
from treenail.kube import api_client, resources, watch

log = logging.getLogger(__name__)

MISSING_KIND_RETRY_S = 60.0
"""Interval between attempts while the cluster does not have the kind."""


@dataclass(frozen=True, slots=True)
class RequestedNode:
    """A Node and its desired target."""

    name: str
    uid: str
    labels: Mapping[str, str] = field(default_factory=dict)
    config: str = ""
    """Empty unless it is the name of an object: the CRD accepts nothing else."""
    image: str = ""
    """Empty unless it is a pull spec by digest: the CRD accepts nothing else."""

    @classmethod
    def from_json(cls, document: decode.Json, *, image_key: str) -> "RequestedNode":
        """Parse a Node; raises `ConfigError`."""
        meta = object_meta.read_metadata(document, "Node")
        annotations = node_facts.read_annotations(meta)
        config = annotations.get(key.DESIRED_CONFIG, "")
        return cls(
            name=meta.name,
            uid=meta.uid,
            labels=meta.labels,
            config=config if object_meta.is_object_name(config) else "",
            image=_normalize_image(annotations.get(image_key, "")),
        )


@dataclass(frozen=True, slots=True)
class ObservedMachineConfigNode:
    """Spec and owner of a MachineConfigNode."""

    pool: str
    config: str
    image: str = ""
    owner: str = ""
    """The uid of the Node that owns it."""

    @classmethod
    def from_json(cls, document: decode.Json) -> "ObservedMachineConfigNode":
        """Parse a MachineConfigNode; raises `ConfigError`."""
        fields = decode.Fields.from_json(document, resources.MACHINECONFIGNODES.kind)
        meta, spec = fields.get_object("metadata"), fields.get_object("spec")
        owners = [reference.get_text("uid") for reference in meta.iter_objects("ownerReferences")]
        return cls(
            pool=spec.get_object("pool").get_text("name"),
            config=spec.get_object("configVersion").get_text("desired"),
            image=spec.get_object("configImage").get_text("desiredImage"),
            owner=owners[0] if owners else "",
        )


class MachineConfigNodeController:
    """A `treenail.controllers.runtime.workers.Controller` whose keys are Node names."""

    name = "machineconfignodes"

    def __init__(
        self,
        client: api_client.Client,
        clock: clocks.Clock,
        *,
        image_key: str = key.DESIRED_OS_IMAGE,
    ) -> None:
        self._client = client
        self._clock = clock
        self._image_key = image_key
        self._index = pool_index.SelectedPools()
        self._not_before = float("-inf")

    def register_watches(
        self, informers: informer_set.InformerSet, enqueue: workers.Enqueue
    ) -> None:
        """Watch Nodes, pools and, if the cluster has the kind, MachineConfigNodes."""
        nodes: informer_set.InformerView[RequestedNode] = informers.add_view(
            watch.WatchScope(resources.NODES),
            lambda document: RequestedNode.from_json(document, image_key=self._image_key),
        )
        pools: informer_set.InformerView[pool_membership.ObservedPool] = informers.add_view(
            watch.WatchScope(resources.MACHINECONFIGPOOLS), pool_membership.ObservedPool.from_json
        )
        machine_config_nodes: informer_set.InformerView[ObservedMachineConfigNode] = (
            informers.add_view(
                watch.WatchScope(resources.MACHINECONFIGNODES),
                ObservedMachineConfigNode.from_json,
                optional=True,
            )
        )
        self._nodes, self._machine_config_nodes = nodes, machine_config_nodes

        def on_pool(
            name: str,
            before: pool_membership.ObservedPool | None,
            after: pool_membership.ObservedPool | None,
        ) -> None:
            self._index.set_pool(name, after)
            if before is None or after is None or before.selection_key != after.selection_key:
                for node in nodes.get_all():
                    enqueue(node)

        nodes.add_handler(lambda name, _before, _after: enqueue(name))
        machine_config_nodes.add_handler(lambda name, _before, _after: enqueue(name))
        pools.add_handler(on_pool)

    def sync_key(self, key: str) -> float | None:
        """Create or update the MachineConfigNode of this Node."""
        node, observed = self._nodes.find(key), self._machine_config_nodes.find(key)
        pool = None if node is None else self._find_pool(node)
        if node is None or pool is None:
            return None
        desired = ObservedMachineConfigNode(
            pool, node.config or machineconfignode.NOT_YET_SET, node.image, node.uid
        )
        if observed == desired:
            return None
        wait_s = self._not_before - self._clock.monotonic()
        if wait_s > 0:
            return wait_s
        try:
            self._write_object(node.name, desired, observed)
        except errors.NotFoundError:
            if observed is None:
                # A create fails with 404 only when the API server does not know the kind.
                log.info("cluster has no MachineConfigNode kind; wrote none")
                self._not_before = self._clock.monotonic() + MISSING_KIND_RETRY_S
            return MISSING_KIND_RETRY_S
        return None

    def close(self) -> None:
        """Do nothing: the controller holds no resources."""

    def _write_object(
        self,
        name: str,
        desired: ObservedMachineConfigNode,
        observed: ObservedMachineConfigNode | None,
    ) -> None:
        owner: decode.Json = {
            "apiVersion": "v1",
            "kind": "Node",
            "name": name,
            "uid": desired.owner,
        }
        metadata: decode.Json = {"name": name, "ownerReferences": [owner]}
        spec: decode.Json = {
            "node": {"name": name},
            "pool": {"name": desired.pool},
            "configVersion": {"desired": desired.config},
        }
        body: decode.Json = {
            "apiVersion": resources.MACHINECONFIGNODES.api_version,
            "kind": resources.MACHINECONFIGNODES.kind,
            "metadata": metadata,
            "spec": spec,
        }
        if desired.image:
            spec["configImage"] = {"desiredImage": desired.image}
        if observed is None:
            body["metadata"] = {**metadata, "labels": PART_OF_LABELS}
            self._client.create(resources.MACHINECONFIGNODES, body)
            return
        # Without resourceVersion: only this controller writes the spec, and agents often change
        # the status.
        spec.setdefault("configImage", None)
        self._client.patch(resources.MACHINECONFIGNODES, name, body)

    def _find_pool(self, node: RequestedNode) -> str | None:
        """Find the pool that determines the Node's config; None without exactly one."""
        return self._index.find_primary(node.name, node.labels)


def _normalize_image(image: str) -> str:
    try:
        return str(pullspec.parse_pull_spec(image, where="")) if image else ""
    except errors.ConfigError:
        return ""
