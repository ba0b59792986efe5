"""Estimates of the remaining time, with and without maintenance windows."""

from datetime import UTC, datetime

import pytest

from tests.controllers.rollout.builders import NEW, node
from treenail.controllers.pools.maintenance_windows import DAYS, MaintenanceWindow
from treenail.controllers.pools.rollout_record import (
    DEFAULT_NODE_S,
    estimate_node_s,
    estimate_remaining_s,
    format_duration,
)

HOUR = 3600.0
EVERY_NIGHT = {"days": list(DAYS), "start": "01:00", "duration": "2h", "timeZone": "UTC"}
NIGHT = MaintenanceWindow.from_json(EVERY_NIGHT)
MIDNIGHT = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


def test_node_duration_is_median_of_updated_nodes() -> None:
    through = [
        node("a", NEW, started_at=0.0, ready_changed_at=100.0),
        node("b", NEW, started_at=0.0, ready_changed_at=300.0),
        node("c", NEW, started_at=0.0, ready_changed_at=9000.0),
    ]
    silent = [
        node("d"),
        node("e", NEW),
        node("f", NEW, started_at=500.0, ready_changed_at=10.0),
        node("g", NEW, started_at=0.0, ready_changed_at=1.0, state="Working"),
    ]
    assert estimate_node_s([*silent, *through], NEW) == (300.0 + DEFAULT_NODE_S) / 2
    assert estimate_node_s(through[1:], NEW) == DEFAULT_NODE_S
    # Neither one slow nor one fast node decides it.
    assert estimate_node_s(through[:1], NEW) == estimate_node_s(through[2:], NEW) == DEFAULT_NODE_S
    assert estimate_node_s(silent, NEW) == DEFAULT_NODE_S


@pytest.mark.parametrize(
    ("remaining", "at_once", "expected"),
    [(0, 1, 0.0), (1, 5, 480.0), (5, 5, 480.0), (6, 5, 960.0), (500, 50, 4800.0)],
)
def test_remaining_time_counts_batches(remaining: int, at_once: int, expected: float) -> None:
    assert estimate_remaining_s(remaining, at_once, 480.0, (), MIDNIGHT) == expected


def test_batches_that_do_not_fit_wait_for_next_window() -> None:
    # 15 batches of 8 minutes fit into a window of two hours.
    assert estimate_remaining_s(15, 1, 480.0, (NIGHT,), MIDNIGHT) == HOUR + 15 * 480.0
    assert estimate_remaining_s(16, 1, 480.0, (NIGHT,), MIDNIGHT) == 25 * HOUR + 480.0
    assert estimate_remaining_s(31, 1, 480.0, (NIGHT,), MIDNIGHT + HOUR) == 48 * HOUR + 480.0


def test_too_short_window_gives_no_estimate() -> None:
    assert estimate_remaining_s(1, 1, 3 * HOUR, (NIGHT,), MIDNIGHT) is None


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "1 min"), (90, "2 min"), (6000, "100 min"), (7200, "2 h"), (200_000, "2 days")],
)
def test_duration_is_rounded(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected
