"""Objects, resource versions, the history that watches read, and snapshots of it all.

One counter numbers every change of every kind, as etcd's revision does. Single-threaded: all
calls come from the server's event loop.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from treenail_lab.apiserver.errors import bad_request_error, expired_error
from treenail_lab.apiserver.objects import Json, ObjectKey, read_key
from treenail_lab.apiserver.schema.kinds import StorageKey

StoreEventType = Literal["ADDED", "MODIFIED", "DELETED"]


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """A change: ``object`` after it (when deleted: its last state), ``previous`` before it."""

    type: StoreEventType
    version: int
    object: Json
    previous: Json | None


@dataclass(slots=True)
class _KindShelf:
    """All objects of one kind and their latest changes."""

    objects: dict[ObjectKey, Json] = field(default_factory=dict)
    events: list[StoreEvent] = field(default_factory=list)
    dropped: int = 0
    waiters: dict[asyncio.Event, None] = field(default_factory=dict)
    """In the order in which they began to wait, so that a simulation can be repeated."""


class Store:
    """The state of the cluster, in memory, with the last ``history`` changes of each kind."""

    def __init__(self, *, history: int = 4_000, version: int = 1_000) -> None:
        self.version = version
        self._history = history
        self._oldest = version
        self._shelves: dict[StorageKey, _KindShelf] = {}
        self._listeners: list[Callable[[StorageKey, StoreEvent], None]] = []

    def find_object(self, storage: StorageKey, where: ObjectKey) -> Json | None:
        return self._open_shelf(storage).objects.get(where)

    def list_objects(self, storage: StorageKey, namespace: str = "") -> Sequence[Json]:
        """Return all objects of a kind, or those of one namespace, in the order of their keys."""
        objects = self._open_shelf(storage).objects
        return [objects[k] for k in sorted(objects) if not namespace or k[0] == namespace]

    def list_storages(self) -> Sequence[StorageKey]:
        """Return the kinds that have objects."""
        return [storage for storage, shelf in self._shelves.items() if shelf.objects]

    def put_object(self, storage: StorageKey, obj: Json) -> Json:
        """Store an object; return it with its new resource version."""
        shelf = self._open_shelf(storage)
        where = read_key(obj)
        previous = shelf.objects.get(where)
        kept = self._stamp_version(obj)
        shelf.objects[where] = kept
        self._record_event(storage, "MODIFIED" if previous else "ADDED", kept, previous)
        return kept

    def remove_object(self, storage: StorageKey, where: ObjectKey) -> Json:
        """Remove an object; return it with the resource version of its deletion."""
        previous = self._open_shelf(storage).objects.pop(where)
        gone = self._stamp_version(previous)
        self._record_event(storage, "DELETED", gone, previous)
        return gone

    def read_events(self, storage: StorageKey, version: int) -> Sequence[StoreEvent]:
        """Return the changes after a version, oldest first; raise 410 when some were dropped."""
        shelf = self._open_shelf(storage)
        if version < shelf.dropped:
            raise expired_error(version, shelf.dropped)
        return shelf.events[bisect_right(shelf.events, version, key=lambda event: event.version) :]

    def read_at(self, storage: StorageKey, version: int) -> dict[ObjectKey, Json]:
        """Return the objects of a kind at a version; raise 410 when its changes were dropped."""
        objects = dict(self._open_shelf(storage).objects)
        for event in reversed(self.read_events(storage, version)):
            if event.previous is None:
                del objects[read_key(event.object)]
            else:
                objects[read_key(event.previous)] = event.previous
        return objects

    def check_version(self, version: int) -> None:
        """Raise 410 for a version older than the last `expire_versions`."""
        if version < self._oldest:
            raise expired_error(version, self._oldest)

    def expire_versions(self) -> None:
        """Compact the history: older versions than the current one are refused."""
        self._oldest = self.version

    def add_listener(self, listener: Callable[[StorageKey, StoreEvent], None]) -> None:
        """Call the listener after every change, within the call that makes the change."""
        self._listeners.append(listener)

    def open_waiter(self, storage: StorageKey) -> "ChangeWaiter":
        """Return a context in which one can wait for changes of a kind."""
        return ChangeWaiter(self._open_shelf(storage).waiters)

    def dump_objects(self) -> Iterator[tuple[StorageKey, Sequence[Json]]]:
        """Yield every kind with its objects."""
        for storage in self.list_storages():
            yield storage, self.list_objects(storage)

    def load_objects(self, version: int, objects: Iterator[tuple[StorageKey, Json]]) -> None:
        """Replace all objects by objects with versions; open watches end with 410."""
        for shelf in self._shelves.values():
            shelf.objects.clear()
            shelf.events.clear()
            shelf.dropped = version
        for storage, obj in objects:
            self._open_shelf(storage).objects[read_key(obj)] = obj
        self.version = version
        self._oldest = version
        for shelf in self._shelves.values():
            shelf.dropped = version
            _notify_waiters(shelf.waiters)

    def _open_shelf(self, storage: StorageKey) -> _KindShelf:
        return self._shelves.setdefault(storage, _KindShelf())

    def _stamp_version(self, obj: Json) -> Json:
        self.version += 1
        return obj | {"metadata": obj["metadata"] | {"resourceVersion": str(self.version)}}

    def _record_event(
        self, storage: StorageKey, kind: StoreEventType, obj: Json, previous: Json | None
    ) -> None:
        event = StoreEvent(kind, self.version, obj, previous)
        shelf = self._open_shelf(storage)
        shelf.events.append(event)
        # In large pieces, because removing from the front of a list copies the rest.
        if len(shelf.events) > 2 * self._history:
            shelf.dropped = shelf.events[-self._history - 1].version
            del shelf.events[: -self._history]
        _notify_waiters(shelf.waiters)
        for listener in self._listeners:
            listener(storage, event)


class ChangeWaiter:
    """Wakes its owner when a kind changes, or when `wakeup` is set."""

    def __init__(self, waiters: dict[asyncio.Event, None]) -> None:
        self.wakeup = asyncio.Event()
        self._waiters = waiters

    def __enter__(self) -> "ChangeWaiter":
        self._waiters[self.wakeup] = None
        return self

    def __exit__(self, *_: object) -> None:
        self._waiters.pop(self.wakeup, None)

    async def wait(self, timeout_s: float) -> None:
        """Return at the next change since the last call, or after ``timeout_s``."""
        try:
            await asyncio.wait_for(self.wakeup.wait(), max(timeout_s, 0.0))
        except TimeoutError:
            return
        self.wakeup.clear()


def _notify_waiters(waiters: Iterable[asyncio.Event]) -> None:
    for wakeup in waiters:
        wakeup.set()


_FORMAT = 1


def take_snapshot(store: Store) -> Json:
    """Return all objects of all kinds, including secrets, and the resource version."""
    kinds = [
        {"group": storage[0], "plural": storage[1], "objects": list(objects)}
        for storage, objects in store.dump_objects()
    ]
    return {"format": _FORMAT, "resourceVersion": store.version, "kinds": kinds}


def restore_snapshot(store: Store, document: Json) -> None:
    """Replace the state of a store; raise 400 for a document that is no snapshot."""
    try:
        if document["format"] != _FORMAT:
            raise bad_request_error(f"snapshot: expected format {_FORMAT}")
        version = int(document["resourceVersion"])
        objects = list(_parse_objects(document))
    except (KeyError, TypeError, ValueError) as error:
        raise bad_request_error(f"snapshot: {error!r}") from None
    # The version must grow in any case: that ends the open watches.
    store.load_objects(max(version, store.version) + 1, iter(objects))


def _parse_objects(document: Json) -> Iterator[tuple[StorageKey, Json]]:
    for kind in document["kinds"]:
        for obj in kind["objects"]:
            read_key(obj)
            yield (kind["group"], kind["plural"]), obj
