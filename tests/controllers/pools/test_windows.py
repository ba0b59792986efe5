"""Maintenance windows in wall-clock time, also across clock changes."""

from datetime import UTC, datetime
from typing import Any

import pytest

from treenail.controllers.pools.maintenance_windows import (
    DAYS,
    MaintenanceWindow,
    WindowClosed,
    WindowOpen,
    find_window_state,
)
from treenail.errors import ConfigError

HOUR = 3600.0


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def weekly(start: str, hours: float, *days: str, zone: str = "Europe/Berlin") -> MaintenanceWindow:
    return MaintenanceWindow.from_json(
        {
            "start": start,
            "days": list(days or DAYS),
            "duration": f"{hours * HOUR:.0f}s",
            "timeZone": zone,
        }
    )


SATURDAY = weekly("01:00", 4, "Sat")


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        # 2026-01-03 is a Saturday; Berlin is one hour ahead of UTC in winter, two in summer.
        ("2026-01-02T23:59:59", WindowClosed(1.0, "2026-01-03 01:00 Europe/Berlin")),
        ("2026-01-03T00:00:00", WindowOpen(4 * HOUR)),
        ("2026-01-03T03:59:59", WindowOpen(1.0)),
        ("2026-01-03T04:00:00", WindowClosed(164 * HOUR, "2026-01-10 01:00 Europe/Berlin")),
        ("2026-07-03T23:00:00", WindowOpen(4 * HOUR)),
        ("2026-07-04T03:00:00", WindowClosed(164 * HOUR, "2026-07-11 01:00 Europe/Berlin")),
    ],
)
def test_window_opens_by_wall_clock(now: str, expected: WindowOpen | WindowClosed) -> None:
    assert find_window_state([SATURDAY], at(now)) == expected


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        # On 2026-03-29 the clock goes from 02:00 (01:00 UTC) to 03:00.
        ("2026-03-29T00:30:00", WindowClosed(HOUR, "2026-03-29 03:30 Europe/Berlin")),
        ("2026-03-29T01:30:00", WindowOpen(HOUR)),
        ("2026-03-29T02:30:00", WindowClosed(167 * HOUR - HOUR, "2026-04-05 02:30 Europe/Berlin")),
    ],
)
def test_start_skipped_by_clock_change_comes_after_it(
    now: str, expected: WindowOpen | WindowClosed
) -> None:
    assert find_window_state([weekly("02:30", 1, "Sun")], at(now)) == expected


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        # On 2026-10-25 the clock goes from 03:00 (01:00 UTC) back to 02:00.
        ("2026-10-25T00:30:00", WindowOpen(HOUR)),
        ("2026-10-25T01:29:59", WindowOpen(1.0)),
        ("2026-10-25T01:30:00", WindowClosed(168 * HOUR, "2026-11-01 02:30 Europe/Berlin")),
    ],
)
def test_start_repeated_by_clock_change_counts_once(
    now: str, expected: WindowOpen | WindowClosed
) -> None:
    assert find_window_state([weekly("02:30", 1, "Sun")], at(now)) == expected


@pytest.mark.parametrize("day", ["2026-03-28T23:00:00", "2026-10-24T22:00:00"])
def test_window_across_clock_change_keeps_its_duration(day: str) -> None:
    night = weekly("00:00", 6, "Sun")
    assert find_window_state([night], at(day)) == WindowOpen(6 * HOUR)
    assert find_window_state([night], at(day) + 6 * HOUR - 1) == WindowOpen(1.0)
    assert isinstance(find_window_state([night], at(day) + 6 * HOUR), WindowClosed)


@pytest.mark.parametrize("hour", range(48))
def test_daily_window_of_24_hours_stays_open_on_a_day_of_25_hours(hour: int) -> None:
    # Summer time ends in Berlin on 2026-10-25 at 01:00 UTC.
    now = at("2026-10-24T12:30:00") + hour * HOUR
    assert find_window_state([weekly("00:00", 24)], now) == WindowOpen()


