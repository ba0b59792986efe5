"""The work queue deduplicates, delays and retries keys."""

import threading

import pytest

from tests.fakes.clock import FakeClock
from treenail.clocks import SystemClock
from treenail.controllers.runtime.workqueue import WorkQueue


def queue(clock: FakeClock, **more: float) -> WorkQueue:
    return WorkQueue(clock, jitter=lambda: 0.0, **more)  # type: ignore[arg-type]  # numbers


def taken(found: WorkQueue) -> list[str]:
    """Return all keys that are ready, and mark each as done."""
    keys = []
    while (item := found.get(0)) is not None:
        keys.append(item[0])
        found.done(item[0])
    return keys


def test_queued_key_is_not_added_again() -> None:
    found = queue(FakeClock())
    for key in ("b", "a", "b"):
        found.add(key)

    assert len(found) == 2
    assert taken(found) == ["b", "a"]
    assert found.adds == 2


def test_key_added_while_processing_is_queued_again() -> None:
    found = queue(FakeClock())
    found.add("a")
    assert found.get(0) == ("a", 0)
    found.add("a")
    assert found.get(0) is None, "never twice at a time"
    found.done("a")

    assert taken(found) == ["a"]


def test_earliest_delay_of_a_key_wins() -> None:
    clock = FakeClock()
    found = queue(clock)
    found.add_after("a", 30)
    found.add_after("a", 10)
    found.add_after("a", 20)
    found.add_after("b", 5)

    assert taken(found) == []
    clock.move(10)
    assert taken(found) == ["b", "a"]
    clock.move(60)
    assert taken(found) == []


def test_delayed_key_due_while_processing_is_queued_again() -> None:
    clock = FakeClock()
    found = queue(clock)
    found.add("a")
    assert found.get(0) == ("a", 0)
    found.add_after("a", 1)
    clock.move(2)
    assert found.get(0) is None
    found.done("a")
    assert found.get(0) == ("a", 0)


def test_queue_wait_is_measured() -> None:
    clock = FakeClock()
    found = queue(clock)
    found.add("a")
    clock.move(3)

    assert found.get(0) == ("a", 3)


def test_retry_delay_doubles_per_key_until_forgotten() -> None:
    found = queue(FakeClock(), first_retry_s=1, max_retry_s=5)

    assert [found.add_rate_limited("a") for _ in range(5)] == [1, 2, 4, 5, 5]
    assert found.add_rate_limited("b") == 1
    found.forget("a")
    assert found.add_rate_limited("a") == 1
    assert found.add_rate_limited("a", min_s=60) == 60
    assert found.retries == 8


def test_retry_delay_has_jitter() -> None:
    chances = iter((0.0, 0.5))
    found = WorkQueue(FakeClock(), first_retry_s=1, jitter=lambda: next(chances))

    assert (found.add_rate_limited("a"), found.add_rate_limited("b")) == (1, 0.75)


def test_closed_queue_returns_no_key() -> None:
    clock = FakeClock()
    found = queue(clock)
    found.add("a")
    found.add_after("b", 1)
    found.close()
    clock.move(2)
    found.add("c")

    assert found.get() is None
    assert len(found) == 0


@pytest.mark.parametrize("wake", [WorkQueue.close, lambda found: found.add("a")])
def test_waiting_worker_is_woken(wake) -> None:  # type: ignore[no-untyped-def]  # by a table
    found = WorkQueue(SystemClock())
    seen: list[object] = []
    worker = threading.Thread(target=lambda: seen.append(found.get()))
    worker.start()
    wake(found)
    worker.join(10)

    assert len(seen) == 1


def test_waiting_worker_gets_a_delayed_key() -> None:
    found = WorkQueue(SystemClock())
    found.add_after("a", 0.01)
    item = found.get(10)

    assert item[0] == "a"
