"""Reading and writing objects: what the verbs of the API mean."""

from collections.abc import Callable
from dataclasses import dataclass

from treenail.clock import Clock, rfc3339
from treenail_lab.apiserver.access import node_authorizer
from treenail_lab.apiserver.access.authentication import User
from treenail_lab.apiserver.errors import (
    Cause,
    already_exists,
    bad_request,
    forbidden,
    invalid,
    not_found,
)
from treenail_lab.apiserver.objects import Json, deleting, equal, finalizers
from treenail_lab.apiserver.patch.field_set import leaves, own_fields
from treenail_lab.apiserver.patch.managed_fields import (
    APPLY,
    UPDATE,
    Owner,
    applied,
    updated,
    with_owners,
)
from treenail_lab.apiserver.patch.merge_topology import topology_of
from treenail_lab.apiserver.registry import builtin_kinds, crds, metadata
from treenail_lab.apiserver.schema import structural_schema
from treenail_lab.apiserver.schema.kinds import Kind, Kinds
from treenail_lab.apiserver.storage.store import Store

NAMESPACES = ("", "namespaces")
Change = Callable[[Json], Json]


@dataclass(frozen=True, slots=True)
class Write:
    """Who writes, and how: the options of a changing request."""

    user: User
    field_manager: str = "unknown"
    dry_run: bool = False
    force: bool = False
    strict: bool = False


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
        return self._create(kind, obj, self._owner(kind, write, UPDATE, ""), write)

    def update(
        self, kind: Kind, namespace: str, name: str, change: Change, write: Write, part: str = ""
    ) -> Json:
        """The object after a change of it, or of its subresource ``part``.

        Raises 409 when the change is about an older version, 422 when its outcome is not valid.
        """
        old = self.get(kind, namespace, name)
        new = metadata.placed(kind, namespace, name, change(old))
        new = structural_schema.without_nulls(dict(kind.schema), new) if kind.custom else new
        _check_known(kind, new, write)
        new = self._changed(kind, old, new, part)
        owner = self._owner(kind, write, UPDATE, part)
        owners = updated(old, new, owner, topology_of(kind))
        return self._finish(kind, old, with_owners(new, owners), write, part)

    def apply(
        self, kind: Kind, namespace: str, name: str, body: Json, write: Write, part: str = ""
    ) -> tuple[Json, bool]:
        """The object after a server-side apply, and whether it is new.

        Raises 409 with one cause per field when other appliers or writers own what it changes.
        """
        intent = metadata.placed(kind, namespace, name, body)
        if intent["metadata"].pop("managedFields", None) is not None:
            raise bad_request("metadata.managedFields must be nil")
        intent = _intended(kind, intent, part)
        owner = self._owner(kind, write, APPLY, part)
        old = self.store.get(kind.storage, (namespace, name))
        if old is None:
            if part or intent["metadata"].get("resourceVersion"):
                raise not_found(kind.group, kind.plural, name)
            return self._create(kind, intent, owner, write), True
        old = served(kind, old)
        _check_known(kind, intent, write)
        metadata.check_uid(kind, old, intent)
        new, owners = applied(old, intent, owner, topology_of(kind), force=write.force)
        if "resourceVersion" in intent["metadata"]:
            new["metadata"]["resourceVersion"] = intent["metadata"]["resourceVersion"]
        new = self._changed(kind, old, new, part)
        return self._finish(kind, old, with_owners(new, owners), write, part), False

    def restrict(
        self, user: User, kind: Kind, old: Json | None, new: Json | None, part: str = ""
    ) -> None:
        """Raise 403 when a node writes what is not its own."""
        if user.node and not user.master:
            node_authorizer.restrict(user.node, kind, part, old, new)

    def _create(self, kind: Kind, obj: Json, owner: Owner, write: Write) -> Json:
        namespace = obj["metadata"].get("namespace", "")
        self._check_namespace(kind, namespace, obj["metadata"].get("name", ""))
        self.restrict(write.user, kind, None, obj)
        topology = topology_of(kind)
        intended = frozenset(path for path, _ in leaves(own_fields(obj), topology))
        obj = metadata.begun(obj, self.now, generation=kind.generation)
        if kind.custom:
            _check_known(kind, obj, write)
            given = structural_schema.without_nulls(dict(kind.schema), _without_status(kind, obj))
            obj = structural_schema.conformed(dict(kind.schema), given)
        else:
            obj = builtin_kinds.begun(kind, obj)
        self._check(kind, obj, None)
        if kind.storage == crds.CRDS:
            obj = crds.established(obj, self.now)
        if owner.operation == APPLY:
            owners = [Owner(owner.name, APPLY, owner.api_version, "", owner.time, intended)]
        else:
            owners = updated(None, _without_status(kind, obj), owner, topology)
        obj = with_owners(obj, owners)
        name = obj["metadata"]["name"]
        if self.store.get(kind.storage, (namespace, name)) is not None:
            raise already_exists(kind.group, kind.plural, name)
        return obj if write.dry_run else self.store.put(kind.storage, obj)

    def _changed(self, kind: Kind, old: Json, new: Json, part: str) -> Json:
        """The object as the rules of its kind leave it after a change."""
        if part == "status":
            new = _with_status(kind, old, new)
        elif "status" in kind.subresources:
            new = _with_old_status(old, new)
        new = metadata.continued(kind, old, new)
        if kind.custom:
            new = structural_schema.conformed(dict(kind.schema), new)
        else:
            new = builtin_kinds.changed(kind, old, new)
        if kind.storage == crds.CRDS and not crds.problems(new):
            new = crds.established(new, self.now)
        if kind.generation and not equal(_counted(kind, old), _counted(kind, new)):
            new["metadata"]["generation"] = old["metadata"].get("generation", 0) + 1
        return new

    def _finish(self, kind: Kind, old: Json, new: Json, write: Write, part: str) -> Json:
        self.restrict(write.user, kind, old, new, part)
        self._check(kind, new, old)
        if equal(new, old) or write.dry_run:
            return new
        where = new["metadata"].get("namespace", ""), new["metadata"]["name"]
        if deleting(new) and not finalizers(new) and not waits(kind, new):
            self.store.put(kind.storage, new)
            return self.store.remove(kind.storage, where)
        return self.store.put(kind.storage, new)

    def _owner(self, kind: Kind, write: Write, operation: str, part: str) -> Owner:
        return Owner(
            name=write.field_manager,
            operation=operation,
            api_version=kind.api_version,
            subresource=part,
            time=self.now,
            fields=frozenset(),
        )

    def _check(self, kind: Kind, obj: Json, old: Json | None) -> None:
        found: list[Cause] = metadata.problems(kind, obj, old)
        if kind.custom:
            found += structural_schema.problems(dict(kind.schema), obj)
        else:
            found += builtin_kinds.problems(kind, obj, old)
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


