"""Objects, resource versions and the history that watches read.

One counter numbers every change of every kind, as etcd's revision does. Single-threaded: all
calls come from the server's event loop.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from treenail_lab.apiserver.errors import expired
from treenail_lab.apiserver.objects import Json, Key, key
from treenail_lab.apiserver.schema.kinds import Storage

EventType = Literal["ADDED", "MODIFIED", "DELETED"]


@dataclass(frozen=True, slots=True)
class Event:
    """A change: ``object`` after it (for DELETED: as it went), ``previous`` before it."""

    type: EventType
    version: int
    object: Json
    previous: Json | None


@dataclass(slots=True)
class _Shelf:
    """All objects of one kind and their latest changes."""

    objects: dict[Key, Json] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    dropped: int = 0
    waiters: set[asyncio.Event] = field(default_factory=set)


class Store:
    """The state of the cluster, in memory; ``history`` changes of each kind are remembered."""

    def __init__(self, *, history: int = 4_000, version: int = 1_000) -> None:
        self.version = version
        self._history = history
        self._oldest = version
        self._shelves: dict[Storage, _Shelf] = {}
        self._listeners: list[Callable[[Storage, Event], None]] = []

    def get(self, storage: Storage, where: Key) -> Json | None:
        return self._shelf(storage).objects.get(where)

    def list(self, storage: Storage, namespace: str = "") -> Sequence[Json]:
        """All objects of a kind, or those of one namespace, in the order of their keys."""
        objects = self._shelf(storage).objects
        return [objects[k] for k in sorted(objects) if not namespace or k[0] == namespace]

    def storages(self) -> Sequence[Storage]:
        """The kinds of which there is an object."""
        return [storage for storage, shelf in self._shelves.items() if shelf.objects]

    def put(self, storage: Storage, obj: Json) -> Json:
        """Keep an object under a new resource version, which is stamped on what is returned."""
        shelf = self._shelf(storage)
        where = key(obj)
        previous = shelf.objects.get(where)
        kept = self._stamped(obj)
        shelf.objects[where] = kept
        self._record(storage, "MODIFIED" if previous else "ADDED", kept, previous)
        return kept

    def remove(self, storage: Storage, where: Key) -> Json:
        """Forget an object; what is returned carries the resource version of its deletion."""
        previous = self._shelf(storage).objects.pop(where)
        gone = self._stamped(previous)
        self._record(storage, "DELETED", gone, previous)
        return gone

    def since(self, storage: Storage, version: int) -> Sequence[Event]:
        """The changes after a version, oldest first; raises 410 when some are forgotten."""
        shelf = self._shelf(storage)
        if version < shelf.dropped:
            raise expired(version, shelf.dropped)
        return shelf.events[bisect_right(shelf.events, version, key=lambda event: event.version) :]

    def at(self, storage: Storage, version: int) -> dict[Key, Json]:
        """All objects of a kind as they were at a version; raises 410 when that is forgotten."""
        objects = dict(self._shelf(storage).objects)
        for event in reversed(self.since(storage, version)):
            if event.previous is None:
                del objects[key(event.object)]
            else:
                objects[key(event.previous)] = event.previous
        return objects

    def check_version(self, version: int) -> None:
        """Raise 410 for a version from before :meth:`expire`."""
        if version < self._oldest:
            raise expired(version, self._oldest)

    def expire(self) -> None:
        """Compact: nobody may start from a version older than the present one."""
        self._oldest = self.version

    def listen(self, listener: Callable[[Storage, Event], None]) -> None:
        """Call back after every change, within the call that makes it."""
        self._listeners.append(listener)

    def waiter(self, storage: Storage) -> "Waiter":
        """A context in which one can wait for changes of a kind."""
        return Waiter(self._shelf(storage).waiters)

    def dump(self) -> Iterator[tuple[Storage, Sequence[Json]]]:
        """Every kind with its objects."""
        for storage in self.storages():
            yield storage, self.list(storage)

    def load(self, version: int, objects: Iterator[tuple[Storage, Json]]) -> None:
        """Replace everything by objects that carry their versions; open watches end with 410."""
        for shelf in self._shelves.values():
            shelf.objects.clear()
            shelf.events.clear()
            shelf.dropped = version
        for storage, obj in objects:
            self._shelf(storage).objects[key(obj)] = obj
        self.version = version
        self._oldest = version
        for shelf in self._shelves.values():
            shelf.dropped = version
            _ring(shelf.waiters)

    def _shelf(self, storage: Storage) -> _Shelf:
        return self._shelves.setdefault(storage, _Shelf())

    def _stamped(self, obj: Json) -> Json:
        self.version += 1
        return obj | {"metadata": obj["metadata"] | {"resourceVersion": str(self.version)}}

    def _record(self, storage: Storage, kind: EventType, obj: Json, previous: Json | None) -> None:
        event = Event(kind, self.version, obj, previous)
        shelf = self._shelf(storage)
        shelf.events.append(event)
        # Cut in large pieces, because removing from the front of a list copies all of it.
        if len(shelf.events) > 2 * self._history:
            shelf.dropped = shelf.events[-self._history - 1].version
            del shelf.events[: -self._history]
        _ring(shelf.waiters)
        for listener in self._listeners:
            listener(storage, event)


class Waiter:
    """Wakes its owner when a kind changes, or when somebody else rings :attr:`bell`."""

    def __init__(self, waiters: set[asyncio.Event]) -> None:
        self.bell = asyncio.Event()
        self._waiters = waiters

    def __enter__(self) -> "Waiter":
        self._waiters.add(self.bell)
        return self

    def __exit__(self, *_: object) -> None:
        self._waiters.discard(self.bell)

    async def wait(self, timeout_s: float) -> None:
        """Return at the next change since the last call, or after so many seconds."""
        try:
            await asyncio.wait_for(self.bell.wait(), max(timeout_s, 0.0))
        except TimeoutError:
            return
        self.bell.clear()


def _ring(waiters: set[asyncio.Event]) -> None:
    for bell in waiters:
        bell.set()
