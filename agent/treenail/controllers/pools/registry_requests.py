"""Requests of controllers to registries, on other threads: a slow registry delays no pool."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from treenail import clocks
from treenail.controllers.pools import image_tags
from treenail.controllers.runtime.controller_metrics import ControllerMetrics
from treenail.image import build_result

log = logging.getLogger(__name__)

MAX_PARALLEL = 8
"""Requests at the same time, for the executor."""
MAX_PER_REGISTRY = 3
"""Of them to one registry, so that one that hangs does not use all threads."""
Work = Callable[[], image_tags.ImageAnswer]
Q = TypeVar("Q")


class RegistryRequests(Generic[Q]):
    """Questions and their answers, by owner: a pool or a MachineOSConfig. Thread-safe.

    An answer stays until another one replaces it, or until the owner no longer needs it.
    """

    def __init__(
        self, executor: Executor, clock: clocks.Clock, notify: Callable[[str], None]
    ) -> None:
        """``notify`` gets the owner of each new answer."""
        self._executor = executor
        self._clock = clock
        self._notify = notify
        self._lock = threading.Lock()
        self._answers: dict[str, dict[Q, image_tags.ImageAnswer]] = {}
        self._open: set[tuple[str, Q]] = set()
        self._running: dict[str, int] = {}
        self._waiting: dict[str, deque[tuple[str, Q, Work]]] = {}

    def ask(self, owner: str, image: str, question: Q, work: Work) -> None:
        """Ask the registry of an image unless the question is open.

        ``work`` must have a time limit.
        """
        registry = image.partition("/")[0]
        with self._lock:
            if (owner, question) in self._open:
                return
            self._open.add((owner, question))
            self._waiting.setdefault(registry, deque()).append((owner, question, work))
        self._start_waiting(registry)

    def get_answers(self, owner: str) -> Mapping[Q, image_tags.ImageAnswer]:
        """Return the answers for an owner."""
        with self._lock:
            return dict(self._answers.get(owner, {}))

    def keep_answers(self, owner: str, is_needed: Callable[[Q], bool]) -> None:
        """Forget the answers to other questions of an owner."""
        with self._lock:
            known = self._answers.pop(owner, {})
            kept = {question: answer for question, answer in known.items() if is_needed(question)}
            if kept:
                self._answers[owner] = kept

    def _start_waiting(self, registry: str) -> None:
        started = []
        with self._lock:
            waiting = self._waiting.get(registry)
            while waiting and self._running.get(registry, 0) < MAX_PER_REGISTRY:
                self._running[registry] = self._running.get(registry, 0) + 1
                started.append(waiting.popleft())
            if not waiting:
                self._waiting.pop(registry, None)
        for request in started:
            self._executor.submit(self._answer_question, registry, *request)

    def _answer_question(self, registry: str, owner: str, question: Q, work: Work) -> None:
        try:
            answer = work()
        except Exception:
            # A bug must not leave the question open forever.
            log.exception("cannot ask %s", registry)
            failure = build_result.AttemptFailure(
                build_result.BuildReason.REGISTRY_UNREACHABLE,
                f"cannot ask {registry}: internal error",
            )
            answer = image_tags.ImageAnswer(self._clock.now(), failure)
        with self._lock:
            known = self._answers.setdefault(owner, {})
            before = known.get(question)
            if answer.failure is not None and before is not None and before.failure is not None:
                answer = replace(answer, count=before.count + 1)
            known[question] = answer
            self._open.discard((owner, question))
            self._running[registry] -= 1
            if not self._running[registry]:
                del self._running[registry]
        self._start_waiting(registry)
        self._notify(owner)


class TagSource(Protocol):
    """Finds what tags stand for."""

    def resolve_tag(
        self, image: str, architectures: frozenset[str], secret: str
    ) -> image_tags.ImageAnswer:
        """Return the image by digest, within a time limit; an error becomes part of the answer.

        ``secret`` names the login; empty for that of the cluster. The image must exist for each of
        the architectures.
        """

    def compute_access_version(self, secret: str) -> str:
        """Return a text that changes with the login and with the CAs; raise `ClusterError`."""


class LazyTagSource:
    """A `TagSource` that is made when the first pool has a tag: registry clients cost memory."""

    def __init__(self, make: Callable[[], TagSource]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._source: TagSource | None = None

    def resolve_tag(
        self, image: str, architectures: frozenset[str], secret: str
    ) -> image_tags.ImageAnswer:
        """See `TagSource`."""
        return self._find_source().resolve_tag(image, architectures, secret)

    def compute_access_version(self, secret: str) -> str:
        """See `TagSource`."""
        return self._find_source().compute_access_version(secret)

    def _find_source(self) -> TagSource:
        with self._lock:
            if self._source is None:
                self._source = self._make()
            return self._source


class TagMetrics:
    """Counts changes by the pool that gets the image, or an image built on it."""

    def __init__(self, metrics: ControllerMetrics, use: str) -> None:
        """``use`` begins the name of the metric: ``base_image`` or ``pool_image``."""
        self._changes = metrics.add_counter(
            f"{use}_tag_changes_total",
            "Tags that moved or are not followed, by the reason in the Event.",
            ("pool", "reason"),
        )

    def record_change(self, change: image_tags.TagChange, pool: str) -> None:
        """Count a change that was recorded in the cluster."""
        self._changes.increment(pool, change.reason)