def test_window_of_one_whole_day_closes_at_its_wall_clock_time() -> None:
    sunday = weekly("00:00", 24, "Sun")
    # 25 hours, from Saturday 22:00 to Sunday 23:00 in UTC.
    assert find_window_state([sunday], at("2026-10-25T22:59:59")) == WindowOpen(1.0)
    assert isinstance(find_window_state([sunday], at("2026-10-25T23:00:00")), WindowClosed)


def test_adjacent_or_overlapping_windows_are_one() -> None:
    windows = [weekly("01:00", 2, "Sat"), weekly("03:00", 2, "Sat"), weekly("04:00", 3, "Sat")]
    assert find_window_state(windows, at("2026-01-03T00:00:00")) == WindowOpen(6 * HOUR)


def test_windows_covering_the_week_never_close() -> None:
    assert find_window_state([weekly("00:00", 24)], at("2026-03-28T12:00:00")) == WindowOpen(None)
    assert find_window_state([], 0.0) == WindowOpen(None)


def test_window_past_midnight_belongs_to_its_opening_day() -> None:
    friday = weekly("22:00", 10, "Fri")
    assert find_window_state([friday], at("2026-01-03T06:59:00")) == WindowOpen(60.0)
    week = weekly("12:00", 168, "Mon")
    assert find_window_state([week], at("2026-01-05T10:00:00")) == WindowOpen(None)


def test_windows_use_their_own_time_zones() -> None:
    tokyo = weekly("01:00", 1, "Sat", zone="Asia/Tokyo")
    assert find_window_state([tokyo], at("2026-01-02T16:00:00")) == WindowOpen(HOUR)
    assert find_window_state([tokyo, SATURDAY], at("2026-01-02T17:00:00")) == WindowClosed(
        7 * HOUR, "2026-01-03 01:00 Europe/Berlin"
    )


@pytest.mark.parametrize(
    ("fields", "length_s", "sentence"),
    [
        ({}, None, "w.duration: expected a duration such as 10m or 1h30m, found nothing"),
        ({}, 0.0, "w.duration: expected a duration of at most a week"),
        ({}, 168 * HOUR + 1, "w.duration: expected a duration of at most a week"),
        (
            {"days": ["Sat", "Samstag"]},
            HOUR,
            "w.days[1]: expected one of Mon, Tue, Wed, Thu, Fri, Sat, Sun, found 'Samstag'",
        ),
        (
            {"days": []},
            HOUR,
            "w.days: expected at least one of Mon, Tue, Wed, Thu, Fri, Sat, Sun",
        ),
        ({"start": "25:00"}, HOUR, "w.start: expected a time such as 01:30, found '25:00'"),
        ({"start": ""}, HOUR, "w.start: expected a string, found an empty string"),
        (
            {"timeZone": "Mars/Olympus"},
            HOUR,
            "w.timeZone: expected a time zone such as Europe/Berlin, found 'Mars/Olympus'",
        ),
        (
            {"timeZone": "../../etc/passwd"},
            HOUR,
            "w.timeZone: expected a time zone such as Europe/Berlin, found '../../etc/passwd'",
        ),
        (
            {"timeZone": "Europe"},
            HOUR,
            "w.timeZone: expected a time zone such as Europe/Berlin, found 'Europe'",
        ),
        ({"timeZone": None}, HOUR, "w.timeZone: expected a string, found nothing"),
    ],
)
def test_invalid_window_is_rejected(
    fields: dict[str, Any], length_s: float | None, sentence: str
) -> None:
    duration = None if length_s is None else f"{length_s:.0f}s"
    document = {
        "days": ["Sat"], "start": "01:00", "duration": duration, "timeZone": "UTC", **fields,
    }  # fmt: skip
    with pytest.raises(ConfigError) as raised:
        MaintenanceWindow.from_json(document, "w")
    assert str(raised.value) == sentence
