"""Gates that are asked on other threads: answers, their age, and their order."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from tests.fakes.clock import FakeClock
from treenail.controllers.pools.os_image import GateAnswer, GateBlocked, GatePending, GateWaiting
from treenail.controllers.pools.rollout_policy import LockServer, PrometheusAlerts
from treenail.controllers.rollout.external_gates import (
    CLOSED_FOR_S,
    OPEN_FOR_S,
    BackgroundGates,
    LockHolder,
)

ALERTS = PrometheusAlerts("http://prometheus.example.com", ("ApiErrors",))
SERVER = LockServer("http://locks.example.com", "workers")
HOLDER = LockHolder("n0", "8c1f")
CLOSED = GateWaiting("waiting: alert ApiErrors is firing")


class LaterExecutor(Executor):
    """Runs what was submitted when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], Any]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.waiting.append(lambda: fn(*args, **kwargs))
        return Future()

    def run_next(self) -> None:
        self.waiting.pop(0)()


class RecordedGates:
    """Gates with a settable answer."""

    def __init__(self) -> None:
        self.answer: GateAnswer | Exception = None
        self.calls: list[str] = []

    def check_alerts(self, alerts: PrometheusAlerts | None) -> GateAnswer:
        return self._record("alerts")

    def acquire_lock(self, server: LockServer, holder: LockHolder) -> GateAnswer:
        return self._record("acquire")

    def release_lock(self, server: LockServer, holder: LockHolder) -> GateAnswer:
        return self._record("release")

    def _record(self, call: str) -> GateAnswer:
        self.calls.append(call)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Site:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.later = LaterExecutor()
        self.gates = RecordedGates()
        self.background = BackgroundGates(self.gates, self.clock, self.later)

    def check(self) -> GateAnswer:
        return self.background.check_alerts(ALERTS)


def test_gate_that_hangs_is_pending_and_asked_once() -> None:
    site = Site()
    for _ in range(5):
        assert site.check() == GatePending()
    assert len(site.later.waiting) == 1


def test_open_gate_is_asked_again_after_a_while() -> None:
    site = Site()
    site.check()
    site.later.run_next()
    assert site.check() is None
    site.clock.move(OPEN_FOR_S)
    assert site.check() == GatePending()
    assert len(site.later.waiting) == 1


def test_closed_gate_stays_closed_until_it_answers_again() -> None:
    site = Site()
    site.gates.answer = CLOSED
    site.check()
    site.later.run_next()
    assert site.check() == CLOSED
    assert site.later.waiting == []
    site.clock.move(CLOSED_FOR_S)
    assert site.check() == CLOSED
    site.gates.answer = None
    site.later.run_next()
    assert site.check() is None


def test_granted_lock_counts_once() -> None:
    site = Site()
    assert site.background.acquire_lock(SERVER, HOLDER) == GatePending()
    site.later.run_next()
    assert site.background.acquire_lock(SERVER, HOLDER) is None
    assert site.background.acquire_lock(SERVER, HOLDER) == GatePending()


def test_release_waits_for_a_running_request_of_the_same_lock() -> None:
    site = Site()
    site.background.acquire_lock(SERVER, HOLDER)
    assert site.background.release_lock(SERVER, HOLDER) == GatePending()
    site.later.run_next()
    assert site.background.release_lock(SERVER, HOLDER) == GatePending()
    site.later.run_next()
    assert site.gates.calls == ["acquire", "release"]
    assert site.background.release_lock(SERVER, HOLDER) is None
    assert site.background.acquire_lock(SERVER, HOLDER) == GatePending()


def test_error_of_a_gate_is_an_answer() -> None:
    site = Site()
    site.gates.answer = ValueError("no host")
    site.check()
    site.later.run_next()
    assert isinstance(site.check(), GateBlocked)


def test_policy_without_alerts_asks_nothing() -> None:
    site = Site()
    assert site.background.check_alerts(None) is None
    assert site.later.waiting == []
