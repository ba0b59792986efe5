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
from treenail.kube.watch import Scope, Watch

T = TypeVar("T")

Keep = Callable[[Json], T | None]
"""From an object to what of it is kept; None if nothing is, as if it did not exist."""

Indexer = Callable[[T], Iterable[str]]
"""The words an object is to be found by."""

OnMove = Callable[[str, T | None, T | None], None]
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
        scope: Scope,
        clock: Clock,
        keep: Keep[T],
        *,
        indexers: Mapping[str, Indexer[T]] = MappingProxyType({}),
        on_lost: Callable[[ClusterError], None] = lambda _: None,
        jitter: Random = random.random,
    ) -> None:
        self._keep = keep
        self._indexers = dict(indexers)
        self._lock = threading.Lock()
        self._synced = threading.Event()
        self._kept: dict[str, T] = {}
        self._indexes: dict[str, dict[str, set[str]]] = {name: {} for name in indexers}
        self._listeners: list[OnMove[T]] = []
        self._watch = Watch(
            client,
            scope,
            clock,
            on_change=self._change,
            on_connected=self._synced.set,
            on_lost=on_lost,
            jitter=jitter,
        )

    def tell(self, on_move: OnMove[T]) -> None:
        """Call it for every change; to be added before ``start``."""
        self._listeners.append(on_move)

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
            return self._kept.get(key)

    def all(self) -> Mapping[str, T]:
        """Everything that is kept, as of now, by key."""
        with self._lock:
            return dict(self._kept)

    def by_index(self, index: str, word: str) -> Mapping[str, T]:
        """What the indexer named ``index`` files under ``word``, by key."""
        with self._lock:
            keys = self._indexes[index].get(word, set())
            return {key: self._kept[key] for key in sorted(keys)}

    def _change(self, key: str, found: Json | None) -> None:
        after = None if found is None else self._keep(found)
        with self._lock:
            before = self._kept.pop(key, None)
            if before is not None:
                self._file(key, before, away=True)
            if after is not None:
                self._kept[key] = after
                self._file(key, after, away=False)
        if before is not None or after is not None:
            for on_move in self._listeners:
                on_move(key, before, after)

    def _file(self, key: str, kept: T, *, away: bool) -> None:
        for name, indexer in self._indexers.items():
            index = self._indexes[name]
            for word in set(indexer(kept)):
                if away:
                    index[word].discard(key)
                    if not index[word]:
                        del index[word]
                else:
                    index.setdefault(word, set()).add(key)


def trimmed(found: Json) -> Json:
    """The object without what only the API server needs, which is often half of it."""
    metadata = found.get("metadata")
    if isinstance(metadata, dict):
        metadata.pop("managedFields", None)
        annotations = metadata.get("annotations")
        if isinstance(annotations, dict):
            annotations.pop("kubectl.kubernetes.io/last-applied-configuration", None)
    return found
