"""Reading and writing objects: what the verbs of the API mean."""

from collections.abc import Callable
from dataclasses import dataclass

from treenail.clock import Clock, rfc3339
from treenail.lab.apiserver import builtin, metadata
from treenail.lab.apiserver.errors import (
    Cause,
    already_exists,
    bad_request,
    forbidden,
    invalid,
    not_found,
)
from treenail.lab.apiserver.kinds import Kind, Kinds
from treenail.lab.apiserver.objects import Json, deleting, dig, finalizers
from treenail.lab.apiserver.store import Store
from treenail.lab.apiserver.users import User

NAMESPACES = ("", "namespaces")
Change = Callable[[Json], Json]


@dataclass(frozen=True, slots=True)
class Write:
    """Who writes, and how: the options of a changing request."""

    user: User
    field_manager: str = ""
    dry_run: bool = False
    force: bool = False


class Registry:
    """The objects of the cluster behind the rules of their kinds."""

    def __init__(self, store: Store, kinds: Kinds, clock: Clock) -> None:
        self.store = store
        self.kinds = kinds
        self.clock = clock

    @property
    def now(self) -> str:
        return rfc3339(self.clock.now())

    def get(self, kind: Kind, namespace: str, name: str) -> Json:
        """The object; raises 404."""
        found = self.store.get(kind.storage, (namespace, name))
        if found is None:
            raise not_found(kind.group, kind.plural, name)
        return served(kind, found)

    def create(self, kind: Kind, namespace: str, body: Json, write: Write) -> Json:
        """A new object; raises 409 when its name is taken, 422 when it is not valid."""
        obj = metadata.placed(kind, namespace, "", body)
        if obj["metadata"].get("resourceVersion"):
            raise bad_request("resourceVersion should not be set on objects to be created")
        self._check_namespace(kind, namespace, obj["metadata"].get("name", ""))
        obj = metadata.begun(obj, self.now, generation=kind.generation)
        obj = builtin.begun(kind, obj)
        self._check(kind, obj, None)
        name = obj["metadata"]["name"]
        if self.store.get(kind.storage, (namespace, name)) is not None:
            raise already_exists(kind.group, kind.plural, name)
        return obj if write.dry_run else self.store.put(kind.storage, obj)

    def update(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        change: Change,
        write: Write,
        subresource: str = "",
    ) -> Json:
        """The object after a change; raises 409 when the change is about an older version."""
        old = self.get(kind, namespace, name)
        new = metadata.placed(kind, namespace, name, change(old))
        if subresource == "status":
            new = _with_status(kind, old, new)
        elif "status" in kind.subresources:
            new = _with_old_status(old, new)
        new = metadata.continued(kind, old, new)
        new = builtin.changed(kind, old, new)
        if kind.generation and _counted(kind, old) != _counted(kind, new):
            new["metadata"]["generation"] = old["metadata"].get("generation", 0) + 1
        self._check(kind, new, old)
        if new == old or write.dry_run:
            return new
        if deleting(new) and not finalizers(new) and not _lingers(new):
            return self.store.remove(kind.storage, (namespace, name))
        return self.store.put(kind.storage, new)

    def _check(self, kind: Kind, obj: Json, old: Json | None) -> None:
        found: list[Cause] = metadata.problems(kind, obj, old)
        found += builtin.problems(kind, obj, old)
        if found:
            raise invalid(kind.group, kind.kind, obj["metadata"].get("name", ""), found)

    def _check_namespace(self, kind: Kind, namespace: str, name: str) -> None:
        if not kind.namespaced:
            return
        found = self.store.get(NAMESPACES, ("", namespace))
        if found is None:
            raise not_found("", "namespaces", namespace)
        if deleting(found):
            why = (
                f"unable to create new content in namespace {namespace} because it is being "
                "terminated"
            )
            raise forbidden(kind.group, kind.plural, name, why)


def served(kind: Kind, obj: Json) -> Json:
    """A stored object in the API version a client asked for."""
    if obj["apiVersion"] == kind.api_version:
        return obj
    return obj | {"apiVersion": kind.api_version}


def _with_status(kind: Kind, old: Json, new: Json) -> Json:
    """A change through the status subresource: custom resources change nothing but their status.

    Built-in kinds also take labels and annotations, which kubelets count on.
    """
    changed = old | {"status": new.get("status", {})}
    if not kind.custom:
        changed["metadata"] = new["metadata"]
    elif "resourceVersion" in new["metadata"]:
        version = {"resourceVersion": new["metadata"]["resourceVersion"]}
        changed["metadata"] = old["metadata"] | version
    return changed


def _with_old_status(old: Json, new: Json) -> Json:
    kept = {name: value for name, value in new.items() if name != "status"}
    return kept | ({"status": old["status"]} if "status" in old else {})


def _counted(kind: Kind, obj: Json) -> Json:
    """The part of an object whose changes ``metadata.generation`` counts."""
    out = {"metadata", "apiVersion", "kind"}
    if "status" in kind.subresources:
        out.add("status")
    return {name: value for name, value in obj.items() if name not in out}


def _lingers(obj: Json) -> bool:
    return bool(dig(obj, "metadata", "deletionGracePeriodSeconds"))
