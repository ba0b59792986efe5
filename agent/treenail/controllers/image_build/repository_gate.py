"""Excludes pushes to a repository while its images are pruned."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_WAIT_S = 300.0


class GateClosed(Exception):
    """Pruning did not end within the time limit."""


class RepositoryGate:
    """Any number of pushes to a repository at the same time, or one prune. Thread-safe."""

    def __init__(self, *, wait_s: float = _WAIT_S) -> None:
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._pushes: Counter[str] = Counter()
        self._pruned: set[str] = set()

    @contextmanager
    def enter(self, repository: str) -> Iterator[None]:
        """Push within this context; raise `GateClosed` if pruning takes too long."""
        with self._changed:
            if not self._changed.wait_for(lambda: repository not in self._pruned, self._wait_s):
                raise GateClosed(f"images of {repository} are being deleted")
            self._pushes[repository] += 1
        try:
            yield
        finally:
            with self._changed:
                self._pushes[repository] -= 1
                if not self._pushes[repository]:
                    del self._pushes[repository]

    @contextmanager
    def close(self, repository: str) -> Iterator[bool]:
        """Prune within this context if it yields True; False means that a push or prune runs."""
        with self._changed:
            is_free = not self._pushes[repository] and repository not in self._pruned
            if is_free:
                self._pruned.add(repository)
        try:
            yield is_free
        finally:
            if is_free:
                with self._changed:
                    self._pruned.discard(repository)
                    self._changed.notify_all()
