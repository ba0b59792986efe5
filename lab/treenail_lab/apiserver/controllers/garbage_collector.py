"""Garbage collection of dependents without owners and of the contents of deleted namespaces."""

from collections import defaultdict

from treenail_lab.apiserver.access.authentication import MASTERS, ApiUser
from treenail_lab.apiserver.objects import (
    Json,
    ObjectKey,
    is_deleting,
    read_finalizers,
    read_key,
    read_owner_references,
    read_uid,
)
from treenail_lab.apiserver.registry.deletion import (
    FOREGROUND,
    ORPHAN,
    DeleteOptions,
    delete_object,
)
from treenail_lab.apiserver.registry.registry import NAMESPACES, ObjectRegistry, WriteContext
from treenail_lab.apiserver.schema.kinds import ResourceKind, StorageKey
from treenail_lab.apiserver.store import StoreEvent

ObjectPlace = tuple[StorageKey, ObjectKey]
_SERVICE_ACCOUNTS: StorageKey = ("", "serviceaccounts")
_WRITE_CONTEXT = WriteContext(
    ApiUser("system:serviceaccount:kube-system:generic-garbage-collector", (MASTERS,)),
    "kube-controller-manager",
)


class GarbageCollector:
    """Follows owner references: `note_event` records changes, `sync` acts on them."""

    def __init__(self, registry: ObjectRegistry) -> None:
        self._registry = registry
        self._dependents: dict[str, set[ObjectPlace]] = defaultdict(set)
        # A dict for its order: objects are processed in the order of their changes.
        self._dirty: dict[ObjectPlace, None] = {}

    def note_event(self, storage: StorageKey, event: StoreEvent) -> bool:
        """Record the objects that a change may affect; return whether there are any."""
        obj, place = event.object, (storage, read_key(event.object))
        if event.previous is not None:
            for owner in read_owner_references(event.previous):
                self._dependents[owner["uid"]].discard(place)
        if event.type == "DELETED":
            self._dirty.update(dict.fromkeys(sorted(self._dependents.pop(read_uid(obj), ()))))
            self._note_waiting(obj)
            return bool(self._dirty)
        for owner in read_owner_references(obj):
            self._dependents[owner["uid"]].add(place)
        is_new = event.previous is None
        if (
            is_deleting(obj)
            or (is_new and (read_owner_references(obj) or storage == NAMESPACES))
            or (
                event.previous is not None
                and read_owner_references(obj) != read_owner_references(event.previous)
            )
        ):
            self._dirty[place] = None
        return bool(self._dirty)

    def _note_waiting(self, gone: Json) -> None:
        """Record the owners and the namespace, which may wait for the object's deletion."""
        namespace = gone["metadata"].get("namespace", "")
        if namespace:
            self._dirty[NAMESPACES, ("", namespace)] = None
        for owner in read_owner_references(gone):
            kind = self._registry.kinds.find_by_name(owner["apiVersion"], owner["kind"])
            if kind is not None:
                where = namespace if kind.is_namespaced else "", owner["name"]
                self._dirty[kind.storage, where] = None

    def reload(self) -> None:
        """Start again with all objects, after the store was loaded."""
        self._dependents.clear()
        self._dirty.clear()
        for storage, objects in self._registry.store.dump_objects():
            for obj in objects:
                for owner in read_owner_references(obj):
                    self._dependents[owner["uid"]].add((storage, read_key(obj)))
                self._dirty[storage, read_key(obj)] = None

    def sync(self) -> None:
        """Process the recorded objects, and those that this processing changes."""
        while self._dirty:
            place = next(iter(self._dirty))
            del self._dirty[place]
            storage, where = place
            obj = self._registry.store.find_object(storage, where)
            kind = self._registry.kinds.find_by_storage(storage)
            if obj is not None and kind is not None:
                self._collect_object(kind, obj)

    def _collect_object(self, kind: ResourceKind, obj: Json) -> None:
        if kind.storage == NAMESPACES:
            self._sync_namespace(kind, obj)
        elif is_deleting(obj) and ORPHAN in read_finalizers(obj):
            for dependent_kind, dependent in self._find_dependents(obj):
                self._drop_references(dependent_kind, dependent, {read_uid(obj)})
            self._drop_finalizer(kind, obj, ORPHAN)
        elif is_deleting(obj) and FOREGROUND in read_finalizers(obj):
            self._delete_in_foreground(kind, obj)
        elif read_owner_references(obj) and not is_deleting(obj):
            self._delete_if_orphaned(kind, obj)

    def _delete_in_foreground(self, kind: ResourceKind, obj: Json) -> None:
        for dependent_kind, dependent in self._find_dependents(obj):
            if not is_deleting(dependent):
                self._delete_object(dependent_kind, dependent, "Foreground")
        if not any(_is_blocking(dependent, obj) for _, dependent in self._find_dependents(obj)):
            self._drop_finalizer(kind, obj, FOREGROUND)

    def _delete_if_orphaned(self, kind: ResourceKind, obj: Json) -> None:
        missing = {
            owner["uid"] for owner in read_owner_references(obj) if not self._has_owner(owner, obj)
        }
        if len(missing) == len({owner["uid"] for owner in read_owner_references(obj)}):
            self._delete_object(kind, obj, "Background")
        elif missing:
            self._drop_references(kind, obj, missing)

    def _has_owner(self, owner: Json, dependent: Json) -> bool:
        kind = self._registry.kinds.find_by_name(owner["apiVersion"], owner["kind"])
        if kind is None:
            return True
        namespace = dependent["metadata"].get("namespace", "") if kind.is_namespaced else ""
        present = self._registry.store.find_object(kind.storage, (namespace, owner["name"]))
        return present is not None and read_uid(present) == owner["uid"]

    def _find_dependents(self, obj: Json) -> list[tuple[ResourceKind, Json]]:
        dependents = []
        for storage, where in sorted(self._dependents.get(read_uid(obj), ())):
            kind = self._registry.kinds.find_by_storage(storage)
            dependent = self._registry.store.find_object(storage, where)
            if kind is not None and dependent is not None:
                dependents.append((kind, dependent))
        return dependents

    def _sync_namespace(self, kind: ResourceKind, namespace: Json) -> None:
        name = namespace["metadata"]["name"]
        if not is_deleting(namespace):
            if self._registry.store.find_object(_SERVICE_ACCOUNTS, (name, "default")) is None:
                accounts = self._registry.kinds.find_kind("", "v1", "serviceaccounts")
                self._registry.create_object(
                    accounts, name, {"metadata": {"name": "default"}}, _WRITE_CONTEXT
                )
            return
        for content_kind, obj in self._list_contents(name):
            if not is_deleting(obj):
                self._delete_object(content_kind, obj, "Background")
        if not self._list_contents(name):
            self._registry.update_object(
                kind, "", name, lambda old: old | {"spec": {"finalizers": []}}, _WRITE_CONTEXT
            )

    def _list_contents(self, namespace: str) -> list[tuple[ResourceKind, Json]]:
        return [
            (kind, obj)
            for storage in self._registry.store.list_storages()
            if (kind := self._registry.kinds.find_by_storage(storage)) is not None
            and kind.is_namespaced
            for obj in self._registry.store.list_objects(storage, namespace)
        ]

    def _delete_object(self, kind: ResourceKind, obj: Json, policy: str) -> None:
        namespace, name = read_key(obj)
        options = DeleteOptions(policy=policy, uid=read_uid(obj))
        delete_object(self._registry, kind, namespace, name, options, _WRITE_CONTEXT.user)

    def _drop_finalizer(self, kind: ResourceKind, obj: Json, finalizer: str) -> None:
        left = [name for name in read_finalizers(obj) if name != finalizer]
        self._set_metadata(kind, obj, {"finalizers": left})

    def _drop_references(self, kind: ResourceKind, obj: Json, uids: set[str]) -> None:
        left = [owner for owner in read_owner_references(obj) if owner["uid"] not in uids]
        self._set_metadata(kind, obj, {"ownerReferences": left})

    def _set_metadata(self, kind: ResourceKind, obj: Json, fields: Json) -> None:
        namespace, name = read_key(obj)
        self._registry.update_object(
            kind,
            namespace,
            name,
            lambda old: old | {"metadata": old["metadata"] | fields},
            _WRITE_CONTEXT,
        )


def _is_blocking(dependent: Json, owner: Json) -> bool:
    return any(
        reference["uid"] == read_uid(owner) and reference.get("blockOwnerDeletion")
        for reference in read_owner_references(dependent)
    )
