"""Merge rules of server-side apply: lists and maps are atomic, sets, or merged by key."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.schema.kinds import ResourceKind

# An atomic list (None), a set of values (no keys), or a list keyed by fields of its items.
ListKeys = tuple[str, ...] | None


class MergeTopology(Protocol):
    """The merge rules at one place of a document."""

    @property
    def is_atomic(self) -> bool:
        """Return whether a map here is atomic: replaced, not merged."""

    @property
    def list_keys(self) -> ListKeys:
        """Return how a list here is merged."""

    @property
    def key_defaults(self) -> Mapping[str, Any]:
        """Return the values of keys that an item of a keyed list leaves out."""

    @property
    def is_optional(self) -> bool:
        """Return whether the map or list here can be absent, so that who creates it owns it."""

    def find_child(self, name: str) -> "MergeTopology":
        """Return the rules at a field of the map here."""

    def find_item(self) -> "MergeTopology":
        """Return the rules at an item of the list here."""


@dataclass(frozen=True, slots=True)
class SchemaTopology:
    """The rules in the schema of a custom resource."""

    schema: Mapping[str, Any]
    root: bool = False
    key_defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_atomic(self) -> bool:
        return self.schema.get("x-kubernetes-map-type") == "atomic"

    @property
    def list_keys(self) -> ListKeys:
        match self.schema.get("x-kubernetes-list-type"):
            case "map":
                return tuple(self.schema.get("x-kubernetes-list-map-keys") or ())
            case "set":
                return ()
            case _:
                return None

    @property
    def is_optional(self) -> bool:
        return not self.root

    def find_child(self, name: str) -> MergeTopology:
        if self.root and name == "metadata":
            return BuiltInTopology(("metadata",))
        inner = (self.schema.get("properties") or {}).get(name)
        if inner is None:
            others = self.schema.get("additionalProperties")
            inner = others if isinstance(others, dict) else {}
        return SchemaTopology(inner)

    def find_item(self) -> MergeTopology:
        return SchemaTopology(self.schema.get("items") or {})


_BY_NAME = ("name",)
_LISTS: Mapping[str, ListKeys] = {
    "addresses": ("type",),
    "conditions": ("type",),
    "containers": _BY_NAME,
    "env": _BY_NAME,
    "ephemeralContainers": _BY_NAME,
    "hostAliases": ("ip",),
    "imagePullSecrets": _BY_NAME,
    "initContainers": _BY_NAME,
    "ownerReferences": ("uid",),
    "podCIDRs": (),
    "podIPs": ("ip",),
    "secrets": _BY_NAME,
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumeDevices": ("devicePath",),
    "volumeMounts": ("mountPath",),
    "volumes": _BY_NAME,
}
_ATOMIC_MAPS = frozenset({
    "selector", "labelSelector", "namespaceSelector", "nodeSelector", "roleRef", "involvedObject",
    "secretKeyRef", "configMapKeyRef", "fieldRef", "resourceFieldRef",
})  # fmt: skip
# The structs of the built-in kinds are always there; these maps and lists are not.
_OPTIONAL = frozenset({
    "addresses", "annotations", "binaryData", "conditions", "data", "finalizers", "labels",
    "ownerReferences",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class BuiltInTopology:
    """The rules of the built-in kinds, by the names of their fields."""

    path: tuple[str, ...] = ()

    @property
    def is_atomic(self) -> bool:
        return bool(self.path) and self.path[-1] in _ATOMIC_MAPS

    @property
    def list_keys(self) -> ListKeys:
        if self.path == ("metadata", "finalizers"):
            return ()
        if self.path[-1:] == ("ports",):
            return ("containerPort" if "containers" in self.path else "port", "protocol")
        return _LISTS.get(self.path[-1]) if self.path else None

    @property
    def key_defaults(self) -> Mapping[str, Any]:
        return {"protocol": "TCP"}

    @property
    def is_optional(self) -> bool:
        return bool(self.path) and self.path[-1] in _OPTIONAL

    def find_child(self, name: str) -> MergeTopology:
        return BuiltInTopology((*self.path, name))

    def find_item(self) -> MergeTopology:
        return self


def find_topology(kind: ResourceKind) -> MergeTopology:
    """Return the rules for objects of a kind."""
    return SchemaTopology(kind.schema, root=True) if kind.is_custom else BuiltInTopology()


def build_item_key(item: Json, keys: tuple[str, ...], defaults: Mapping[str, Any]) -> Json:
    """Return the values that identify an item of a keyed list."""
    return {
        name: item.get(name, defaults.get(name))
        for name in keys
        if name in item or name in defaults
    }
