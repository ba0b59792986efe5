"""Waiting in tests: for a condition, with a limit, and never for a time."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], *, limit_s: float = 10.0) -> T:
    """Return the first true result of ``condition``; raise AssertionError after ``limit_s``."""
    end = time.monotonic() + limit_s
    pause_s = 0.01
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {limit_s:g} s: {found!r}"
        time.sleep(pause_s)
        # Most of the CPU time of a test that waits for seconds is that of its looks.
        pause_s = min(pause_s * 1.1, 0.04)
    return found
