"""Own writes that a watch does not show yet."""

import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from treenail.api.object_meta import ObjectMeta
from treenail.clocks import Clock
from treenail.controllers.runtime.informer_set import InformerView

MAX_AGE_S = 10.0
"""How long a watch may lag behind an own write before it is listed again."""


class ApiObject(Protocol):
    """A parsed API object."""

    @property
    def metadata(self) -> ObjectMeta: ...


T = TypeVar("T", bound=ApiObject)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class _Written(Generic[T]):
    older: frozenset[str]
    """The resourceVersions that the write replaced."""
    value: T | None
    """None after a deletion."""
    uid: str
    at: float
    is_created: bool = False
    """Whether this process created the object: a watch may not show it at all."""


class OwnWrites(Generic[T]):
    """Objects of one kind as this process last wrote them. Thread-safe.

    A write counts until the watch shows a later state. A watch that shows none for `MAX_AGE_S` is
    listed again: what a list shows after that time counts, even without the write.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._by_name: dict[str, _Written[T]] = {}

    def record_write(self, previous: T | None, written: T) -> None:
        """Store the object of the response to a write; ``previous`` is None after a creation."""
        meta = written.metadata
        is_created, older = previous is None, frozenset[str]()
        with self._lock:
            known = self._by_name.get(meta.name)
            if known is not None and known.uid == meta.uid:
                is_created, older = is_created or known.is_created, known.older
            if previous is not None:
                # A write that changed nothing has the version of the object before it.
                older = (older | {previous.metadata.resource_version}) - {meta.resource_version}
            now = self._clock.monotonic()
            self._by_name[meta.name] = _Written(older, written, meta.uid, now, is_created)

    def record_deletion(self, name: str, uid: str) -> None:
        """Hide an object until the watch shows that it is gone."""
        with self._lock:
            now = self._clock.monotonic()
            self._by_name[name] = _Written(frozenset(), None, uid, now)

    def overlay(self, view: InformerView[T]) -> dict[str, T]:
        """Return the objects with the own writes that the watch does not show yet."""
        with self._lock:
            # Under the lock: a write of another thread is newer than an earlier copy of the cache.
            objects = dict(view.get_all())
            for name, written in list(self._by_name.items()):
                is_unseen = self._is_unseen(written, objects.get(name))
                if not is_unseen or _is_outdated(written.at, view, self._clock):
                    del self._by_name[name]
                elif written.value is None:
                    objects.pop(name, None)
                else:
                    objects[name] = written.value
        return objects

    def forget_writes(self) -> None:
        """Forget all writes: a restored etcd may lack them."""
        with self._lock:
            self._by_name.clear()

    def _is_unseen(self, written: _Written[T], cached: T | None) -> bool:
        """Return whether the watch does not show the write yet."""
        if written.value is None:
            if cached is None:
                # The watch may not show the creation yet, and then both.
                return self._clock.monotonic() - written.at <= MAX_AGE_S
            return cached.metadata.uid == written.uid
        if cached is None:
            # Otherwise it would be in the cache: another client deleted it.
            return written.is_created
        meta = cached.metadata
        if meta.uid != written.uid:
            # The object before it, or, if this process only changed it, the one after it.
            return written.is_created
        return meta.resource_version in written.older


class OwnDeletions:
    """UIDs of objects that this process deleted, and that a watch may still show. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._deleted_at: dict[str, float] = {}

    def record_deletion(self, uid: str) -> None:
        """Store the deletion of an object."""
        with self._lock:
            self._deleted_at[uid] = self._clock.monotonic()

    def find_hidden(self, view: InformerView[V], shown: Collection[str]) -> frozenset[str]:
        """Return the deleted UIDs; ``shown`` are those in the view."""
        now = self._clock.monotonic()
        with self._lock:
            # The watch may not show the creation of a deleted object yet.
            self._deleted_at = {
                uid: at
                for uid, at in self._deleted_at.items()
                if (uid in shown or now - at <= MAX_AGE_S)
                and not _is_outdated(at, view, self._clock)
            }
            return frozenset(self._deleted_at)


def _is_outdated(at: float, view: InformerView[V], clock: Clock) -> bool:
    """Return whether a list after the write at this time replaces it; request one that is due."""
    if clock.monotonic() - at <= MAX_AGE_S:
        return False
    if view.listed_at is not None and view.listed_at > at:
        return True
    view.request_list()
    return False
