"""One watch for each kind, however many controllers look at it."""

import logging
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar, cast

from treenail.api.decode import Json
from treenail.clock import Clock
from treenail.errors import ClusterError, NotFound, TreenailError
from treenail.kube.client import Client
from treenail.kube.informer import Informer, OnMove
from treenail.kube.watch import Scope

log = logging.getLogger(__name__)

T = TypeVar("T")

Project = Callable[[Json], T | None]
"""From an object to what one controller wants of it; None if nothing, as if it did not exist."""

_Kept = tuple[object, ...]


class View(Generic[T]):
    """What one controller sees of the objects of one kind, by key. Thread-safe."""

    def __init__(self, informer: Informer[_Kept], place: int) -> None:
        self._informer = informer
        self._place = place

    def find(self, key: str) -> T | None:
        """What is kept under ``namespace/name``, or under a name without namespace."""
        return self._own(self._informer.find(key))

    def all(self) -> Mapping[str, T]:
        """Everything that is kept, as of now, by key."""
        found = ((key, self._own(kept)) for key, kept in self._informer.all().items())
        return {key: own for key, own in found if own is not None}

    def tell(self, on_move: OnMove[T]) -> None:
        """Call it when what is kept of an object becomes another; to be added before the start.

        It is called on the watching thread and should only note the key.
        """

        def told(key: str, before: _Kept | None, after: _Kept | None) -> None:
            own_before, own_after = self._own(before), self._own(after)
            if own_before != own_after:
                on_move(key, own_before, own_after)

        self._informer.tell(told)

    def _own(self, kept: _Kept | None) -> T | None:
        return None if kept is None else cast("T | None", kept[self._place])


class Informers:
    """The informers of a process: views of them are asked for first, then all are started."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._projects: dict[Scope, list[Project[object]]] = {}
        self._informers: dict[Scope, Informer[_Kept]] = {}
        self._lost: dict[Scope, str] = {}
        self._optional: set[Scope] = set()
        self._absent: set[Scope] = set()

    def view(self, scope: Scope, project: Project[T], *, optional: bool = False) -> View[T]:
        """Another view of a scope; an object that ``project`` can't read is not kept.

        Of a kind that is ``optional`` there may be nothing, not even the kind.
        """
        if optional:
            self._optional.add(scope)
        projects = self._projects.setdefault(scope, [])
        projects.append(project)
        informer = self._informers.get(scope)
        if informer is None:
            informer = Informer(
                self._client,
                scope,
                self._clock,
                lambda found: _kept(projects, found),
                on_lost=lambda error: self._lose(scope, error),
            )
            self._informers[scope] = informer
        return View(informer, len(projects) - 1)

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
            scope in self._absent or informer.wait_until_synced(limit_s)
            for scope, informer in self._informers.items()
        )

    @property
    def missing(self) -> str:
        """Which kinds were not seen yet, and why; empty when all were."""
        return "; ".join(
            self._lost.get(scope, f"{scope.resource.plural} are being listed")
            for scope, informer in self._informers.items()
            if not (informer.has_synced or scope in self._absent)
        )

    def _lose(self, scope: Scope, error: ClusterError) -> None:
        self._lost[scope] = str(error)
        if scope in self._optional and isinstance(error, NotFound):
            self._absent.add(scope)
        log.warning("lost sight of the %s: %s", scope.resource.plural, error)


def _kept(projects: list[Project[object]], found: Json) -> _Kept:
    return tuple(_projected(project, found) for project in projects)


def _projected(project: Project[object], found: Json) -> object | None:
    try:
        return project(found)
    except TreenailError as error:
        metadata = found.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        log.warning("%s %s can't be read: %s", found.get("kind", "object"), name, error)
        return None
