"""Maintenance windows: the times when a node may leave service.

A window opens at a wall-clock time and stays open for a fixed duration, so that a clock change
neither shortens nor lengthens it. If the clock skips the start, the window opens that much later.
If the start occurs twice, the first one counts. A window of whole days closes at its wall-clock
time if that is later.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from treenail.encoding import codec, json_values

DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_DAY = timedelta(days=1)
_WEEK = timedelta(days=7)
_START = re.compile(r"([01]?[0-9]|2[0-3]):([0-5]?[0-9])")
# Not \d, which matches the digits of every script; the schema of the CRD has the same limits.
_DURATION = re.compile(r"(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,6})s)?")


def _read_duration(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if not text:
        raise json_values.Mismatch("a duration such as 10m or 1h30m", text)
    if not match:
        raise json_values.Mismatch(
            problem=f"expected a duration such as 10m or 1h30m, found {text!r:.40}"
        )
    hours, minutes, rest = (int(part or 0) for part in match.groups())
    return hours * 3600.0 + minutes * 60.0 + rest


Duration = Annotated[float, codec.Via(_read_duration, wire=str)]
"""Seconds; a text such as ``1h30m`` or ``45s`` in JSON."""


def _read_window_duration(seconds: float) -> timedelta:
    if not 0 < seconds <= _WEEK.total_seconds():
        raise json_values.Mismatch(problem="expected a duration of at most a week")
    return timedelta(seconds=seconds)


def _read_days(days: tuple[str, ...]) -> frozenset[int]:
    if not days:
        # No days could mean every day. But the API server drops a misspelt field unless the client
        # requests strict validation, and such a window would be open every day.
        raise json_values.Mismatch(problem=f"expected at least one of {', '.join(DAYS)}")
    for index, day in enumerate(days):
        if day not in DAYS or day in days[:index]:
            expected = f"expected one of {', '.join(DAYS)}, found {day!r:.40}"
            twice = f"{day} is there twice"
            raise json_values.Mismatch(problem=twice if day in DAYS else expected, at=[index])
    return frozenset(map(DAYS.index, days))


def _read_start(start: str) -> time:
    if (match := _START.fullmatch(start)) is None:
        raise json_values.Mismatch(problem=f"expected a time such as 01:30, found {start!r:.40}")
    return time(int(match[1]), int(match[2]))


def _read_zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    # zoneinfo looks the key up as a file: an odd key fails with ValueError or OSError instead.
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        actual = f"found {name!r:.60}"
        problem = f"expected a time zone such as Europe/Berlin, {actual}"
        raise json_values.Mismatch(problem=problem) from error


@dataclass(frozen=True, slots=True)
class MaintenanceWindow(codec.JsonObject, is_strict=True):
    """A window that recurs every week."""

    days: Annotated[frozenset[int], codec.Via(_read_days, wire=tuple[str, ...])]
    """Weekdays on which it opens; Monday is 0."""
    start: Annotated[time, codec.Via(_read_start, wire=codec.NonEmptyText)]
    duration: Annotated[timedelta, codec.Via(_read_window_duration, wire=Duration)]
    zone: Annotated[ZoneInfo, codec.Key("timeZone"), codec.Via(_read_zone, wire=codec.NonEmptyText)]

    def find_openings(self, now: datetime) -> Iterator[tuple[datetime, datetime]]:
        """Yield opening and closing times near ``now``, past ones first."""
        first = (now - self.duration).astimezone(self.zone).date() - timedelta(days=1)
        for offset in range(self.duration.days + 10):
            day = first + timedelta(days=offset)
            if day.weekday() in self.days:
                opens = datetime.combine(day, self.start, self.zone).astimezone(UTC)
                yield opens, max(opens + self.duration, self._find_whole_day_end(day))

    def _find_whole_day_end(self, day: date) -> datetime:
        """Return the wall-clock end of a window of whole days that opens on the day.

        The day of a clock change may have 25 hours. A window of 24 hours on every day must not
        close for the last one.
        """
        days = self.duration.days if self.duration % _DAY == timedelta() else 0
        end = datetime.combine(day + timedelta(days=days), self.start, self.zone)
        return end.astimezone(UTC)


@dataclass(frozen=True, slots=True)
class WindowOpen:
    """A window is open; ``closes_in_s`` is None when it never closes."""

    closes_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class WindowClosed:
    """No window is open; ``opens_at`` is the local time, formatted for messages."""

    opens_in_s: float
    opens_at: str


def find_window_state(
    windows: Iterable[MaintenanceWindow], now: float
) -> WindowOpen | WindowClosed:
    """Return the state of the windows at ``now`` (seconds since the epoch).

    Without windows it is always open. Windows that overlap or touch count as one.
    """
    moment = datetime.fromtimestamp(now, UTC)
    spans = sorted(
        (opens, closes, str(window.zone))
        for window in windows
        for opens, closes in window.find_openings(moment)
    )
    if not spans:
        return WindowOpen()
    closing = moment
    for opens, closes, _zone in spans:
        if opens <= closing:
            closing = max(closing, closes)
    if closing > moment:
        left = closing - moment
        return WindowOpen(None if left > _WEEK else left.total_seconds())
    opens, _closes, zone = next(span for span in spans if span[0] > moment)
    local = opens.astimezone(ZoneInfo(zone))
    return WindowClosed((opens - moment).total_seconds(), f"{local:%Y-%m-%d %H:%M} {zone}")
