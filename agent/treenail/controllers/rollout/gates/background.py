"""Asks gates on threads of its own, so that a gate that hangs delays no reconciliation."""

import logging
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

from treenail.clock import Clock
from treenail.controllers.pools.os_image import GateAnswer, GateBlocked, GatePending
from treenail.controllers.pools.policy import LockServer, PrometheusAlerts
from treenail.controllers.rollout.gates.external import GATE_UNAVAILABLE, LockHolder

log = logging.getLogger(__name__)

MAX_PARALLEL_REQUESTS = 8
OPEN_FOR_S = 5.0
"""How long an open gate may let a node pass; later it is asked again."""
CLOSED_FOR_S = 30.0
"""How long a closed gate is not asked again."""
GATE_RETRY_S = 30.0
"""Delay until a gate that is not open is asked again."""
PENDING_RETRY_S = 0.25
"""Delay until the answer of a gate is looked for."""
_FORGET_AFTER_S = 600.0


class Gates(Protocol):
    """External gates; None means that the gate is open."""

    def check_alerts(self, alerts: PrometheusAlerts | None) -> GateAnswer: ...
    def acquire_lock(self, server: LockServer, holder: LockHolder) -> GateAnswer: ...
    def release_lock(self, server: LockServer, holder: LockHolder) -> GateAnswer: ...


def find_retry_s(answer: GateAnswer) -> float | None:
    """Return the delay until the gate is asked again; None when it is open."""
    if answer is None:
        return None
    return PENDING_RETRY_S if isinstance(answer, GatePending) else GATE_RETRY_S


@dataclass(slots=True)
class _Question:
    """One request to a gate, and its last answer."""

    answer: GateAnswer = None
    answered_at: float | None = None
    is_running: bool = False
    is_used: bool = False
    """An open lock lets one node pass once; it must be asked again for the next time."""


class BackgroundGates:
    """Answers at once: with a recent answer, or `GatePending` until there is one. Thread-safe."""

    def __init__(self, gates: Gates, clock: Clock, executor: Executor) -> None:
        self._gates = gates
        self._clock = clock
        self._executor = executor
        self._lock = threading.Lock()
        self._questions: dict[Hashable, _Question] = {}

    def check_alerts(self, alerts: PrometheusAlerts | None) -> GateAnswer:
        """Return the recent state of the alerts."""
        if alerts is None:
            return None
        return self._ask(("alerts", alerts), lambda: self._gates.check_alerts(alerts))

    def acquire_lock(self, server: LockServer, holder: LockHolder) -> GateAnswer:
        """Return the answer of the lock server, once."""
        if self._is_opposite_running(("release", server, holder)):
            return GatePending()
        return self._ask(
            ("acquire", server, holder),
            lambda: self._gates.acquire_lock(server, holder),
            once=True,
        )

    def release_lock(self, server: LockServer, holder: LockHolder) -> GateAnswer:
        """Return the answer of the lock server, once."""
        # A lock that was granted before its release must not count as granted after it.
        if self._is_opposite_running(("acquire", server, holder)):
            return GatePending()
        return self._ask(
            ("release", server, holder),
            lambda: self._gates.release_lock(server, holder),
            once=True,
        )

    def _is_opposite_running(self, key: Hashable) -> bool:
        """Return True while the opposite request runs: the server must see them in order."""
        with self._lock:
            found = self._questions.get(key)
            if found is not None and found.is_running:
                return True
            self._questions.pop(key, None)
            return False

    def _ask(
        self, key: Hashable, send: Callable[[], GateAnswer], *, once: bool = False
    ) -> GateAnswer:
        now = self._clock.monotonic()
        with self._lock:
            self._prune_questions(now)
            found = self._questions.setdefault(key, _Question())
            is_current = self._is_current(found, now)
            if not is_current and not found.is_running:
                found.is_running = True
                self._executor.submit(self._send, found, send)
            if found.answered_at is None or (found.answer is None and not is_current):
                return GatePending()
            if found.answer is None and once:
                found.is_used = True
            # A closed gate stays closed until it answers again.
            return found.answer

    def _is_current(self, found: _Question, now: float) -> bool:
        if found.answered_at is None or found.is_used:
            return False
        limit_s = OPEN_FOR_S if found.answer is None else CLOSED_FOR_S
        return now - found.answered_at < limit_s

    def _send(self, question: _Question, send: Callable[[], GateAnswer]) -> None:
        try:
            answer = send()
        except Exception as error:
            # A bug with one gate must not end its thread without an answer.
            log.exception("cannot ask a gate")
            answer = GateBlocked(f"cannot ask the gate: {error}", GATE_UNAVAILABLE)
        with self._lock:
            question.answer = answer
            question.answered_at = self._clock.monotonic()
            question.is_running = question.is_used = False

    def _prune_questions(self, now: float) -> None:
        old = [
            key
            for key, found in self._questions.items()
            if found.answered_at is not None
            and not found.is_running
            and now - found.answered_at > _FORGET_AFTER_S
        ]
        for key in old:
            del self._questions[key]
