"""Garbage collection: dependents go with their owners, contents with their namespace."""

from collections import defaultdict

from treenail_lab.apiserver.access.authentication import MASTERS, User
from treenail_lab.apiserver.objects import Json, Key, deleting, finalizers, key, owners, uid
from treenail_lab.apiserver.registry.deletion import FOREGROUND, ORPHAN, DeleteOptions, delete
from treenail_lab.apiserver.registry.registry import NAMESPACES, Registry, Write
from treenail_lab.apiserver.schema.kinds import Kind, Storage
from treenail_lab.apiserver.storage.store import Event

Place = tuple[Storage, Key]
_ACCOUNTS: Storage = ("", "serviceaccounts")
_WRITE = Write(User("system:serviceaccount:kube-system:generic-garbage-collector", (MASTERS,)),
               "kube-controller-manager")  # fmt: skip


class Collector:
    """Follows owner references; told of every change by :meth:`note`, acts in :meth:`sync`."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._dependents: dict[str, set[Place]] = defaultdict(set)
        # A dict for its order: what is looked at first is what changed first.
        self._dirty: dict[Place, None] = {}

    def note(self, storage: Storage, event: Event) -> bool:
        """Remember what a change may be the reason to look at; whether there is anything."""
        obj, place = event.object, (storage, key(event.object))
        if event.previous is not None:
            for owner in owners(event.previous):
                self._dependents[owner["uid"]].discard(place)
        if event.type == "DELETED":
            self._dirty.update(dict.fromkeys(sorted(self._dependents.pop(uid(obj), ()))))
            self._note_waiting(obj)
            return bool(self._dirty)
        for owner in owners(obj):
            self._dependents[owner["uid"]].add(place)
        is_new = event.previous is None
        if (
            deleting(obj)
            or (is_new and (owners(obj) or storage == NAMESPACES))
            or (event.previous is not None and owners(obj) != owners(event.previous))
        ):
            self._dirty[place] = None
        return bool(self._dirty)

    def _note_waiting(self, gone: Json) -> None:
        """Owners and the namespace may wait for the end of an object."""
        namespace = gone["metadata"].get("namespace", "")
        if namespace:
            self._dirty[NAMESPACES, ("", namespace)] = None
        for owner in owners(gone):
            kind = self._registry.kinds.of(owner["apiVersion"], owner["kind"])
            if kind is not None:
                where = namespace if kind.namespaced else "", owner["name"]
                self._dirty[kind.storage, where] = None

    def reload(self) -> None:
        """Forget everything and look at all objects, after the store was loaded."""
        self._dependents.clear()
        self._dirty.clear()
        for storage, objects in self._registry.store.dump():
            for obj in objects:
                for owner in owners(obj):
                    self._dependents[owner["uid"]].add((storage, key(obj)))
                self._dirty[storage, key(obj)] = None

    def sync(self) -> None:
        """Do what is to be done; changes made here are noted and looked at in the same call."""
        while self._dirty:
            place = next(iter(self._dirty))
            del self._dirty[place]
            storage, where = place
            obj = self._registry.store.get(storage, where)
            kind = self._registry.kinds.of_storage(storage)
            if obj is not None and kind is not None:
                self._look_at(kind, obj)

    def _look_at(self, kind: Kind, obj: Json) -> None:
        if kind.storage == NAMESPACES:
            self._sync_namespace(kind, obj)
        elif deleting(obj) and ORPHAN in finalizers(obj):
            for dependent_kind, dependent in self._dependents_of(obj):
                self._drop_references(dependent_kind, dependent, {uid(obj)})
            self._drop_finalizer(kind, obj, ORPHAN)
        elif deleting(obj) and FOREGROUND in finalizers(obj):
            self._delete_in_foreground(kind, obj)
        elif owners(obj) and not deleting(obj):
            self._delete_if_abandoned(kind, obj)

    def _delete_in_foreground(self, kind: Kind, obj: Json) -> None:
        for dependent_kind, dependent in self._dependents_of(obj):
            if not deleting(dependent):
                self._delete(dependent_kind, dependent, "Foreground")
        if not any(_blocks(dependent, obj) for _, dependent in self._dependents_of(obj)):
            self._drop_finalizer(kind, obj, FOREGROUND)

    def _delete_if_abandoned(self, kind: Kind, obj: Json) -> None:
        missing = {owner["uid"] for owner in owners(obj) if not self._exists(owner, obj)}
        if len(missing) == len({owner["uid"] for owner in owners(obj)}):
            self._delete(kind, obj, "Background")
        elif missing:
            self._drop_references(kind, obj, missing)

    def _exists(self, owner: Json, dependent: Json) -> bool:
        kind = self._registry.kinds.of(owner["apiVersion"], owner["kind"])
        if kind is None:
            return True
        namespace = dependent["metadata"].get("namespace", "") if kind.namespaced else ""
        found = self._registry.store.get(kind.storage, (namespace, owner["name"]))
        return found is not None and uid(found) == owner["uid"]

    def _dependents_of(self, obj: Json) -> list[tuple[Kind, Json]]:
        found = []
        for storage, where in sorted(self._dependents.get(uid(obj), ())):
            kind = self._registry.kinds.of_storage(storage)
            dependent = self._registry.store.get(storage, where)
            if kind is not None and dependent is not None:
                found.append((kind, dependent))
        return found

    def _sync_namespace(self, kind: Kind, namespace: Json) -> None:
        name = namespace["metadata"]["name"]
        if not deleting(namespace):
            if self._registry.store.get(_ACCOUNTS, (name, "default")) is None:
                accounts = self._registry.kinds.find("", "v1", "serviceaccounts")
                self._registry.create(accounts, name, {"metadata": {"name": "default"}}, _WRITE)
            return
        for content_kind, obj in self._contents(name):
            if not deleting(obj):
                self._delete(content_kind, obj, "Background")
        if not self._contents(name):
            self._registry.update(
                kind, "", name, lambda old: old | {"spec": {"finalizers": []}}, _WRITE
            )

    def _contents(self, namespace: str) -> list[tuple[Kind, Json]]:
        return [
            (kind, obj)
            for storage in self._registry.store.storages()
            if (kind := self._registry.kinds.of_storage(storage)) is not None and kind.namespaced
            for obj in self._registry.store.list(storage, namespace)
        ]

    def _delete(self, kind: Kind, obj: Json, policy: str) -> None:
        namespace, name = key(obj)
        options = DeleteOptions(policy=policy, uid=uid(obj))
        delete(self._registry, kind, namespace, name, options, _WRITE.user)

    def _drop_finalizer(self, kind: Kind, obj: Json, finalizer: str) -> None:
        left = [name for name in finalizers(obj) if name != finalizer]
        self._set_metadata(kind, obj, {"finalizers": left})

    def _drop_references(self, kind: Kind, obj: Json, uids: set[str]) -> None:
        left = [owner for owner in owners(obj) if owner["uid"] not in uids]
        self._set_metadata(kind, obj, {"ownerReferences": left})

    def _set_metadata(self, kind: Kind, obj: Json, fields: Json) -> None:
        namespace, name = key(obj)
        self._registry.update(
            kind,
            namespace,
            name,
            lambda old: old | {"metadata": old["metadata"] | fields},
            _WRITE,
        )


def _blocks(dependent: Json, owner: Json) -> bool:
    return any(
        reference["uid"] == uid(owner) and reference.get("blockOwnerDeletion")
        for reference in owners(dependent)
    )
