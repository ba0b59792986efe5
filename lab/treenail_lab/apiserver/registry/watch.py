"""Watches: the changes of a kind as a client sees them through its selectors."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from treenail.clock import Clock
from treenail_lab.apiserver.errors import ApiError
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.schema.kinds import Kind
from treenail_lab.apiserver.schema.selectors import Predicate
from treenail_lab.apiserver.storage.store import Event, Store, Waiter

# The real server sends a bookmark about once a minute, and one shortly before a watch ends.
BOOKMARK_S = 60.0
LAST_BOOKMARK_S = 2.0
INITIAL_EVENTS_END = "k8s.io/initial-events-end"


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What a client asks for; ``version`` None means: begin with what there is now."""

    matches: Predicate
    version: int | None
    timeout_s: float
    bookmarks: bool = False
    initial_events: bool = False


@dataclass(slots=True)
class OpenWatch:
    """A watch that somebody may cut."""

    kind: Kind
    user: str
    waiter: Waiter
    cut: bool = False

    def end(self) -> None:
        self.cut = True
        self.waiter.bell.set()


@dataclass(slots=True)
class Watches:
    """All open watches."""

    store: Store
    clock: Clock
    _watches: dict[int, OpenWatch] = field(default_factory=dict)

    def cut(self, plural: str = "", user: str = "") -> int:
        """End watches without a word; how many there were. Empty matches all."""
        cut = [
            watch
            for watch in self._watches.values()
            if plural in {"", watch.kind.plural} and user in {"", watch.user}
        ]
        for watch in cut:
            watch.end()
        return len(cut)

    def counts(self) -> dict[str, int]:
        """How many watches are open, by plural."""
        plurals = [watch.kind.plural for watch in self._watches.values()]
        return {plural: plurals.count(plural) for plural in sorted(set(plurals))}

    @contextmanager
    def open(self, kind: Kind, user: str) -> Iterator[OpenWatch]:
        """A watch that counts and can be cut from now on."""
        with self.store.waiter(kind.storage) as waiter:
            watch = OpenWatch(kind, user, waiter)
            self._watches[id(watch)] = watch
            try:
                yield watch
            finally:
                del self._watches[id(watch)]

    async def events(self, watch: OpenWatch, options: WatchOptions) -> AsyncIterator[Json]:
        """Watch events as documents, until the time is over, the watch is cut, or 410."""
        try:
            async for event in self._stream(watch, options):
                yield event
        except ApiError as error:
            yield {"type": "ERROR", "object": error.status()}

    async def _stream(self, watch: OpenWatch, options: WatchOptions) -> AsyncIterator[Json]:
        kind = watch.kind
        end = self.clock.monotonic() + options.timeout_s
        seen = options.version
        if seen is None:
            seen = self.store.version
            for obj in self.store.list(kind.storage):
                if options.matches(obj):
                    yield {"type": "ADDED", "object": obj}
            if options.initial_events:
                yield _bookmark(kind, seen, {INITIAL_EVENTS_END: "true"})
        else:
            self.store.check_version(seen)
        due = self._next_bookmark(end)
        while not watch.cut:
            events = self.store.since(kind.storage, seen)
            # Everything up to now is seen, also when it was about other kinds.
            seen = max(seen, self.store.version)
            for event in events:
                for change in _seen_through(event, options.matches):
                    yield change
            now = self.clock.monotonic()
            if now >= end:
                return
            if options.bookmarks and now >= due:
                yield _bookmark(kind, seen, {})
                due = self._next_bookmark(end)
            limit = min(end, due) if options.bookmarks else end
            await watch.waiter.wait(limit - now)

    def _next_bookmark(self, end: float) -> float:
        now = self.clock.monotonic()
        last = end - LAST_BOOKMARK_S
        return min(now + BOOKMARK_S, last) if last > now else now + BOOKMARK_S


def _seen_through(event: Event, matches: Predicate) -> Iterator[Json]:
    """A change as seen through a selector: what comes into view is added, what leaves deleted."""
    is_seen = event.type != "DELETED" and matches(event.object)
    was_seen = event.previous is not None and matches(event.previous)
    if is_seen:
        yield {"type": "MODIFIED" if was_seen else "ADDED", "object": event.object}
    elif was_seen and event.previous is not None:
        version = {"resourceVersion": str(event.version)}
        gone = event.previous | {"metadata": event.previous["metadata"] | version}
        yield {"type": "DELETED", "object": gone}


def _bookmark(kind: Kind, version: int, annotations: dict[str, str]) -> Json:
    metadata: Json = {"resourceVersion": str(version), "creationTimestamp": None}
    if annotations:
        metadata["annotations"] = annotations
    obj = {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": metadata}
    return {"type": "BOOKMARK", "object": obj}
