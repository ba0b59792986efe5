"""The number of random walks in a test: what fits into a time budget, or a fixed number.

TREENAIL_WALK_SECONDS is the budget of each test in seconds (default: 5); `make test-long` sets a
larger one. TREENAIL_WALKS makes the walks with all seeds below that number instead, however long
they take. TREENAIL_WALK_SEED makes the walk with that one seed, to reproduce a failure.
"""

import os
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

SECONDS = float(os.environ.get("TREENAIL_WALK_SECONDS", "5"))
COUNT = int(os.environ.get("TREENAIL_WALKS", "0"))
SEED = os.environ.get("TREENAIL_WALK_SEED", "")
PARTS = 4
"""Into how many tests the seeds are divided, which can run in parallel."""


T = TypeVar("T", bound=Callable[..., object])


def walk(test: T) -> T:
    """Mark a test with the parameter ``part``, whose seeds come from `seeds`."""
    for mark in (
        pytest.mark.walk,
        pytest.mark.limit(86_400.0 if COUNT else 60.0 + 2 * SECONDS),
        pytest.mark.parametrize("part", range(1 if SEED else PARTS)),
    ):
        test = mark(test)
    return test


def seeds(part: int) -> Iterator[int]:
    """Yield the seeds of this part: at least one, then until the time or the number is used up."""
    if SEED:
        yield int(SEED)
        return
    end = time.monotonic() + SECONDS
    seed = part
    while seed == part or (seed < COUNT if COUNT else time.monotonic() < end):
        yield seed
        seed += PARTS
