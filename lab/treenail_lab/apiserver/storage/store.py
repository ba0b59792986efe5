"""Objects, resource versions and the history that watches read.

One counter numbers every change of every kind, as etcd's revision does. Single-threaded: all
calls come from the server's event loop.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from treenail_lab.apiserver.errors import expired_error
from treenail_lab.apiserver.objects import Json, ObjectKey, read_key
from treenail_lab.apiserver.schema.kinds import StorageKey

StoreEventType = Literal["ADDED", "MODIFIED", "DELETED"]


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """A change: ``object`` after it (for DELETED: as it went), ``previous`` before it."""

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
    waiters: set[asyncio.Event] = field(default_factory=set)


class Store:
    """The state of the cluster, in memory; ``history`` changes of each kind are remembered."""

    def __init__(self, *, history: int = 4_000, version: int = 1_000) -> None:
        self.version = version
        self._history = history
        self._oldest = version
        self._shelves: dict[StorageKey, _KindShelf] = {}
        self._listeners: list[Callable[[StorageKey, StoreEvent], None]] = []

    def find_object(self, storage: StorageKey, where: ObjectKey) -> Json | None:
        return self._open_shelf(storage).objects.get(where)

    def list_objects(self, storage: StorageKey, namespace: str = "") -> Sequence[Json]:
        """All objects of a kind, or those of one namespace, in the order of their keys."""
        objects = self._open_shelf(storage).objects
        return [objects[k] for k in sorted(objects) if not namespace or k[0] == namespace]

    def list_storages(self) -> Sequence[StorageKey]:
        """The kinds of which there is an object."""
        return [storage for storage, shelf in self._shelves.items() if shelf.objects]

    def put_object(self, storage: StorageKey, obj: Json) -> Json:
        """Keep an object under a new resource version, which is stamped on what is returned."""
        shelf = self._open_shelf(storage)
        where = read_key(obj)
        previous = shelf.objects.get(where)
        kept = self._stamp_version(obj)
        shelf.objects[where] = kept
        self._record_event(storage, "MODIFIED" if previous else "ADDED", kept, previous)
        return kept

    def remove_object(self, storage: StorageKey, where: ObjectKey) -> Json:
        """Forget an object; what is returned carries the resource version of its deletion."""
        previous = self._open_shelf(storage).objects.pop(where)
        gone = self._stamp_version(previous)
        self._record_event(storage, "DELETED", gone, previous)
        return gone

    def read_events(self, storage: StorageKey, version: int) -> Sequence[StoreEvent]:
        """The changes after a version, oldest first; raises 410 when some are forgotten."""
        shelf = self._open_shelf(storage)
        if version < shelf.dropped:
            raise expired_error(version, shelf.dropped)
        return shelf.events[bisect_right(shelf.events, version, key=lambda event: event.version) :]

    def read_at(self, storage: StorageKey, version: int) -> dict[ObjectKey, Json]:
        """All objects of a kind as they were at a version; raises 410 when that is forgotten."""
        objects = dict(self._open_shelf(storage).objects)
        for event in reversed(self.read_events(storage, version)):
            if event.previous is None:
                del objects[read_key(event.object)]
            else:
                objects[read_key(event.previous)] = event.previous
        return objects

    def check_version(self, version: int) -> None:
        """Raise 410 for a version from before :meth:`expire_versions`."""
        if version < self._oldest:
            raise expired_error(version, self._oldest)

    def expire_versions(self) -> None:
        """Compact: nobody may start from a version older than the present one."""
        self._oldest = self.version

    def add_listener(self, listener: Callable[[StorageKey, StoreEvent], None]) -> None:
        """Call back after every change, within the call that makes it."""
        self._listeners.append(listener)

    def open_waiter(self, storage: StorageKey) -> "ChangeWaiter":
        """A context in which one can wait for changes of a kind."""
        return ChangeWaiter(self._open_shelf(storage).waiters)

    def dump_objects(self) -> Iterator[tuple[StorageKey, Sequence[Json]]]:
        """Every kind with its objects."""
        for storage in self.list_storages():
            yield storage, self.list_objects(storage)

    def load_objects(self, version: int, objects: Iterator[tuple[StorageKey, Json]]) -> None:
        """Replace everything by objects that carry their versions; open watches end with 410."""
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
        # Cut in large pieces, because removing from the front of a list copies all of it.
        if len(shelf.events) > 2 * self._history:
            shelf.dropped = shelf.events[-self._history - 1].version
            del shelf.events[: -self._history]
        _notify_waiters(shelf.waiters)
        for listener in self._listeners:
            listener(storage, event)


class ChangeWaiter:
    """Wakes its owner when a kind changes, or when somebody else rings :attr:`wakeup`."""

    def __init__(self, waiters: set[asyncio.Event]) -> None:
        self.wakeup = asyncio.Event()
        self._waiters = waiters

    def __enter__(self) -> "ChangeWaiter":
        self._waiters.add(self.wakeup)
        return self

    def __exit__(self, *_: object) -> None:
        self._waiters.discard(self.wakeup)

    async def wait(self, timeout_s: float) -> None:
        """Return at the next change since the last call, or after so many seconds."""
        try:
            await asyncio.wait_for(self.wakeup.wait(), max(timeout_s, 0.0))
        except TimeoutError:
            return
        self.wakeup.clear()


def _notify_waiters(waiters: set[asyncio.Event]) -> None:
    for bell in waiters:
        bell.set()
