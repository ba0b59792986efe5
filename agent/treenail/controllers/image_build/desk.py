"""Asks registries on threads of its own, so that a slow registry delays no other build."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace

from treenail.clock import Clock
from treenail.controllers.image_build.facts import Answer, AppendConfig, AttemptFailure, Question
from treenail.image.build_reason import BuildReason

log = logging.getLogger(__name__)

MAX_PARALLEL = 8
"""Requests to registries at the same time."""
MAX_PER_REGISTRY = 3
"""Of them to one registry, so that one that hangs does not use all threads."""

Work = Callable[[], Answer]


class RegistryDesk:
    """Questions to registries and their answers, by MachineOSConfig. Thread-safe.

    An answer stays until another one replaces it, or until its build is forgotten.
    """

    def __init__(self, executor: Executor, clock: Clock, notify: Callable[[str], None]) -> None:
        self._executor = executor
        self._clock = clock
        self._notify = notify
        self._lock = threading.Lock()
        self._answers: dict[str, dict[Question, Answer]] = {}
        self._open: set[tuple[str, Question]] = set()
        self._running: dict[str, int] = {}
        self._waiting: dict[str, deque[tuple[str, Question, Work]]] = {}

    def ask(self, owner: str, question: Question, work: Work) -> None:
        """Ask unless the question is open. ``work`` must have a time limit."""
        registry = get_registry(question)
        with self._lock:
            if (owner, question) in self._open:
                return
            self._open.add((owner, question))
            self._waiting.setdefault(registry, deque()).append((owner, question, work))
            self._start_waiting(registry)

    def get_answers(self, owner: str) -> Mapping[Question, Answer]:
        """Return the answers for a MachineOSConfig."""
        with self._lock:
            return dict(self._answers.get(owner, {}))

    def keep_answers(self, owner: str, builds: frozenset[str]) -> None:
        """Forget the answers for other builds than these UIDs."""
        with self._lock:
            known = self._answers.get(owner, {})
            kept = {each: answer for each, answer in known.items() if each.build in builds}
            if kept:
                self._answers[owner] = kept
            else:
                self._answers.pop(owner, None)

    def _start_waiting(self, registry: str) -> None:
        waiting = self._waiting.get(registry)
        while waiting and self._running.get(registry, 0) < MAX_PER_REGISTRY:
            self._running[registry] = self._running.get(registry, 0) + 1
            self._executor.submit(self._run, registry, *waiting.popleft())
        if not waiting:
            self._waiting.pop(registry, None)

    def _run(self, registry: str, owner: str, question: Question, work: Work) -> None:
        try:
            answer = work()
        except Exception:
            # A bug must not leave the question open forever.
            log.exception("cannot ask %s", registry)
            failure = AttemptFailure(
                BuildReason.REGISTRY_UNREACHABLE, f"cannot ask {registry}: internal error"
            )
            answer = Answer(self._clock.now(), failure)
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


def get_registry(question: Question) -> str:
    """Return the registry that a question concerns most: the one that an image is pushed to."""
    image = question.push_spec if isinstance(question, AppendConfig) else question.image
    return image.partition("/")[0]
