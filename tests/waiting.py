"""Waiting in tests: for a condition, with a limit, and never for a time."""

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = float(os.environ.get("TREENAIL_TEST_PATIENCE", "4"))
"""The factor of all limits, which are those of an idle machine."""


def wait_until(condition: Callable[[], T], *, limit_s: float = 10.0) -> T:
    """Return the first true result of ``condition``; raise AssertionError after ``limit_s``.

    `PATIENCE` multiplies the limit: a busy machine is many times slower, and a test that passes
    never waits that long.
    """
    limit_s *= PATIENCE
    end = time.monotonic() + limit_s
    pause_s = 0.01
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {limit_s:g} s: {found!r}"
        time.sleep(pause_s)
        # Most of the CPU time of a test that waits for seconds is that of its looks.
        pause_s = min(pause_s * 1.1, 0.04)
    return found
