"""The queue of keys: each once, never twice at a time, later when it failed."""

import threading

import pytest

from tests.fakes.clock import FakeClock
from treenail.clock import SystemClock
from treenail.controllers.runtime.workqueue import WorkQueue


def queue(clock: FakeClock, **more: float) -> WorkQueue:
    return WorkQueue(clock, jitter=lambda: 0.0, **more)  # type: ignore[arg-type]  # numbers


def taken(found: WorkQueue) -> list[str]:
    """All keys that are handed out now; each is done at once."""
    keys = []
    while (item := found.get(0)) is not None:
        keys.append(item[0])
        found.done(item[0])
    return keys


def test_key_that_waits_already_is_not_added_again() -> None:
    found = queue(FakeClock())
    for key in ("b", "a", "b"):
        found.add(key)

    assert len(found) == 2
    assert taken(found) == ["b", "a"]
    assert found.adds == 2


def test_key_that_changes_while_it_is_worked_on_comes_again_afterwards() -> None:
    found = queue(FakeClock())
    found.add("a")
    assert found.get(0) == ("a", 0)
    found.add("a")
    assert found.get(0) is None, "never twice at a time"
    found.done("a")

    assert taken(found) == ["a"]


def test_earliest_of_several_wishes_counts() -> None:
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


def test_key_that_is_due_while_it_is_worked_on_comes_again() -> None:
    clock = FakeClock()
    found = queue(clock)
    found.add("a")
    assert found.get(0) == ("a", 0)
    found.add_after("a", 1)
    clock.move(2)
    assert found.get(0) is None
    found.done("a")
    assert found.get(0) == ("a", 0)


def test_wait_for_a_worker_is_measured() -> None:
    clock = FakeClock()
    found = queue(clock)
    found.add("a")
    clock.move(3)

    assert found.get(0) == ("a", 3)


def test_pauses_double_for_each_key_by_itself_until_it_is_forgotten() -> None:
    found = queue(FakeClock(), first_retry_s=1, max_retry_s=5)

    assert [found.add_rate_limited("a") for _ in range(5)] == [1, 2, 4, 5, 5]
    assert found.add_rate_limited("b") == 1
    found.forget("a")
    assert found.add_rate_limited("a") == 1
    assert found.add_rate_limited("a", min_s=60) == 60
    assert found.retries == 8


def test_pauses_differ_by_chance() -> None:
    chances = iter((0.0, 0.5))
    found = WorkQueue(FakeClock(), first_retry_s=1, jitter=lambda: next(chances))

    assert (found.add_rate_limited("a"), found.add_rate_limited("b")) == (1, 0.75)


def test_closed_queue_hands_out_nothing() -> None:
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
def test_worker_that_waits_is_woken(wake) -> None:  # type: ignore[no-untyped-def]  # by a table
    found = WorkQueue(SystemClock())
    seen: list[object] = []
    worker = threading.Thread(target=lambda: seen.append(found.get()))
    worker.start()
    wake(found)
    worker.join(10)

    assert len(seen) == 1


def test_worker_that_waits_takes_what_becomes_due() -> None:
    found = WorkQueue(SystemClock())
    found.add_after("a", 0.01)
    item = found.get(10)

    assert item is not None
    assert item[0] == "a"
