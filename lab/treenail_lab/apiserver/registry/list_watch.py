"""Lists, complete or in pages of one resource version, and watches of the changes after them.

A watch is filtered by the selectors of its client.
"""

import base64
import json
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from treenail.clocks import Clock
from treenail_lab.apiserver.errors import (
    ApiError,
    bad_request_error,
    expired_continue_error,
    too_large_version_error,
)
from treenail_lab.apiserver.objects import Json, read_key
from treenail_lab.apiserver.registry.registry import convert_version
from treenail_lab.apiserver.request import ServerRequest
from treenail_lab.apiserver.schema.kinds import ResourceKind
from treenail_lab.apiserver.schema.selectors import (
    ObjectPredicate,
    parse_field_selector,
    parse_label_selector,
)
from treenail_lab.apiserver.store import ChangeWaiter, Store, StoreEvent


def build_selection(request: ServerRequest, kind: ResourceKind) -> ObjectPredicate:
    """Return the predicate of a list or watch request."""
    by_label = parse_label_selector(request.query.get("labelSelector", ""))
    by_field = parse_field_selector(request.query.get("fieldSelector", ""), kind)
    namespace = request.namespace

    def selected(obj: Json) -> bool:
        if namespace and obj["metadata"].get("namespace") != namespace:
            return False
        return by_label(obj) and by_field(obj)

    return selected


def list_objects(store: Store, kind: ResourceKind, request: ServerRequest) -> Json:
    """Return a list document or one page of it; raise 410 when its version was compacted."""
    selected = build_selection(request, kind)
    version, start = _find_start(store, request)
    if version == store.version:
        objects = store.list_objects(kind.storage, request.namespace)
    else:
        try:
            store.check_version(version)
            then = store.read_at(kind.storage, version)
        except ApiError as error:
            raise (expired_continue_error() if request.query.get("continue") else error) from None
        objects = [then[where] for where in sorted(then)]
    items = [
        convert_version(kind, obj) for obj in objects if read_key(obj) > start and selected(obj)
    ]
    metadata: Json = {"resourceVersion": str(version)}
    limit = request.read_number("limit")
    if limit and len(items) > limit:
        metadata["continue"] = _encode_token(version, items[limit - 1])
        if not _has_selector(request):
            metadata["remainingItemCount"] = len(items) - limit
        items = items[:limit]
    return {
        "kind": f"{kind.kind}List",
        "apiVersion": kind.api_version,
        "metadata": metadata,
        "items": items,
    }


def _has_selector(request: ServerRequest) -> bool:
    return bool(request.query.get("labelSelector") or request.query.get("fieldSelector"))


def _find_start(store: Store, request: ServerRequest) -> tuple[int, tuple[str, str]]:
    """Return the version to list at, and the key after which to begin."""
    if token := request.query.get("continue"):
        if request.read_number("resourceVersion"):
            raise bad_request_error(
                "specifying resource version is not allowed when using continue"
            )
        return _decode_token(token)
    requested = request.read_number("resourceVersion") or 0
    if requested > store.version:
        raise too_large_version_error(requested, store.version)
    exact = request.query.get("resourceVersionMatch") == "Exact"
    return (requested if exact else store.version), ("", "")


def _encode_token(version: int, last: Json) -> str:
    namespace, name = read_key(last)
    document = {"v": "meta.k8s.io/v1", "rv": version, "start": [namespace, name]}
    return base64.urlsafe_b64encode(json.dumps(document).encode()).decode()


def _decode_token(token: str) -> tuple[int, tuple[str, str]]:
    try:
        document = json.loads(base64.urlsafe_b64decode(token))
        namespace, name = document["start"]
        return int(document["rv"]), (str(namespace), str(name))
    except (ValueError, KeyError, TypeError):
        raise bad_request_error("continue key is not valid") from None


# kube-apiserver sends a bookmark about once a minute, and one shortly before a watch ends.
BOOKMARK_S = 60.0
LAST_BOOKMARK_S = 2.0
HOLD_POLL_S = 0.02
"""How often a held watch looks whether it is released."""
INITIAL_EVENTS_END = "k8s.io/initial-events-end"


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """The options of a watch; with ``version`` None it begins with the current objects."""

    matches: ObjectPredicate
    version: int | None
    timeout_s: float
    should_send_bookmarks: bool = False
    should_send_initial_events: bool = False


@dataclass(frozen=True, slots=True)
class WatchPace:
    """How late a watch delivers what happened."""

    is_held: bool = False
    """It delivers nothing, not even bookmarks, and stays open."""
    delay_s: float = 0.0
    is_random: bool = False
    """Each event has another delay, up to ``delay_s``. The order within a watch stays."""


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
    find_pace: Callable[[str, str], WatchPace] = lambda _plural, _user: WatchPace()
    """Returns the present pace of the watches of a kind and user."""
    chance: random.Random = field(default_factory=lambda: random.Random(1))  # noqa: S311  # no secret
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
        late: deque[tuple[float, Json]] = deque()
        while not watch.is_cut:
            pace = self.find_pace(kind.plural, watch.user)
            for event in self.store.read_events(kind.storage, version):
                at = self._compute_delivery(pace, late[-1][0] if late else 0.0)
                late += ((at, change) for change in _filter_event(event, options.matches))
            # Also past the versions of other kinds, for the next bookmark.
            version = max(version, self.store.version)
            now = self.clock.monotonic()
            while late and not pace.is_held and late[0][0] <= now:
                yield late.popleft()[1]
            if now >= end:
                return
            is_current = not late and not pace.is_held
            if options.should_send_bookmarks and is_current and now >= due:
                yield _build_bookmark(kind, version, {})
                due = self._compute_next_bookmark(end)
            limits = [end, *(at for at, _ in list(late)[:1])]
            if options.should_send_bookmarks and is_current:
                limits.append(due)
            if pace.is_held:
                limits.append(now + HOLD_POLL_S)
            await watch.waiter.wait(min(limits) - now)

    def _compute_delivery(self, pace: WatchPace, previous: float) -> float:
        """Compute when to deliver an event: late, but never before the previous one."""
        delay_s = self.chance.uniform(0.0, pace.delay_s) if pace.is_random else pace.delay_s
        return max(previous, self.clock.monotonic() + delay_s)

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
