"""Read and write objects, with the rules of their kinds."""

from collections.abc import Callable
from dataclasses import dataclass

from treenail.clocks import Clock, format_rfc3339
from treenail_lab.apiserver.access import node_authorizer
from treenail_lab.apiserver.access.authentication import ApiUser
from treenail_lab.apiserver.errors import (
    StatusCause,
    already_exists_error,
    bad_request_error,
    forbidden_error,
    invalid_error,
    not_found_error,
    untyped_patch_error,
)
from treenail_lab.apiserver.objects import (
    Json,
    is_deleting,
    is_equal,
    read_finalizers,
    read_labels,
)
from treenail_lab.apiserver.patch.managed_fields import (
    APPLY,
    UPDATE,
    FieldOwner,
    apply_intent,
    compute_update_owners,
    find_leaves,
    replace_owners,
    select_owned_fields,
)
from treenail_lab.apiserver.patch.merge_topology import find_topology
from treenail_lab.apiserver.registry import builtin_kinds, crds, metadata
from treenail_lab.apiserver.registry.builtin_kinds import complete_decision, set_requester
from treenail_lab.apiserver.registry.pod_security import find_violation
from treenail_lab.apiserver.schema import structural_schema
from treenail_lab.apiserver.schema.kinds import KindRegistry, ResourceKind
from treenail_lab.apiserver.store import Store

NAMESPACES = ("", "namespaces")
ObjectChange = Callable[[Json], Json]


@dataclass(frozen=True, slots=True)
class WriteContext:
    """The user and the options of a write."""

    user: ApiUser
    field_manager: str = "unknown"
    is_dry_run: bool = False
    is_forced: bool = False
    is_strict: bool = False