def check_versioned(kind: Kind, body: Json) -> None:
    """Raise 422 for a PUT without a resourceVersion to a kind that wants one."""
    if kind.unconditional or (body.get("metadata") or {}).get("resourceVersion"):
        return
    message = "Invalid value: 0x0: must be specified for an update"
    cause = Cause("FieldValueInvalid", message, "metadata.resourceVersion")
    raise invalid(kind.group, kind.kind, (body.get("metadata") or {}).get("name", ""), [cause])


def _check_known(kind: Kind, obj: Json, write: Write) -> None:
    """Raise 400 for fields that nobody knows, when the request wants to be told."""
    if not write.strict or not kind.custom:
        return
    found = [
        f'unknown field "{path}"'
        for path in structural_schema.unknown_fields(dict(kind.schema), obj)
    ]
    if found:
        raise bad_request(f"strict decoding error: {', '.join(found)}")


def served(kind: Kind, obj: Json) -> Json:
    """A stored object in the API version a client asked for."""
    if obj["apiVersion"] == kind.api_version:
        return obj
    return obj | {"apiVersion": kind.api_version}


def waits(kind: Kind, obj: Json) -> bool:
    """Whether a deleted object without finalizers stays until somebody has finished with it."""
    if kind.storage == NAMESPACES:
        return bool((obj.get("spec") or {}).get("finalizers"))
    return bool(obj["metadata"].get("deletionGracePeriodSeconds"))


def _without_status(kind: Kind, obj: Json) -> Json:
    if "status" not in kind.subresources:
        return obj
    return {name: value for name, value in obj.items() if name != "status"}


def _intended(kind: Kind, intent: Json, part: str) -> Json:
    """The part of an applied document that the endpoint it was sent to listens to."""
    if part == "status":
        kept = ("apiVersion", "kind", "metadata", "status")
        intent = {name: value for name, value in intent.items() if name in kept}
        if kind.custom:
            named = ("name", "namespace", "uid", "resourceVersion")
            found = intent["metadata"]
            intent["metadata"] = {name: found[name] for name in named if name in found}
        return intent
    return _without_status(kind, intent)


def _with_status(kind: Kind, old: Json, new: Json) -> Json:
    """A change through the status subresource: custom resources change nothing but their status.

    Built-in kinds also take labels and annotations, which kubelets count on.
    """
    changed = {name: value for name, value in old.items() if name != "status"}
    if "status" in new:
        changed["status"] = new["status"]
    if kind.custom:
        said = {name: new["metadata"].get(name) for name in ("uid", "resourceVersion")}
        changed["metadata"] = old["metadata"] | {k: v for k, v in said.items() if v}
    else:
        changed["metadata"] = new["metadata"]
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
