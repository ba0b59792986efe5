"""A namespace of one's own, and builders for what is put there."""

from dataclasses import dataclass
from typing import Any

from tests.contract.client import Cluster, Json

POLL_LIMIT_S = 40.0


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace that a test may fill; everything in it goes with it."""

    cluster: Cluster
    name: str

    def at(self, plural: str, name: str = "", part: str = "", group: str = "v1") -> str:
        """The path of a collection, an object or a subresource; ``group`` is an apiVersion."""
        root = f"/apis/{group}" if "/" in group else f"/api/{group}"
        return "/".join(filter(None, [root, "namespaces", self.name, plural, name, part]))

    def config_map(self, name: str, /, contents: Json | None = None, **metadata: Any) -> Json:
        """Create a ConfigMap."""
        return self.cluster.post(self.at("configmaps"), config_map(name, contents, **metadata)).ok()


def config_map(name: str, /, contents: Json | None = None, **metadata: Any) -> Json:
    """A ConfigMap, as one sends it."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name} | metadata,
        "data": contents or {},
    }


def pod(name: str, **labels: str) -> Json:
    """A pod that no scheduler wants."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "schedulerName": "none",
            "automountServiceAccountToken": False,
            "containers": [{"name": "main", "image": "example.invalid/image"}],
        },
    }


def widget(group: str, **spec: Any) -> Json:
    return {
        "apiVersion": group,
        "kind": "Widget",
        "metadata": {"name": "w"},
        "spec": {"size": 1} | spec,
    }


def owned_by(owner: Json, **fields: Any) -> list[Json]:
    """``metadata.ownerReferences`` with one owner."""
    return [
        {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
        }
        | fields
    ]


def names(listed: Json) -> list[str]:
    return [item["metadata"]["name"] for item in listed["items"]]


def fields_of(obj: Json, owner: str, part: str = "") -> list[Json]:
    """Return the fields that a manager owns of an object, one entry for each operation."""
    return [
        entry["fieldsV1"]
        for entry in obj["metadata"].get("managedFields", [])
        if entry["manager"] == owner and entry.get("subresource", "") == part
    ]