class ObjectRegistry:
    """The objects of the cluster, behind the rules of their kinds."""

    def __init__(self, store: Store, kinds: KindRegistry, clock: Clock) -> None:
        self.store = store
        self.kinds = kinds
        self.clock = clock

    @property
    def now(self) -> str:
        return format_rfc3339(self.clock.now())

    def find_object(self, kind: ResourceKind, namespace: str, name: str) -> Json:
        """Return the object; raise 404."""
        stored = self.store.find_object(kind.storage, (namespace, name))
        if stored is None:
            raise not_found_error(kind.group, kind.plural, name)
        return convert_version(kind, stored)

    def create_object(
        self, kind: ResourceKind, namespace: str, body: Json, write: WriteContext
    ) -> Json:
        """Create an object; raise 409 when its name is in use, 422 when it is invalid."""
        obj = metadata.normalize_body(kind, namespace, "", body)
        if obj["metadata"].get("resourceVersion"):
            raise bad_request_error("resourceVersion should not be set on objects to be created")
        return self._store_new(kind, obj, self._build_owner(kind, write, UPDATE, ""), write)

    def update_object(
        self,
        kind: ResourceKind,
        namespace: str,
        name: str,
        change: ObjectChange,
        write: WriteContext,
        subresource: str = "",
    ) -> Json:
        """The object after a change of it, or of its subresource ``subresource``.

        Raises 409 when the change is about an older version, 422 when its outcome is not valid.
        """
        old = self.find_object(kind, namespace, name)
        new = metadata.normalize_body(kind, namespace, name, change(old))
        new = structural_schema.drop_nulls(dict(kind.schema), new) if kind.is_custom else new
        _check_unknown_fields(kind, new, write)
        new = self._prepare_change(kind, old, new, subresource)
        owner = self._build_owner(kind, write, UPDATE, subresource)
        owners = compute_update_owners(old, new, owner, find_topology(kind))
        return self._store_change(kind, old, replace_owners(new, owners), write, subresource)

    def apply_object(
        self,
        kind: ResourceKind,
        namespace: str,
        name: str,
        body: Json,
        write: WriteContext,
        subresource: str = "",
    ) -> tuple[Json, bool]:
        """Apply an object server-side; return the result and whether it is new.

        Raise 409 with one cause for each changed field that another manager owns.
        """
        intent = metadata.normalize_body(kind, namespace, name, body)
        if intent["metadata"].pop("managedFields", None) is not None:
            raise bad_request_error("metadata.managedFields must be nil")
        _check_typed_fields(kind, (body.get("metadata") or {}).get("namespace", ""), name, intent)
        intent = _select_intent(kind, intent, subresource)
        owner = self._build_owner(kind, write, APPLY, subresource)
        old = self.store.find_object(kind.storage, (namespace, name))
        if old is None:
            if subresource or intent["metadata"].get("resourceVersion"):
                raise not_found_error(kind.group, kind.plural, name)
            return self._store_new(kind, intent, owner, write), True
        old = convert_version(kind, old)
        metadata.check_uid(kind, old, intent)
        new, owners = apply_intent(old, intent, owner, find_topology(kind), force=write.is_forced)
        if "resourceVersion" in intent["metadata"]:
            new["metadata"]["resourceVersion"] = intent["metadata"]["resourceVersion"]
        new = self._prepare_change(kind, old, new, subresource)
        return self._store_change(kind, old, replace_owners(new, owners), write, subresource), False

    def restrict_write(
        self,
        user: ApiUser,
        kind: ResourceKind,
        old: Json | None,
        new: Json | None,
        subresource: str = "",
    ) -> None:
        """Raise 403 when a node writes an object that is not its own."""
        if user.node_name and not user.is_master:
            node_authorizer.restrict_write(user.node_name, kind, subresource, old, new)

    def _store_new(
        self, kind: ResourceKind, obj: Json, owner: FieldOwner, write: WriteContext
    ) -> Json:
        namespace = obj["metadata"].get("namespace", "")
        self._check_namespace(kind, namespace, obj["metadata"].get("name", ""))
        self.restrict_write(write.user, kind, None, obj)
        self._check_pod_security(kind, namespace, obj)
        topology = find_topology(kind)
        intended = frozenset(path for path, _ in find_leaves(select_owned_fields(obj), topology))
        obj = metadata.prepare_new(obj, self.now, generation=kind.has_generation)
        if kind.is_custom:
            _check_unknown_fields(kind, obj, write)
            given = structural_schema.drop_nulls(dict(kind.schema), _drop_status(kind, obj))
            obj = structural_schema.conform_object(dict(kind.schema), given)
        else:
            obj = builtin_kinds.prepare_new(kind, obj)
            obj = set_requester(kind, obj, write.user.name, write.user.groups)
        self._validate_object(kind, obj, None)
        if kind.storage == crds.CRDS:
            obj = crds.establish_crd(obj, self.now)
        if owner.operation == APPLY:
            owners = [FieldOwner(owner.name, APPLY, owner.api_version, "", owner.time, intended)]
        else:
            owners = compute_update_owners(None, _drop_status(kind, obj), owner, topology)
        obj = replace_owners(obj, owners)
        name = obj["metadata"]["name"]
        if self.store.find_object(kind.storage, (namespace, name)) is not None:
            raise already_exists_error(kind.group, kind.plural, name)
        return obj if write.is_dry_run else self.store.put_object(kind.storage, obj)

    def _prepare_change(self, kind: ResourceKind, old: Json, new: Json, part: str) -> Json:
        """Return the changed object after the rules of its kind."""
        if part in ("status", "approval"):
            new = complete_decision(kind, _replace_status(kind, old, new), self.now)
        elif "status" in kind.subresources:
            new = _restore_status(old, new)
        new = metadata.prepare_changed(kind, old, new)
        if kind.is_custom:
            new = structural_schema.conform_object(dict(kind.schema), new)
        else:
            new = builtin_kinds.prepare_changed(kind, old, new)
        if kind.storage == crds.CRDS and not crds.find_problems(new):
            new = crds.establish_crd(new, self.now)
        if kind.has_generation and not is_equal(
            _select_counted_fields(kind, old), _select_counted_fields(kind, new)
        ):
            new["metadata"]["generation"] = old["metadata"].get("generation", 0) + 1
        return new

    def _store_change(
        self, kind: ResourceKind, old: Json, new: Json, write: WriteContext, part: str
    ) -> Json:
        self.restrict_write(write.user, kind, old, new, part)
        self._validate_object(kind, new, old)
        if is_equal(new, old) or write.is_dry_run:
            return new
        where = new["metadata"].get("namespace", ""), new["metadata"]["name"]
        if is_deleting(new) and not read_finalizers(new) and not is_awaiting_removal(kind, new):
            self.store.put_object(kind.storage, new)
            return self.store.remove_object(kind.storage, where)
        return self.store.put_object(kind.storage, new)

    def _build_owner(
        self, kind: ResourceKind, write: WriteContext, operation: str, part: str
    ) -> FieldOwner:
        return FieldOwner(
            name=write.field_manager,
            operation=operation,
            api_version=kind.api_version,
            subresource=part,
            time=self.now,
            fields=frozenset(),
        )

    def _validate_object(self, kind: ResourceKind, obj: Json, old: Json | None) -> None:
        problems: list[StatusCause] = metadata.find_problems(kind, obj, old)
        if kind.is_custom:
            problems += structural_schema.find_problems(dict(kind.schema), obj)
        else:
            problems += builtin_kinds.find_problems(kind, obj, old)
        if problems:
            raise invalid_error(kind.group, kind.kind, obj["metadata"].get("name", ""), problems)

    def _check_namespace(self, kind: ResourceKind, namespace: str, name: str) -> None:
        if not kind.is_namespaced:
            return
        stored = self.store.find_object(NAMESPACES, ("", namespace))
        if stored is None:
            raise not_found_error("", "namespaces", namespace)
        if is_deleting(stored):
            why = (
                f"unable to create new content in namespace {namespace} because it is being "
                "terminated"
            )
            raise forbidden_error(kind.group, kind.plural, name, why)

    def _check_pod_security(self, kind: ResourceKind, namespace: str, obj: Json) -> None:
        """Raise 403 for a pod that the PodSecurity level of its namespace forbids."""
        if (kind.group, kind.kind) != ("", "Pod"):
            return
        labels = read_labels(
            self.store.find_object(NAMESPACES, ("", namespace)) or {"metadata": {}}
        )
        if why := find_violation(labels, obj.get("spec") or {}):
            raise forbidden_error(kind.group, kind.plural, obj["metadata"].get("name", ""), why)


