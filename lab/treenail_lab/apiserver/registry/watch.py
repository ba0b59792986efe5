"""Watches: the changes of a kind as a client sees them through its selectors."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from treenail.clock import Clock
from treenail_lab.apiserver.errors import ApiError
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.schema.kinds import ResourceKind
from treenail_lab.apiserver.schema.selectors import ObjectPredicate
from treenail_lab.apiserver.storage.store import ChangeWaiter, Store, StoreEvent

# The real server sends a bookmark about once a minute, and one shortly before a watch ends.
BOOKMARK_S = 60.0
LAST_BOOKMARK_S = 2.0
INITIAL_EVENTS_END = "k8s.io/initial-events-end"


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What a client asks for; ``version`` None means: begin with what there is now."""

    matches: ObjectPredicate
    version: int | None
    timeout_s: float
    should_send_bookmarks: bool = False
    should_send_initial_events: bool = False


@dataclass(slots=True)
class OpenWatch:
    """A watch that somebody may cut."""

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
        """End watches without a word; how many there were. Empty matches all."""
        cut = [
            watch
            for watch in self._watches.values()
            if plural in {"", watch.kind.plural} and user in {"", watch.user}
        ]
        for watch in cut:
            watch.end()
        return len(cut)

    def count_watches(self) -> dict[str, int]:
        """How many watches are open, by plural."""
        plurals = [watch.kind.plural for watch in self._watches.values()]
        return {plural: plurals.count(plural) for plural in sorted(set(plurals))}

    @contextmanager
    def open_watch(self, kind: ResourceKind, user: str) -> Iterator[OpenWatch]:
        """A watch that counts and can be cut from now on."""
        with self.store.open_waiter(kind.storage) as waiter:
            watch = OpenWatch(kind, user, waiter)
            self._watches[id(watch)] = watch
            try:
                yield watch
            finally:
                del self._watches[id(watch)]

    async def stream_events(self, watch: OpenWatch, options: WatchOptions) -> AsyncIterator[Json]:
        """Watch events as documents, until the time is over, the watch is cut, or 410."""
        try:
            async for event in self._stream_changes(watch, options):
                yield event
        except ApiError as error:
            yield {"type": "ERROR", "object": error.to_status()}

    async def _stream_changes(self, watch: OpenWatch, options: WatchOptions) -> AsyncIterator[Json]:
        kind = watch.kind
        end = self.clock.monotonic() + options.timeout_s
        seen = options.version
        if seen is None:
            seen = self.store.version
            for obj in self.store.list_objects(kind.storage):
                if options.matches(obj):
                    yield {"type": "ADDED", "object": obj}
            if options.should_send_initial_events:
                yield _build_bookmark(kind, seen, {INITIAL_EVENTS_END: "true"})
        else:
            self.store.check_version(seen)
        due = self._compute_next_bookmark(end)
        while not watch.is_cut:
            events = self.store.read_events(kind.storage, seen)
            # Everything up to now is seen, also when it was about other kinds.
            seen = max(seen, self.store.version)
            for event in events:
                for change in _filter_event(event, options.matches):
                    yield change
            now = self.clock.monotonic()
            if now >= end:
                return
            if options.should_send_bookmarks and now >= due:
                yield _build_bookmark(kind, seen, {})
                due = self._compute_next_bookmark(end)
            limit = min(end, due) if options.should_send_bookmarks else end
            await watch.waiter.wait(limit - now)

    def _compute_next_bookmark(self, end: float) -> float:
        now = self.clock.monotonic()
        last = end - LAST_BOOKMARK_S
        return min(now + BOOKMARK_S, last) if last > now else now + BOOKMARK_S


def _filter_event(event: StoreEvent, matches: ObjectPredicate) -> Iterator[Json]:
    """A change as seen through a selector: what comes into view is added, what leaves deleted."""
    is_seen = event.type != "DELETED" and matches(event.object)
    was_seen = event.previous is not None and matches(event.previous)
    if is_seen:
        yield {"type": "MODIFIED" if was_seen else "ADDED", "object": event.object}
    elif was_seen and event.previous is not None:
        version = {"resourceVersion": str(event.version)}
        gone = event.previous | {"metadata": event.previous["metadata"] | version}
        yield {"type": "DELETED", "object": gone}


def _build_bookmark(kind: ResourceKind, version: int, annotations: dict[str, str]) -> Json:
    metadata: Json = {"resourceVersion": str(version), "creationTimestamp": None}
    if annotations:
        metadata["annotations"] = annotations
    obj = {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": metadata}
    return {"type": "BOOKMARK", "object": obj}
