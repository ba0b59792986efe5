"""What a controller knows of one kind of object: a cache that a watch keeps current."""

import random
import threading
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

from treenail.clock import Clock
from treenail.errors import ClusterError
from treenail.kube.backoff import Random
from treenail.kube.client import Client, Json
from treenail.kube.watch import ResourceWatch, WatchScope

T = TypeVar("T")

Transform = Callable[[Json], T | None]
"""From an object to what of it is kept; None if nothing is, as if it did not exist."""

IndexFunc = Callable[[T], Iterable[str]]
"""The words an object is to be found by."""

ChangeHandler = Callable[[str, T | None, T | None], None]
"""Told the key, what was kept before and what is now; None before it came and after it went."""


class Informer(Generic[T]):
    """All objects of a scope as a controller wants them, by key and by its own indexes.

    Thread-safe. Handlers added before ``start`` are called on the watching thread for each
    change, after the cache shows it; they should only note the key. What they were told about
    an object is always followed by what they are told next: no gap, no repetition.
    """

    def __init__(
        self,
        client: Client,
        scope: WatchScope,
        clock: Clock,
        transform: Transform[T],
        *,
        indexers: Mapping[str, IndexFunc[T]] = MappingProxyType({}),
        on_lost: Callable[[ClusterError], None] = lambda _: None,
        jitter: Random = random.random,
    ) -> None:
        self._transform = transform
        self._indexers = dict(indexers)
        self._lock = threading.Lock()
        self._synced = threading.Event()
        self._objects: dict[str, T] = {}
        self._indexes: dict[str, dict[str, set[str]]] = {name: {} for name in indexers}
        self._handlers: list[ChangeHandler[T]] = []
        self._watch = ResourceWatch(
            client,
            scope,
            clock,
            on_change=self._apply_change,
            on_connected=self._synced.set,
            on_lost=on_lost,
            jitter=jitter,
        )

    def add_handler(self, handler: ChangeHandler[T]) -> None:
        """Call it for every change; to be added before ``start``."""
        self._handlers.append(handler)

    def start(self) -> None:
        """Begin to list and watch on a thread of its own."""
        self._watch.start()

    def stop(self) -> None:
        """End the watch; the cache stays as it is."""
        self._watch.stop()

    @property
    def has_synced(self) -> bool:
        """Whether everything there is has been seen once."""
        return self._synced.is_set()

    def wait_until_synced(self, limit_s: float) -> bool:
        """Wait for ``has_synced``; False if it takes longer."""
        return self._synced.wait(limit_s)

    def find(self, key: str) -> T | None:
        """What is kept under ``namespace/name``, or under a name without namespace."""
        with self._lock:
            return self._objects.get(key)

    def get_all(self) -> Mapping[str, T]:
        """Everything that is kept, as of now, by key."""
        with self._lock:
            return dict(self._objects)

    def find_by_index(self, index: str, word: str) -> Mapping[str, T]:
        """What the indexer named ``index`` files under ``word``, by key."""
        with self._lock:
            keys = self._indexes[index].get(word, set())
            return {key: self._objects[key] for key in sorted(keys)}

    def _apply_change(self, key: str, found: Json | None) -> None:
        after = None if found is None else self._transform(found)
        with self._lock:
            before = self._objects.pop(key, None)
            if before is not None:
                self._update_index(key, before, is_removed=True)
            if after is not None:
                self._objects[key] = after
                self._update_index(key, after, is_removed=False)
        if before is not None or after is not None:
            for on_move in self._handlers:
                on_move(key, before, after)

    def _update_index(self, key: str, kept: T, *, is_removed: bool) -> None:
        for name, indexer in self._indexers.items():
            index = self._indexes[name]
            for word in set(indexer(kept)):
                if is_removed:
                    index[word].discard(key)
                    if not index[word]:
                        del index[word]
                else:
                    index.setdefault(word, set()).add(key)


def trim_object(found: Json) -> Json:
    """The object without what only the API server needs, which is often half of it."""
    metadata = found.get("metadata")
    if isinstance(metadata, dict):
        metadata.pop("managedFields", None)
        annotations = metadata.get("annotations")
        if isinstance(annotations, dict):
            annotations.pop("kubectl.kubernetes.io/last-applied-configuration", None)
    return found
