"""Record Kubernetes Events with client-go's aggregation and without blocking the caller."""

import logging
import re
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TypeVar

from treenail import clocks, errors, retry
from treenail.kube import api_client, resources

log = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")

# client-go aggregates for 10 minutes and allows 25 Events, then one per 5 minutes
# (tools/record/events_cache.go). The API limits the note of an Event to 1024 bytes.
_AGGREGATION_S = 600.0
_BURST = 25
_REFILL_S = 300.0
_MESSAGE_CHARS = 1024
_MAX_REMEMBERED = 256
_MAX_PENDING = 32
_UNNAMEABLE = re.compile(r"[^a-z0-9]+")
_PREFIX_CHARS = 200


@dataclass(frozen=True, slots=True)
class ObjectReference:
    """Object that an Event is about. Events of cluster-scoped objects go to ``default``."""

    kind: str
    name: str
    uid: str = ""
    namespace: str = ""
    api_version: str = "v1"

    def to_involved_object(self) -> api_client.Json:
        """Convert to the ``involvedObject`` of an Event, without empty fields."""
        fields = {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "namespace": self.namespace,
            "name": self.name,
            "uid": self.uid,
        }
        return {name: value for name, value in fields.items() if value}


@dataclass(frozen=True, slots=True)
class _EventKey:
    regarding: ObjectReference
    type: str
    reason: str
    message: str


@dataclass(slots=True)
class _EventSeries:
    """One Event object with its count, and the count that the API server has."""

    event: _EventKey
    name: str
    first_at: float
    last_at: float
    count: int = 1
    written_count: int = 0


@dataclass(slots=True)
class _TokenBucket:
    """Events that an object may still cause: ``_BURST`` at once, then one every ``_REFILL_S``."""

    tokens: float
    refilled_at: float


