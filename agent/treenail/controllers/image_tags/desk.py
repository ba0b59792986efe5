"""Asks registries for tags on other threads, so that a slow registry delays no pool."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from typing import Protocol

from treenail.controllers.image_tags.decide import TagAnswer, TagQuestion

log = logging.getLogger(__name__)


class TagSource(Protocol):
    """Finds what tags stand for."""

    def resolve_tag(self, image: str, architectures: frozenset[str], secret: str) -> TagAnswer:
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

    def resolve_tag(self, image: str, architectures: frozenset[str], secret: str) -> TagAnswer:
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


class TagDesk:
    """The last question of each owner and its answer. Thread-safe."""

    def __init__(self, executor: Executor, notify: Callable[[str], None]) -> None:
        self._executor = executor
        self._notify = notify
        self._lock = threading.Lock()
        self._open: set[tuple[str, TagQuestion]] = set()
        self._answers: dict[str, tuple[TagQuestion, TagAnswer]] = {}

    def ask(self, owner: str, question: TagQuestion, work: Callable[[], TagAnswer]) -> None:
        """Ask unless the question is open."""
        with self._lock:
            if (owner, question) in self._open:
                return
            self._open.add((owner, question))
        self._executor.submit(self._run, owner, question, work)

    def find_answer(self, owner: str, question: TagQuestion) -> TagAnswer | None:
        """Return the last answer to this question; None without one."""
        with self._lock:
            known = self._answers.get(owner)
        if known is None:
            return None
        asked, answer = known
        if answer.reason is None and not question.login:
            # An image is an image, whichever login found it.
            asked = replace(asked, login="")
        return answer if asked == question else None

    def forget(self, owner: str) -> None:
        """Forget the answer for an owner without a tag."""
        with self._lock:
            self._answers.pop(owner, None)

    def _run(self, owner: str, question: TagQuestion, work: Callable[[], TagAnswer]) -> None:
        try:
            answer = work()
        except Exception:
            log.exception("cannot resolve %s", question.image)
            answer = None
        before = self.find_answer(owner, question)
        with self._lock:
            self._open.discard((owner, question))
            if answer is not None:
                if answer.reason is not None and before is not None and before.reason is not None:
                    answer = replace(answer, count=before.count + 1)
                self._answers[owner] = question, answer
        if answer is not None:
            self._notify(owner)
