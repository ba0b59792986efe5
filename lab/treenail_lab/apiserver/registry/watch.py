"""Watches: the changes of a kind, filtered by the selectors of a client."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from treenail.clock import Clock
from treenail_lab.apiserver.errors import ApiError
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.schema.kinds import ResourceKind
from treenail_lab.apiserver.schema.selectors import ObjectPredicate
from treenail_lab.apiserver.storage.store import ChangeWaiter, Store, StoreEvent

# kube-apiserver sends a bookmark about once a minute, and one shortly before a watch ends.
BOOKMARK_S = 60.0
LAST_BOOKMARK_S = 2.0
INITIAL_EVENTS_END = "k8s.io/initial-events-end"


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """The options of a watch; with ``version`` None it begins with the current objects."""

    matches: ObjectPredicate
    version: int | None
    timeout_s: float
    should_send_bookmarks: bool = False
    should_send_initial_events: bool = False


@dataclass(slots=True)
class OpenWatch:
    """An open watch, which can be cut."""

    kind: ResourceKind
    user: str
    waiter: ChangeWaiter
    is_cut: bool = False

    def end(self) -> None:
        self.is_cut = True
        self.waiter.wakeup.set()


@dataclass(slots=True)
class WatchTable:
    """All open watches."""

    store: Store
    clock: Clock
    _watches: dict[int, OpenWatch] = field(default_factory=dict)

    def cut_watches(self, plural: str = "", user: str = "") -> int:
        """Close watches without a final event, return how many; empty matches all."""
        cut = [
            watch
            for watch in self._watches.values()
            if plural in {"", watch.kind.plural} and user in {"", watch.user}
        ]
        for watch in cut:
            watch.end()
        return len(cut)

    def count_watches(self) -> dict[str, int]:
        """Count the open watches by plural."""
        plurals = [watch.kind.plural for watch in self._watches.values()]
        return {plural: plurals.count(plural) for plural in sorted(set(plurals))}

    @contextmanager
    def open_watch(self, kind: ResourceKind, user: str) -> Iterator[OpenWatch]:
        """Open a watch, which is counted and can be cut."""
        with self.store.open_waiter(kind.storage) as waiter:
            watch = OpenWatch(kind, user, waiter)
            self._watches[id(watch)] = watch
            try:
                yield watch
            finally:
                del self._watches[id(watch)]

    async def stream_events(self, watch: OpenWatch, options: WatchOptions) -> AsyncIterator[Json]:
        """Yield events as documents until the timeout, until the watch is cut, or until 410."""
        try:
            async for event in self._stream_changes(watch, options):
                yield event
        except ApiError as error:
            yield {"type": "ERROR", "object": error.to_status()}

    async def _stream_changes(self, watch: OpenWatch, options: WatchOptions) -> AsyncIterator[Json]:
        kind = watch.kind
        end = self.clock.monotonic() + options.timeout_s
        version = options.version
        if version is None:
            version = self.store.version
            for obj in self.store.list_objects(kind.storage):
                if options.matches(obj):
                    yield {"type": "ADDED", "object": obj}
            if options.should_send_initial_events:
                yield _build_bookmark(kind, version, {INITIAL_EVENTS_END: "true"})
        else:
            self.store.check_version(version)
        due = self._compute_next_bookmark(end)
        while not watch.is_cut:
            events = self.store.read_events(kind.storage, version)
            # Also past the versions of other kinds, for the next bookmark.
            version = max(version, self.store.version)
            for event in events:
                for change in _filter_event(event, options.matches):
                    yield change
            now = self.clock.monotonic()
            if now >= end:
                return
            if options.should_send_bookmarks and now >= due:
                yield _build_bookmark(kind, version, {})
                due = self._compute_next_bookmark(end)
            limit = min(end, due) if options.should_send_bookmarks else end
            await watch.waiter.wait(limit - now)

    def _compute_next_bookmark(self, end: float) -> float:
        now = self.clock.monotonic()
        last = end - LAST_BOOKMARK_S
        return min(now + BOOKMARK_S, last) if last > now else now + BOOKMARK_S


def _filter_event(event: StoreEvent, matches: ObjectPredicate) -> Iterator[Json]:
    """Yield a change as a selector shows it: an object that begins to match is added."""
    matches_now = event.type != "DELETED" and matches(event.object)
    matched_before = event.previous is not None and matches(event.previous)
    if matches_now:
        yield {"type": "MODIFIED" if matched_before else "ADDED", "object": event.object}
    elif matched_before and event.previous is not None:
        version = {"resourceVersion": str(event.version)}
        gone = event.previous | {"metadata": event.previous["metadata"] | version}
        yield {"type": "DELETED", "object": gone}


def _build_bookmark(kind: ResourceKind, version: int, annotations: dict[str, str]) -> Json:
    metadata: Json = {"resourceVersion": str(version), "creationTimestamp": None}
    if annotations:
        metadata["annotations"] = annotations
    obj = {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": metadata}
    return {"type": "BOOKMARK", "object": obj}