class EventRecorder:
    """Writes Events for one component on one host. Never raises. Thread-safe.

    The same Event within ten minutes raises the count of the first one. Each object has a rate
    limit. Up to 32 Events wait while the API server is unreachable; the next Event or
    ``flush_pending`` writes them after the back-off.
    """

    def __init__(
        self, client: api_client.Client, component: str, host: str, clock: clocks.Clock
    ) -> None:
        self._client = client
        self._component = component
        self._host = host
        self._name_prefix = _make_name_prefix(host)
        self._clock = clock
        self._lock = threading.Lock()
        self._series: OrderedDict[_EventKey, _EventSeries] = OrderedDict()
        self._buckets: OrderedDict[ObjectReference, _TokenBucket] = OrderedDict()
        self._pending: deque[_EventSeries] = deque()
        self._failures = 0
        self._not_before = 0.0
        self._last_stamp = 0

    def record_normal(self, regarding: ObjectReference, reason: str, message: str) -> None:
        """Record an Event of type Normal."""
        self._record_event(_EventKey(regarding, "Normal", reason, message[:_MESSAGE_CHARS]))

    def record_warning(self, regarding: ObjectReference, reason: str, message: str) -> None:
        """Record an Event of type Warning: a user may have to act."""
        self._record_event(_EventKey(regarding, "Warning", reason, message[:_MESSAGE_CHARS]))

    def flush_pending(self) -> None:
        """Write the waiting Events until one fails; do nothing during the back-off."""
        with self._lock:
            self._write_pending()

    def flush_within(self, limit_s: float) -> None:
        """Write the waiting Events, and return after ``limit_s`` also without an answer."""
        thread = threading.Thread(target=self.flush_pending, name="events", daemon=True)
        thread.start()
        thread.join(limit_s)

    def _record_event(self, event: _EventKey) -> None:
        with self._lock:
            if not self._can_record(event.regarding):
                log.debug("rate limit: skipped event %s for %s", event.reason, event.regarding.name)
                return
            series = self._count_event(event)
            if series not in self._pending:
                self._pending.append(series)
            if len(self._pending) > _MAX_PENDING:
                lost = self._pending.popleft().event
                log.warning(
                    "dropped event %s for %s: too many events wait",
                    lost.reason,
                    lost.regarding.name,
                )
            self._write_pending()

    def _write_pending(self) -> None:
        while self._pending and self._clock.monotonic() >= self._not_before:
            series = self._pending[0]
            event = series.event
            try:
                self._write_series(series)
            except (
                errors.ConflictError,
                errors.ForbiddenError,
                errors.InvalidError,
                errors.NotFoundError,
            ) as error:
                # Another attempt cannot succeed. A namespace that is being deleted also answers
                # with Forbidden.
                log.warning(
                    "dropped event %s for %s: %s", event.reason, event.regarding.name, error
                )
            except errors.ClusterError as error:
                log.debug("event %s for %s waits: %s", event.reason, event.regarding.name, error)
                self._back_off(error)
                return
            self._failures = 0
            self._pending.popleft()

    def _back_off(self, error: errors.ClusterError) -> None:
        # While the API server is unreachable, each attempt takes the time limit of a request.
        self._failures += 1
        pause_s = retry.compute_event_pause_s(self._failures)
        if isinstance(error, errors.TooManyRequestsError):
            pause_s = max(pause_s, error.retry_after_s)
        self._not_before = self._clock.monotonic() + pause_s

    def _write_series(self, series: _EventSeries) -> None:
        namespace = series.event.regarding.namespace or "default"
        if series.written_count:
            change: api_client.Json = {
                "count": series.count,
                "lastTimestamp": clocks.format_rfc3339(series.last_at),
            }
            try:
                self._client.patch(resources.EVENTS, series.name, change, namespace=namespace)
            except errors.NotFoundError:
                # kube-apiserver deletes Events after --event-ttl, by default one hour.
                series.name, series.first_at, series.written_count = (
                    self._generate_name(),
                    series.last_at,
                    0,
                )
        if not series.written_count:
            try:
                self._client.create(
                    resources.EVENTS, self._build_body(series, namespace), namespace=namespace
                )
            except errors.AlreadyExistsError:
                log.debug("event %s exists: the response to its creation was lost", series.name)
        series.written_count = series.count

    def _build_body(self, series: _EventSeries, namespace: str) -> api_client.Json:
        event = series.event
        return {
            "apiVersion": resources.EVENTS.api_version,
            "kind": resources.EVENTS.kind,
            "metadata": {"name": series.name, "namespace": namespace},
            "involvedObject": event.regarding.to_involved_object(),
            "type": event.type,
            "reason": event.reason,
            "message": event.message,
            "source": {"component": self._component, "host": self._host},
            "reportingComponent": self._component,
            "reportingInstance": self._host,
            "firstTimestamp": clocks.format_rfc3339(series.first_at),
            "lastTimestamp": clocks.format_rfc3339(series.last_at),
            "count": series.count,
        }

    def _count_event(self, event: _EventKey) -> _EventSeries:
        now = self._clock.now()
        series = self._series.get(event)
        if series is None or now - series.last_at >= _AGGREGATION_S:
            series = _EventSeries(event, self._generate_name(), first_at=now, last_at=now)
            self._series[event] = series
        else:
            series.count += 1
            series.last_at = now
        _remember_entry(self._series, event)
        return series

    def _can_record(self, regarding: ObjectReference) -> bool:
        now = self._clock.monotonic()
        bucket = self._buckets.setdefault(regarding, _TokenBucket(_BURST, now))
        bucket.tokens = min(_BURST, bucket.tokens + (now - bucket.refilled_at) / _REFILL_S)
        bucket.refilled_at = now
        _remember_entry(self._buckets, regarding)
        if bucket.tokens < 1:
            return False
        bucket.tokens -= 1
        return True

    def _generate_name(self) -> str:
        """Return a name with the host and a time, unique even within one tick of the clock."""
        # client-go names Events in the same way, with the name of the object
        # (tools/record/event.go).
        self._last_stamp = max(self._last_stamp + 1, int(self._clock.now() * 1e9))
        return f"{self._name_prefix}.{self._last_stamp:x}"


def _make_name_prefix(host: str) -> str:
    """Return the host as part of an object's name: the name of a workstation may be ``My_Host``."""
    labels = (_UNNAMEABLE.sub("-", part).strip("-") for part in host.lower().split("."))
    return ".".join(filter(None, labels))[:_PREFIX_CHARS].strip("-.") or "treenail"


def _remember_entry(table: OrderedDict[K, V], key: K) -> None:
    """Move the entry to the end and drop the oldest one above the limit."""
    table.move_to_end(key)
    if len(table) > _MAX_REMEMBERED:
        table.popitem(last=False)