def check_resource_version(kind: ResourceKind, body: Json) -> None:
    """Raise 422 for a PUT without a resourceVersion to a kind that requires one."""
    if kind.can_update_unconditionally or (body.get("metadata") or {}).get("resourceVersion"):
        return
    message = "Invalid value: 0x0: must be specified for an update"
    cause = StatusCause("FieldValueInvalid", message, "metadata.resourceVersion")
    raise invalid_error(
        kind.group, kind.kind, (body.get("metadata") or {}).get("name", ""), [cause]
    )


def _check_unknown_fields(kind: ResourceKind, obj: Json, write: WriteContext) -> None:
    """Raise 400 for unknown fields, when the request has ``fieldValidation=Strict``."""
    if not write.is_strict or not kind.is_custom:
        return
    unknown = [
        f'unknown field "{path}"'
        for path in structural_schema.find_unknown_fields(dict(kind.schema), obj)
    ]
    if unknown:
        raise bad_request_error(f"strict decoding error: {', '.join(unknown)}")


def _check_typed_fields(kind: ResourceKind, namespace: str, name: str, intent: Json) -> None:
    """Raise 500 for an apply with unknown fields, which other writes drop."""
    if not kind.is_custom:
        return
    paths = list(structural_schema.find_unknown_fields(dict(kind.schema), intent))
    if paths:
        raise untyped_patch_error(kind.api_version, kind.kind, f"{namespace}/{name}", paths)


def convert_version(kind: ResourceKind, obj: Json) -> Json:
    """Return a stored object in the requested API version."""
    if obj["apiVersion"] == kind.api_version:
        return obj
    return obj | {"apiVersion": kind.api_version}


def is_awaiting_removal(kind: ResourceKind, obj: Json) -> bool:
    """Return whether a deleted object without finalizers still waits for its end."""
    if kind.storage == NAMESPACES:
        return bool((obj.get("spec") or {}).get("finalizers"))
    return bool(obj["metadata"].get("deletionGracePeriodSeconds"))


def _drop_status(kind: ResourceKind, obj: Json) -> Json:
    if "status" not in kind.subresources:
        return obj
    return {name: value for name, value in obj.items() if name != "status"}


def _select_intent(kind: ResourceKind, intent: Json, part: str) -> Json:
    """Return the part of an applied document that its endpoint evaluates."""
    if part == "status":
        kept = ("apiVersion", "kind", "metadata", "status")
        intent = {name: value for name, value in intent.items() if name in kept}
        if kind.is_custom:
            named = ("name", "namespace", "uid", "resourceVersion")
            metadata = intent["metadata"]
            intent["metadata"] = {name: metadata[name] for name in named if name in metadata}
        return intent
    return _drop_status(kind, intent)


def _replace_status(kind: ResourceKind, old: Json, new: Json) -> Json:
    """Return the object after a write to its status subresource.

    Of custom resources only the status changes. Built-in kinds also take labels and annotations,
    which kubelets rely on.
    """
    changed = {name: value for name, value in old.items() if name != "status"}
    if "status" in new:
        changed["status"] = new["status"]
    if kind.is_custom:
        given = {name: new["metadata"].get(name) for name in ("uid", "resourceVersion")}
        changed["metadata"] = old["metadata"] | {k: v for k, v in given.items() if v}
    else:
        changed["metadata"] = new["metadata"]
    return changed


def _restore_status(old: Json, new: Json) -> Json:
    kept = {name: value for name, value in new.items() if name != "status"}
    return kept | ({"status": old["status"]} if "status" in old else {})


def _select_counted_fields(kind: ResourceKind, obj: Json) -> Json:
    """Return the part of an object whose changes ``metadata.generation`` counts."""
    out = {"metadata", "apiVersion", "kind"}
    if "status" in kind.subresources:
        out.add("status")
    return {name: value for name, value in obj.items() if name not in out}
