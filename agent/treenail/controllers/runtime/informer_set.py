"""Informers that all controllers of a process share: one watch for each kind."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Generic, TypeVar, cast

from treenail import clocks, errors
from treenail.api.decode import Json
from treenail.kube import api_client, watch
from treenail.kube.informer import ChangeHandler, Informer

log = logging.getLogger(__name__)

RESTORED_WAIT_S = 90.0
"""Time after a restore of etcd in which nothing is assigned.

The restored state shows nodes in service that are draining or down. Agents report within a minute,
and the node lifecycle controller marks a node without a kubelet after 50 s.
"""

T = TypeVar("T")

Projection = Callable[[Json], T | None]
"""Converts an object to the part that one controller needs; None hides the object."""

_Projections = tuple[object, ...]


class InformerView(Generic[T]):
    """One controller's view of the objects of a kind, by key. Thread-safe."""

    def __init__(self, informer: Informer[_Projections], index: int) -> None:
        self._informer = informer
        self._index = index

    def find(self, key: str) -> T | None:
        """Return the value of ``namespace/name``, or of a name without namespace."""
        return self._project_stored(self._informer.find(key))

    def get_all(self) -> Mapping[str, T]:
        """Return a copy of all values, by key."""
        # Without a call for each object: controllers read thousands of them often.
        index = self._index
        return {
            key: cast("T", value)
            for key, stored in self._informer.get_all().items()
            if (value := stored[index]) is not None
        }

    @property
    def listed_at(self) -> float | None:
        """Monotonic time at which the last complete list began; None before the first one."""
        return self._informer.listed_at

    def request_list(self) -> None:
        """List the kind again; ``listed_at`` tells when it is done."""
        self._informer.request_list()

    def add_handler(self, handler: ChangeHandler[T]) -> None:
        """Call ``handler`` when the value of an object changes. Add handlers before ``start``.

        It runs on the watching thread and should only enqueue the key.
        """

        def handle_change(
            key: str, before: _Projections | None, after: _Projections | None
        ) -> None:
            value_before, value_after = self._project_stored(before), self._project_stored(after)
            if value_before != value_after:
                handler(key, value_before, value_after)

        self._informer.add_handler(handle_change)

    def add_list_handler(self, handler: Callable[[], None]) -> None:
        """Call ``handler`` after every complete list, on the watching thread."""
        self._informer.add_list_handler(handler)

    def _project_stored(self, stored: _Projections | None) -> T | None:
        return None if stored is None else cast("T | None", stored[self._index])


