"""One watch for each kind, however many controllers look at it."""

import logging
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar, cast

from treenail.api.decode import Json
from treenail.clock import Clock
from treenail.errors import ClusterError, NotFoundError, TreenailError
from treenail.kube.client import Client
from treenail.kube.informer import ChangeHandler, Informer
from treenail.kube.watch import WatchScope

log = logging.getLogger(__name__)

T = TypeVar("T")

Projection = Callable[[Json], T | None]
"""From an object to what one controller wants of it; None if nothing, as if it did not exist."""

_Projections = tuple[object, ...]


class InformerView(Generic[T]):
    """What one controller sees of the objects of one kind, by key. Thread-safe."""

    def __init__(self, informer: Informer[_Projections], place: int) -> None:
        self._informer = informer
        self._index = place

    def find(self, key: str) -> T | None:
        """What is kept under ``namespace/name``, or under a name without namespace."""
        return self._project(self._informer.find(key))

    def get_all(self) -> Mapping[str, T]:
        """Everything that is kept, as of now, by key."""
        found = ((key, self._project(kept)) for key, kept in self._informer.get_all().items())
        return {key: own for key, own in found if own is not None}

    def add_handler(self, on_move: ChangeHandler[T]) -> None:
        """Call it when what is kept of an object becomes another; to be added before the start.

        It is called on the watching thread and should only note the key.
        """

        def told(key: str, before: _Projections | None, after: _Projections | None) -> None:
            own_before, own_after = self._project(before), self._project(after)
            if own_before != own_after:
                on_move(key, own_before, own_after)

        self._informer.add_handler(told)

    def _project(self, kept: _Projections | None) -> T | None:
        return None if kept is None else cast("T | None", kept[self._index])


class Informers:
    """The informers of a process: views of them are asked for first, then all are started."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._projections: dict[WatchScope, list[Projection[object]]] = {}
        self._informers: dict[WatchScope, Informer[_Projections]] = {}
        self._watch_errors: dict[WatchScope, str] = {}
        self._optional: set[WatchScope] = set()
        self._missing_kinds: set[WatchScope] = set()

    def add_view(
        self, scope: WatchScope, project: Projection[T], *, optional: bool = False
    ) -> InformerView[T]:
        """Another view of a scope; an object that ``project`` can't read is not kept.

        Of a kind that is ``optional`` there may be nothing, not even the kind.
        """
        if optional:
            self._optional.add(scope)
        projects = self._projections.setdefault(scope, [])
        projects.append(project)
        informer = self._informers.get(scope)
        if informer is None:
            informer = Informer(
                self._client,
                scope,
                self._clock,
                lambda found: _project_all(projects, found),
                on_lost=lambda error: self._handle_watch_error(scope, error),
            )
            self._informers[scope] = informer
        return InformerView(informer, len(projects) - 1)

    def start(self) -> None:
        """Begin to list and watch."""
        for informer in self._informers.values():
            informer.start()

    def stop(self) -> None:
        """End the watches; the views stay as they are."""
        for informer in self._informers.values():
            informer.stop()

    def wait_until_synced(self, limit_s: float) -> bool:
        """Wait until everything there is has been seen once; False if one takes longer."""
        return all(
            scope in self._missing_kinds or informer.wait_until_synced(limit_s)
            for scope, informer in self._informers.items()
        )

    @property
    def unsynced_reason(self) -> str:
        """Which kinds were not seen yet, and why; empty when all were."""
        return "; ".join(
            self._watch_errors.get(scope, f"{scope.resource.plural} are being listed")
            for scope, informer in self._informers.items()
            if not (informer.has_synced or scope in self._missing_kinds)
        )

    def _handle_watch_error(self, scope: WatchScope, error: ClusterError) -> None:
        self._watch_errors[scope] = str(error)
        if scope in self._optional and isinstance(error, NotFoundError):
            self._missing_kinds.add(scope)
        log.warning("lost sight of the %s: %s", scope.resource.plural, error)


def _project_all(projects: list[Projection[object]], found: Json) -> _Projections:
    return tuple(_project_object(project, found) for project in projects)


def _project_object(project: Projection[object], found: Json) -> object | None:
    try:
        return project(found)
    except TreenailError as error:
        metadata = found.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        log.warning("%s %s can't be read: %s", found.get("kind", "object"), name, error)
        return None
