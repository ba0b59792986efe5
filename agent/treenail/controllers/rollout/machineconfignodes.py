"""A MachineConfigNode for each Node of a pool: made, and kept saying what the Node is asked for.

Who follows an update finds there the conditions that the agent and the drain controller report.
It goes with its Node, by its owner reference.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from treenail.api import annotations as key
from treenail.api import pullspec
from treenail.api.decode import Fields, Json
from treenail.api.machineconfignode import NOT_YET_SET
from treenail.api.meta import ObjectMeta
from treenail.clock import Clock
from treenail.controllers.rollout.observe import SeenPool
from treenail.controllers.rollout.pools import Membership, membership
from treenail.controllers.runtime.informers import Informers, View
from treenail.controllers.runtime.workers import LookAt
from treenail.errors import ConfigError, NotFound
from treenail.kube.resources import MACHINECONFIGNODES, MACHINECONFIGPOOLS, NODES, Resource
from treenail.kube.watch import Scope

log = logging.getLogger(__name__)

ABSENT_S = 60.0
"""How often it is tried whether the cluster has the kind by now."""


class Api(Protocol):
    """The verbs of a `Client` that it needs."""

    def create(self, resource: Resource, body: Json) -> Json: ...
    def patch(self, resource: Resource, name: str, body: Json) -> Json: ...


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """What a Node is asked for."""

    name: str
    uid: str
    labels: Mapping[str, str] = field(default_factory=dict)
    config: str = ""
    image: str = ""
    """Empty without one that is named by digest: nothing else may be said."""

    @classmethod
    def from_json(cls, document: Json, *, image_key: str) -> "NodeSeen":
        """What is asked for in a Node; raises `ConfigError`."""
        meta = ObjectMeta.from_fields(Fields.of(document, "Node").nested("metadata"))
        return cls(
            name=meta.name,
            uid=meta.uid,
            labels=meta.labels,
            config=meta.annotations.get(key.DESIRED_CONFIG, ""),
            image=_by_digest(meta.annotations.get(image_key, "")),
        )


@dataclass(frozen=True, slots=True)
class Said:
    """What a MachineConfigNode says, and which Node it goes with."""

    pool: str
    config: str
    image: str = ""
    owner: str = ""
    """The uid of the Node that owns it."""

    @classmethod
    def from_json(cls, document: Json) -> "Said":
        """What is said in a MachineConfigNode; raises `ConfigError`."""
        fields = Fields.of(document, MACHINECONFIGNODES.kind)
        meta, spec = fields.nested("metadata"), fields.nested("spec")
        owners = [each.text("uid") for each in meta.objects("ownerReferences")]
        return cls(
            pool=spec.nested("pool").text("name"),
            config=spec.nested("configVersion").text("desired"),
            image=spec.nested("configImage").text("desiredImage"),
            owner=owners[0] if owners else "",
        )


class MachineConfigNodes:
    """A `treenail.controllers.runtime.workers.Controller`, whose keys are the names of Nodes."""

    name = "machineconfignodes"

    def __init__(self, api: Api, clock: Clock, *, image_key: str = key.DESIRED_OS_IMAGE) -> None:
        self._api = api
        self._clock = clock
        self._image_key = image_key
        self._not_before = float("-inf")

    def watch(self, informers: Informers, look_at: LookAt) -> None:
        """Watch Nodes, pools and MachineConfigNodes, where the cluster has the kind."""
        nodes: View[NodeSeen] = informers.view(Scope(NODES), self._node)
        pools: View[SeenPool] = informers.view(Scope(MACHINECONFIGPOOLS), SeenPool.from_json)
        said: View[Said] = informers.view(Scope(MACHINECONFIGNODES), Said.from_json, optional=True)
        self._nodes, self._pools, self._said = nodes, pools, said

        def on_pool(_name: str, before: SeenPool | None, after: SeenPool | None) -> None:
            if before is None or after is None or before.selects != after.selects:
                for each in nodes.all():
                    look_at(each)

        nodes.tell(lambda name, _before, _after: look_at(name))
        said.tell(lambda name, _before, _after: look_at(name))
        pools.tell(on_pool)

    def sync(self, key: str) -> float | None:
        """Make the MachineConfigNode of this name say what its Node is asked for."""
        node, said = self._nodes.find(key), self._said.find(key)
        pool = None if node is None else self._pool_of(node)
        if node is None or pool is None:
            return None
        wanted = Said(pool, node.config or NOT_YET_SET, node.image, node.uid)
        if said == wanted:
            return None
        absent_s = self._not_before - self._clock.monotonic()
        if absent_s > 0:
            return absent_s
        try:
            self._write(node.name, wanted, said)
        except NotFound:
            if said is None:
                # To create needs nothing but the kind.
                log.info("this cluster has no MachineConfigNodes, none are written")
                self._not_before = self._clock.monotonic() + ABSENT_S
            return ABSENT_S
        return None

    def close(self) -> None:
        """It holds nothing."""

    def _write(self, name: str, wanted: Said, said: Said | None) -> None:
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
            self._api.create(MACHINECONFIGNODES, body)
            return
        # On no condition: the spec is ours, and those who report change the rest all the time.
        spec.setdefault("configImage", None)
        self._api.patch(MACHINECONFIGNODES, name, body)

    def _pool_of(self, node: NodeSeen) -> str | None:
        """The pool whose configuration the Node gets; None if there is none, or more than one."""
        try:
            pools = [seen.pool for seen in self._pools.all().values()]
            found: Membership | None = membership(node.name, node.labels, pools)
        except ConfigError:
            return None
        return None if found is None else found.primary

    def _node(self, document: Json) -> NodeSeen:
        return NodeSeen.from_json(document, image_key=self._image_key)


def _by_digest(image: str) -> str:
    try:
        return str(pullspec.parse(image, where="")) if image else ""
    except ConfigError:
        return ""
