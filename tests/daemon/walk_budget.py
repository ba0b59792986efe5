"""The time budget of tests with too many cases: random walks, and an interruption at any effect.

TREENAIL_WALK_SECONDS is the budget of each test in seconds of CPU time (default: 0.3), so that a
busy machine tests as much as an idle one; after three times as long it ends on any machine.
`make test-long` sets a budget that all cases of an exhaustive test fit into.
TREENAIL_WALKS makes the walks with all seeds below that number instead, however long they take.
TREENAIL_WALK_SEED makes the walk with that one seed, to reproduce a failure.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pytest

SECONDS = float(os.environ.get("TREENAIL_WALK_SECONDS", "0.3"))
COUNT = int(os.environ.get("TREENAIL_WALKS", "0"))
SEED = os.environ.get("TREENAIL_WALK_SEED", "")
PARTS = 4
"""Into how many tests the seeds are divided, which can run in parallel."""

Test = TypeVar("Test", bound=Callable[..., object])
T = TypeVar("T")


def exhaustive(test: Test) -> Test:
    """Mark a test whose cases come from `sample`."""
    for mark in (
        pytest.mark.walk,
        pytest.mark.limit(86_400.0 if COUNT else 600.0 + 4 * SECONDS),
    ):
        test = mark(test)
    return test


def walk(test: Test) -> Test:
    """Mark a test with the parameter ``part``, whose seeds come from `seeds`."""
    return exhaustive(pytest.mark.parametrize("part", range(1 if SEED else PARTS))(test))


def seeds(part: int) -> Iterator[int]:
    """Yield the seeds of this part: at least one, then until the time or the number is used up."""
    if SEED:
        yield int(SEED)
        return
    has_time = start_budget()
    seed = part
    while seed == part or (seed < COUNT if COUNT else has_time()):
        yield seed
        seed += PARTS


def sample(cases: Sequence[T]) -> Iterator[T]:
    """Yield each case once until the time is used up, at any moment evenly spread; at least one."""
    has_time = start_budget()
    for count, index in enumerate(spread(len(cases))):
        if count and not has_time():
            return
        yield cases[index]


def start_budget() -> Callable[[], bool]:
    """Return a function that returns whether some of the time is left."""
    cpu_end, end = time.process_time() + SECONDS, time.monotonic() + 3 * SECONDS
    return lambda: time.process_time() < cpu_end and time.monotonic() < end


def spread(count: int) -> Iterator[int]:
    """Yield the numbers below ``count`` in steps of about the golden section of it."""
    # Multiples of the golden section fill an interval evenly (low-discrepancy sequence).
    step = round(count * 0.618)
    while math.gcd(step, count) != 1:
        step += 1
    return (index * step % count for index in range(count))
