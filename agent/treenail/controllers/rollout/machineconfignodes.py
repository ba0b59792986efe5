"""A MachineConfigNode for each Node of a pool: made, and kept saying what the Node is asked for.

Who follows an update finds there the conditions that the agent and the drain controller report.
It goes with its Node, by its owner reference.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail.api import annotations as key
from treenail.api import pullspec
from treenail.api.decode import Fields, Json
from treenail.api.machineconfignode import NOT_YET_SET
from treenail.api.meta import ObjectMeta
from treenail.clock import Clock
from treenail.controllers.rollout.pools import Membership, ObservedPool, find_membership
from treenail.controllers.runtime.informers import Informers, InformerView
from treenail.controllers.runtime.workers import Enqueue
from treenail.errors import ConfigError, NotFoundError
from treenail.kube.client import Client
from treenail.kube.resources import MACHINECONFIGNODES, MACHINECONFIGPOOLS, NODES
from treenail.kube.watch import WatchScope

log = logging.getLogger(__name__)

MISSING_KIND_RETRY_S = 60.0
"""How often it is tried whether the cluster has the kind by now."""


@dataclass(frozen=True, slots=True)
class RequestedNode:
    """What a Node is asked for."""

    name: str
    uid: str
    labels: Mapping[str, str] = field(default_factory=dict)
    config: str = ""
    image: str = ""
    """Empty without one that is named by digest: nothing else may be said."""

    @classmethod
    def from_json(cls, document: Json, *, image_key: str) -> "RequestedNode":
        """What is asked for in a Node; raises `ConfigError`."""
        meta = ObjectMeta.from_fields(Fields.from_json(document, "Node").get_object("metadata"))
        return cls(
            name=meta.name,
            uid=meta.uid,
            labels=meta.labels,
            config=meta.annotations.get(key.DESIRED_CONFIG, ""),
            image=_normalize_image(meta.annotations.get(image_key, "")),
        )


@dataclass(frozen=True, slots=True)
class ObservedMachineConfigNode:
    """What a MachineConfigNode says, and which Node it goes with."""

    pool: str
    config: str
    image: str = ""
    owner: str = ""
    """The uid of the Node that owns it."""

    @classmethod
    def from_json(cls, document: Json) -> "ObservedMachineConfigNode":
        """What is said in a MachineConfigNode; raises `ConfigError`."""
        fields = Fields.from_json(document, MACHINECONFIGNODES.kind)
        meta, spec = fields.get_object("metadata"), fields.get_object("spec")
        owners = [each.get_text("uid") for each in meta.iter_objects("ownerReferences")]
        return cls(
            pool=spec.get_object("pool").get_text("name"),
            config=spec.get_object("configVersion").get_text("desired"),
            image=spec.get_object("configImage").get_text("desiredImage"),
            owner=owners[0] if owners else "",
        )


class MachineConfigNodeController:
    """A `treenail.controllers.runtime.workers.Controller`, whose keys are the names of Nodes."""

    name = "machineconfignodes"

    def __init__(
        self, client: Client, clock: Clock, *, image_key: str = key.DESIRED_OS_IMAGE
    ) -> None:
        self._client = client
        self._clock = clock
        self._image_key = image_key
        self._not_before = float("-inf")

    def register_watches(self, informers: Informers, enqueue: Enqueue) -> None:
        """Watch Nodes, pools and MachineConfigNodes, where the cluster has the kind."""
        nodes: InformerView[RequestedNode] = informers.add_view(WatchScope(NODES), self._parse_node)
        pools: InformerView[ObservedPool] = informers.add_view(
            WatchScope(MACHINECONFIGPOOLS), ObservedPool.from_json
        )
        said: InformerView[ObservedMachineConfigNode] = informers.add_view(
            WatchScope(MACHINECONFIGNODES), ObservedMachineConfigNode.from_json, optional=True
        )
        self._nodes, self._pools, self._machine_config_nodes = nodes, pools, said

        def on_pool(_name: str, before: ObservedPool | None, after: ObservedPool | None) -> None:
            if before is None or after is None or before.selection_key != after.selection_key:
                for each in nodes.get_all():
                    enqueue(each)

        nodes.add_handler(lambda name, _before, _after: enqueue(name))
        said.add_handler(lambda name, _before, _after: enqueue(name))
        pools.add_handler(on_pool)

    def sync_key(self, key: str) -> float | None:
        """Make the MachineConfigNode of this name say what its Node is asked for."""
        node, said = self._nodes.find(key), self._machine_config_nodes.find(key)
        pool = None if node is None else self._find_pool(node)
        if node is None or pool is None:
            return None
        wanted = ObservedMachineConfigNode(pool, node.config or NOT_YET_SET, node.image, node.uid)
        if said == wanted:
            return None
        absent_s = self._not_before - self._clock.monotonic()
        if absent_s > 0:
            return absent_s
        try:
            self._write_object(node.name, wanted, said)
        except NotFoundError:
            if said is None:
                # To create needs nothing but the kind.
                log.info("this cluster has no MachineConfigNodes, none are written")
                self._not_before = self._clock.monotonic() + MISSING_KIND_RETRY_S
            return MISSING_KIND_RETRY_S
        return None

    def close(self) -> None:
        """It holds nothing."""

    def _write_object(
        self, name: str, wanted: ObservedMachineConfigNode, said: ObservedMachineConfigNode | None
    ) -> None:
        owner: Json = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": wanted.owner}
        metadata: Json = {"name": name, "ownerReferences": [owner]}
        spec: Json = {
            "node": {"name": name},
            "pool": {"name": wanted.pool},
            "configVersion": {"desired": wanted.config},
        }
        body: Json = {
            "apiVersion": MACHINECONFIGNODES.api_version,
            "kind": MACHINECONFIGNODES.kind,
            "metadata": metadata,
            "spec": spec,
        }
        if wanted.image:
            spec["configImage"] = {"desiredImage": wanted.image}
        if said is None:
            self._client.create(MACHINECONFIGNODES, body)
            return
        # On no condition: the spec is ours, and those who report change the rest all the time.
        spec.setdefault("configImage", None)
        self._client.patch(MACHINECONFIGNODES, name, body)

    def _find_pool(self, node: RequestedNode) -> str | None:
        """The pool whose configuration the Node gets; None if there is none, or more than one."""
        try:
            pools = [seen.pool for seen in self._pools.get_all().values()]
            found: Membership | None = find_membership(node.name, node.labels, pools)
        except ConfigError:
            return None
        return None if found is None else found.primary

    def _parse_node(self, document: Json) -> RequestedNode:
        return RequestedNode.from_json(document, image_key=self._image_key)


def _normalize_image(image: str) -> str:
    try:
        return str(pullspec.parse_pull_spec(image, where="")) if image else ""
    except ConfigError:
        return ""
