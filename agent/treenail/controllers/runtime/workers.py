"""Threads that have one controller look at key after key."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from treenail.clock import Clock
from treenail.controllers.runtime.informers import Informers
from treenail.controllers.runtime.metrics import FAST_BUCKETS_S, ControllerMetrics
from treenail.controllers.runtime.workqueue import WorkQueue
from treenail.errors import TooManyRequestsError, TreenailError

log = logging.getLogger(__name__)

Enqueue = Callable[[str], None]
"""Have a key looked at as soon as somebody is free; from any thread."""


class Controller(Protocol):
    """Something that brings what it finds in the cluster to what it should be, key by key.

    Different keys are looked at at the same time, one key never twice at a time. What is to be
    remembered is in the cluster: the process may end between any two writes.
    """

    @property
    def name(self) -> str:
        """One word, for logs and metrics."""

    def register_watches(self, informers: Informers, enqueue: Enqueue) -> None:
        """Ask for the views it needs, and have keys looked at when they change."""

    def sync_key(self, key: str) -> float | None:
        """Take one turn; after how many seconds to look again, None for when something changes.

        It must not wait for what takes long. Raises `TreenailError` when it is to be tried again.
        """

    def close(self) -> None:
        """Give back what it holds; ``sync_key`` is not called any more."""


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """A controller, and how many keys of it are looked at at the same time."""

    controller: Controller
    workers: int = 2
    first_retry_s: float = 0.25
    """The first pause after an error; each further one of the same key is twice as long."""
    max_retry_s: float = 60.0


class WorkerMetrics:
    """What is measured of every controller."""

    def __init__(self, metrics: ControllerMetrics) -> None:
        by_controller = ("controller",)
        self.syncs = metrics.add_counter(
            "reconciles_total", "Turns taken, by how they ended.", ("controller", "result")
        )
        self.errors = metrics.add_counter(
            "reconcile_errors_total", "Turns that failed and are tried again.", by_controller
        )
        self.sync_durations = metrics.add_histogram(
            "reconcile_duration_seconds",
            "How long a turn took.",
            by_controller,
            buckets=FAST_BUCKETS_S,
        )
        self.queue_durations = metrics.add_histogram(
            "workqueue_queue_duration_seconds",
            "How long a key waited for a worker.",
            by_controller,
            buckets=FAST_BUCKETS_S,
        )
        self.depth = metrics.add_gauge(
            "workqueue_depth", "Keys that wait for a worker.", by_controller
        )
        self.longest_sync = metrics.add_gauge(
            "longest_running_turn_seconds", "How long the longest turn under way takes.",
            by_controller,
        )  # fmt: skip


class WorkerPool:
    """The queue and the threads of one controller."""

    def __init__(self, crew: ControllerSettings, clock: Clock, measured: WorkerMetrics) -> None:
        self._settings = crew
        self._clock = clock
        self._metrics = measured
        self._controller = crew.controller
        self._name = crew.controller.name
        self._started_at: dict[int, float] = {}
        self._is_leader: Callable[[], bool] = lambda: True
        self._threads = [
            threading.Thread(target=self._run_worker, name=f"{self._name}-{number}", daemon=True)
            for number in range(crew.workers)
        ]
        self.queue = WorkQueue(
            clock, first_retry_s=crew.first_retry_s, max_retry_s=crew.max_retry_s
        )
        measured.depth.set_function(self._name, by=self.queue.__len__)
        measured.longest_sync.set_function(self._name, by=lambda: self.longest_sync_s)

    def register_watches(self, informers: Informers) -> None:
        """Have the controller ask for its views; to be called before the informers start."""
        self._controller.register_watches(informers, self.queue.add)

    def start(self, is_leader: Callable[[], bool]) -> None:
        """Begin; before each turn ``is_leader`` is asked, and a no ends the work for good."""
        self._is_leader = is_leader
        for thread in self._threads:
            thread.start()

    def stop(self, limit_s: float) -> None:
        """Start no other turn, and finish those under way unless one takes too long."""
        self.queue.close()
        end = self._clock.monotonic() + limit_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(end - self._clock.monotonic(), 0.0))
        if any(thread.is_alive() for thread in self._threads):
            log.warning("controller %s is still busy after %g s", self._name, limit_s)
        else:
            self._controller.close()

    @property
    def longest_sync_s(self) -> float:
        """For how long the longest turn is under way; 0 when nobody works."""
        began = list(self._started_at.values())
        return self._clock.monotonic() - min(began) if began else 0.0

    def _run_worker(self) -> None:
        while (taken := self.queue.get()) is not None:
            key, waited_s = taken
            if not self._is_leader():
                self.queue.close()
                return
            self._metrics.queue_durations.observe(waited_s, self._name)
            began = self._clock.monotonic()
            self._started_at[threading.get_ident()] = began
            result = self._sync_key(key)
            del self._started_at[threading.get_ident()]
            self._metrics.sync_durations.observe(self._clock.monotonic() - began, self._name)
            self._metrics.syncs.increment(self._name, result)
            self.queue.done(key)

    def _sync_key(self, key: str) -> str:
        """One turn and what follows from it; how it ended, in a word."""
        try:
            again_s = self._controller.sync_key(key)
        except TreenailError as error:
            least_s = error.retry_after_s if isinstance(error, TooManyRequestsError) else 0.0
            pause_s = self.queue.add_rate_limited(key, min_s=least_s)
            log.warning("%s: %s is tried again in %.1f s: %s", self._name, key, pause_s, error)
        except Exception:
            # A bug that one object brings to light must not hold up all the others.
            pause_s = self.queue.add_rate_limited(key)
            log.exception("%s: %s is tried again in %.1f s", self._name, key, pause_s)
        else:
            self.queue.forget(key)
            if again_s is None:
                return "success"
            self.queue.add_after(key, again_s)
            return "look_again"
        self._metrics.errors.increment(self._name)
        return "error"
