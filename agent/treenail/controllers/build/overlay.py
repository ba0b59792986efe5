"""Own writes that a watch does not show yet."""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from treenail.api.meta import ObjectMeta
from treenail.clock import Clock

MAX_AGE_S = 10.0
"""How long an own write hides what the watch shows. A watch lags by less, or is disconnected."""


class ApiObject(Protocol):
    """A parsed API object."""

    @property
    def metadata(self) -> ObjectMeta: ...


T = TypeVar("T", bound=ApiObject)


@dataclass(frozen=True, slots=True)
class _Written(Generic[T]):
    older: frozenset[str]
    """The resourceVersions that the write replaced."""
    value: T | None
    """None after a deletion."""
    uid: str
    at: float


class OwnWrites(Generic[T]):
    """Objects of one kind as this process last wrote them. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._by_name: dict[str, _Written[T]] = {}

    def record_write(self, previous: T | None, written: T) -> None:
        """Store the object of the response to a write; ``previous`` is None after a creation."""
        meta = written.metadata
        with self._lock:
            known = self._by_name.get(meta.name)
            older = known.older if known is not None and known.uid == meta.uid else frozenset()
            if previous is not None:
                older |= {previous.metadata.resource_version}
            self._by_name[meta.name] = _Written(older, written, meta.uid, self._clock.monotonic())

    def record_deletion(self, name: str, uid: str) -> None:
        """Hide an object until the watch shows that it is gone."""
        with self._lock:
            self._by_name[name] = _Written(frozenset(), None, uid, self._clock.monotonic())

    def overlay(self, cached: Mapping[str, T]) -> dict[str, T]:
        """Return the objects with the own writes that the watch does not show yet."""
        found = dict(cached)
        with self._lock:
            for name, written in list(self._by_name.items()):
                if not self._is_news(written, found.get(name)):
                    del self._by_name[name]
                elif written.value is None:
                    found.pop(name, None)
                else:
                    found[name] = written.value
        return found

    def forget(self, names: Iterable[str]) -> None:
        """Forget the writes to these objects."""
        with self._lock:
            for name in names:
                self._by_name.pop(name, None)

    def _is_news(self, written: _Written[T], cached: T | None) -> bool:
        if self._clock.monotonic() - written.at > MAX_AGE_S:
            return False
        if written.value is None:
            return cached is not None and cached.metadata.uid == written.uid
        if cached is None:
            # Created; an object that was only changed would be in the cache.
            return not written.older
        meta = cached.metadata
        return meta.uid != written.uid or meta.resource_version in written.older