class InformerSet:
    """Informers of a process: add all views first, then call ``start``."""

    def __init__(self, client: api_client.Client, clock: clocks.Clock) -> None:
        self._client = client
        self._clock = clock
        self._projections: dict[watch.WatchScope, list[Projection[object]]] = {}
        self._informers: dict[watch.WatchScope, Informer[_Projections]] = {}
        self._needs: dict[str, bool] = {}
        self._requested: dict[watch.WatchScope, float] = {}
        self._optional: set[watch.WatchScope] = set()
        self._missing_kinds: set[watch.WatchScope] = set()
        self._loss_handlers: list[Callable[[], None]] = []

    def add_view(
        self,
        scope: watch.WatchScope,
        project: Projection[T],
        *,
        optional: bool = False,
        required: bool = True,
    ) -> InformerView[T]:
        """Add a view of a scope; it hides objects that ``project`` cannot read.

        The cluster may lack an ``optional`` kind. A controller runs also while a kind that is not
        ``required`` cannot be listed: no decision may depend on what such a view lacks.
        """
        if optional:
            self._optional.add(scope)
        self._needs[scope.resource.plural] = required
        projects = self._projections.setdefault(scope, [])
        # Views of two controllers with the same projection share its objects.
        if project not in projects:
            projects.append(project)
        informer = self._informers.get(scope)
        if informer is None:
            informer = Informer(
                self._client,
                scope,
                self._clock,
                lambda document: tuple(project_object(project, document) for project in projects),
                on_lost=lambda error: self._handle_watch_error(scope, error),
            )
            # The kind of an optional scope can be installed later.
            informer.add_list_handler(lambda: self._missing_kinds.discard(scope))
            self._informers[scope] = informer
        return InformerView(informer, projects.index(project))

    def begin_controller(self) -> Mapping[str, bool]:
        """Return the kinds that are added until the next call, and whether each is required."""
        self._needs = {}
        return self._needs

    def add_loss_handler(self, handler: Callable[[], None]) -> None:
        """Call ``handler`` when a watch is disconnected. Add handlers before ``start``."""
        self._loss_handlers.append(handler)

    def start(self) -> None:
        """Start to list and watch."""
        for informer in self._informers.values():
            informer.start()

    def stop(self, limit_s: float = 5.0) -> None:
        """Stop the watches, and wait up to ``limit_s``; the views keep their contents."""
        for informer in self._informers.values():
            informer.stop(limit_s=0.0)
        end = self._clock.monotonic() + limit_s
        for informer in self._informers.values():
            informer.stop(limit_s=max(end - self._clock.monotonic(), 0.0))

    def wait_until_synced(self, limit_s: float) -> bool:
        """Wait for the first complete list of each kind; return False after ``limit_s``."""
        return all(
            scope in self._missing_kinds or informer.wait_until_synced(limit_s)
            for scope, informer in self._informers.items()
        )

    @property
    def unsynced_reason(self) -> str:
        """The kinds that are not listed yet, and why; empty when all are."""
        return "; ".join(
            informer.stale_reason for _, informer in self._iter_present() if not informer.has_synced
        )

    def can_start(self, needs: Mapping[str, bool], since: float) -> bool:
        """Return whether each required kind was listed at ``since`` or later, and others tried."""
        return all(
            informer.has_synced and informer.listed_at is not None and informer.listed_at >= since
            if needs[scope.resource.plural]
            else informer.has_synced or informer.error
            for scope, informer in self._iter_present()
            if scope.resource.plural in needs
        )

    @property
    def degraded(self) -> Mapping[str, str]:
        """Why each kind cannot be watched now, by its plural; empty when all can."""
        present = self._iter_present()
        return {scope.resource.plural: one.error for scope, one in present if one.error}

    def summarize_problem(self) -> str:
        """Say why the objects may be outdated, for one kind of them; empty when all are current.

        An API server that does not answer disconnects the watches of all kinds.
        """
        reasons = [*filter(None, (informer.stale_reason for _, informer in self._iter_present()))]
        if len(reasons) < 2:
            return "".join(reasons)
        return f"{reasons[0]} (and {len(reasons) - 1} more)"

    @property
    def plurals(self) -> tuple[str, ...]:
        """The watched kinds."""
        return tuple(dict.fromkeys(scope.resource.plural for scope in self._informers))

    def describe_staleness(self, plurals: Collection[str] = ()) -> str:
        """Say why the objects of these kinds may be outdated; empty when all are current.

        No ``plurals`` means all kinds that the cluster has.
        """
        reasons = (
            informer.stale_reason
            for scope, informer in self._iter_present()
            if not plurals or scope.resource.plural in plurals
        )
        return "; ".join(filter(None, reasons))

    def find_stale_reason(self, plurals: Collection[str] = ()) -> str:
        """Describe staleness, for a while also that of an API server after a restore of etcd."""
        if self.restored_s < RESTORED_WAIT_S:
            return "the API server returned to an older state, and nodes report again"
        return self.describe_staleness(plurals)

    @property
    def restored_s(self) -> float:
        """Seconds since a list showed that etcd was restored; infinite if none did."""
        return min(
            (informer.restored_s for _, informer in self._iter_present()), default=float("inf")
        )

    def measure_silence_s(self, plural: str) -> float:
        """Return the seconds since the API server last sent anything for the kind."""
        return max(
            (
                informer.silence_s
                for scope, informer in self._iter_present()
                if scope.resource.plural == plural
            ),
            default=0.0,
        )

    def request_lists(self, since: float) -> None:
        """List every listed kind again once whose last list began before ``since`` (monotonic)."""
        for scope, informer in self._iter_present():
            is_older = informer.listed_at is not None and informer.listed_at < since
            if is_older and self._requested.get(scope) != since:
                self._requested[scope] = since
                informer.request_list()

    def check_silent(self) -> None:
        """Check that no change was missed where the API server is silent for too long."""
        for _scope, informer in self._iter_present():
            informer.check_if_silent()

    def _iter_present(self) -> Iterator[tuple[watch.WatchScope, Informer[_Projections]]]:
        for scope, informer in self._informers.items():
            if scope not in self._missing_kinds:
                yield scope, informer

    def _handle_watch_error(self, scope: watch.WatchScope, error: errors.ClusterError) -> None:
        if scope in self._optional and isinstance(error, errors.NotFoundError):
            self._missing_kinds.add(scope)
        reason = self._informers[scope].error
        log.warning("%s watch disconnected: %s", scope.resource.plural, reason)
        for handler in self._loss_handlers:
            handler()


def project_object(project: Projection[T], document: Json) -> T | None:
    """Return the part of an object; None, with a log entry, for one that cannot be read."""
    try:
        return project(document)
    except errors.TreenailError as error:
        metadata = document.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        log.warning("cannot read %s %s: %s", document.get("kind", "object"), name, error)
        return None
