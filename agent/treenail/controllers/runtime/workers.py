"""Threads that have one controller look at key after key."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from treenail.clock import Clock
from treenail.controllers.runtime.informers import Informers
from treenail.controllers.runtime.metrics import FAST_S, Metrics
from treenail.controllers.runtime.workqueue import WorkQueue
from treenail.errors import TooManyRequests, TreenailError

log = logging.getLogger(__name__)

LookAt = Callable[[str], None]
"""Have a key looked at as soon as somebody is free; from any thread."""


class Controller(Protocol):
    """Something that brings what it finds in the cluster to what it should be, key by key.

    Different keys are looked at at the same time, one key never twice at a time. What is to be
    remembered is in the cluster: the process may end between any two writes.
    """

    @property
    def name(self) -> str:
        """One word, for logs and metrics."""

    def watch(self, informers: Informers, look_at: LookAt) -> None:
        """Ask for the views it needs, and have keys looked at when they change."""

    def sync(self, key: str) -> float | None:
        """Take one turn; after how many seconds to look again, None for when something changes.

        It must not wait for what takes long. Raises `TreenailError` when it is to be tried again.
        """

    def close(self) -> None:
        """Give back what it holds; ``sync`` is not called any more."""


@dataclass(frozen=True, slots=True)
class Crew:
    """A controller, and how many keys of it are looked at at the same time."""

    controller: Controller
    workers: int = 2
    first_s: float = 0.25
    """The first pause after an error; each further one of the same key is twice as long."""
    most_s: float = 60.0


class Measured:
    """What is measured of every controller."""

    def __init__(self, metrics: Metrics) -> None:
        by_controller = ("controller",)
        self.syncs = metrics.counter(
            "reconciles_total", "Turns taken, by how they ended.", ("controller", "result")
        )
        self.errors = metrics.counter(
            "reconcile_errors_total", "Turns that failed and are tried again.", by_controller
        )
        self.took = metrics.histogram(
            "reconcile_duration_seconds", "How long a turn took.", by_controller, buckets=FAST_S
        )
        self.waited = metrics.histogram(
            "workqueue_queue_duration_seconds",
            "How long a key waited for a worker.",
            by_controller,
            buckets=FAST_S,
        )
        self.depth = metrics.gauge("workqueue_depth", "Keys that wait for a worker.", by_controller)
        self.longest = metrics.gauge(
            "longest_running_turn_seconds", "How long the longest turn under way takes.",
            by_controller,
        )  # fmt: skip


class Workers:
    """The queue and the threads of one controller."""

    def __init__(self, crew: Crew, clock: Clock, measured: Measured) -> None:
        self._crew = crew
        self._clock = clock
        self._measured = measured
        self._controller = crew.controller
        self._name = crew.controller.name
        self._began: dict[int, float] = {}
        self._may_work: Callable[[], bool] = lambda: True
        self._threads = [
            threading.Thread(target=self._run, name=f"{self._name}-{number}", daemon=True)
            for number in range(crew.workers)
        ]
        self.queue = WorkQueue(clock, first_s=crew.first_s, most_s=crew.most_s)
        measured.depth.read(self._name, by=self.queue.__len__)
        measured.longest.read(self._name, by=lambda: self.longest_s)

    def watch(self, informers: Informers) -> None:
        """Have the controller ask for its views; to be called before the informers start."""
        self._controller.watch(informers, self.queue.add)

    def start(self, may_work: Callable[[], bool]) -> None:
        """Begin; before each turn ``may_work`` is asked, and a no ends the work for good."""
        self._may_work = may_work
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
    def longest_s(self) -> float:
        """For how long the longest turn is under way; 0 when nobody works."""
        began = list(self._began.values())
        return self._clock.monotonic() - min(began) if began else 0.0

    def _run(self) -> None:
        while (taken := self.queue.get()) is not None:
            key, waited_s = taken
            if not self._may_work():
                self.queue.close()
                return
            self._measured.waited.observe(waited_s, self._name)
            began = self._clock.monotonic()
            self._began[threading.get_ident()] = began
            result = self._turn(key)
            del self._began[threading.get_ident()]
            self._measured.took.observe(self._clock.monotonic() - began, self._name)
            self._measured.syncs.add(self._name, result)
            self.queue.done(key)

    def _turn(self, key: str) -> str:
        """One turn and what follows from it; how it ended, in a word."""
        try:
            again_s = self._controller.sync(key)
        except TreenailError as error:
            least_s = error.retry_after_s if isinstance(error, TooManyRequests) else 0.0
            pause_s = self.queue.retry(key, least_s=least_s)
            log.warning("%s: %s is tried again in %.1f s: %s", self._name, key, pause_s, error)
        except Exception:
            # A bug that one object brings to light must not hold up all the others.
            pause_s = self.queue.retry(key)
            log.exception("%s: %s is tried again in %.1f s", self._name, key, pause_s)
        else:
            self.queue.forget(key)
            if again_s is None:
                return "success"
            self.queue.add_after(key, again_s)
            return "look_again"
        self._measured.errors.add(self._name)
        return "error"
