"""Maintenance windows: when a node may be taken out of service.

A window opens at a time of the wall clock and stays open for a length of real time, so that it
is never shorter or longer where a clock change falls into it. A start that the clock skips is
taken as late as the clock is set forward; of a start that comes twice the first one counts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from treenail.api.decode import Fields

DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_WEEK = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Window:
    """One window of a week."""

    days: frozenset[int]
    """Days on which it opens; Monday is 0."""
    start: time
    length: timedelta
    zone: ZoneInfo

    def openings(self, now: datetime) -> Iterator[tuple[datetime, datetime]]:
        """Opening and closing times near ``now``, past ones first."""
        first = (now - self.length).astimezone(self.zone).date() - timedelta(days=1)
        for offset in range(self.length.days + 10):
            day = first + timedelta(days=offset)
            if day.weekday() in self.days:
                opens = datetime.combine(day, self.start, self.zone).astimezone(UTC)
                yield opens, opens + self.length


@dataclass(frozen=True, slots=True)
class Open:
    """Nodes may be taken out of service; ``left_s`` until it closes, None when it never does."""

    left_s: float | None = None


@dataclass(frozen=True, slots=True)
class Closed:
    """They may not; ``opens_in_s`` until they may, ``opens_at`` for people."""

    opens_in_s: float
    opens_at: str


def look(windows: Iterable[Window], now: float) -> Open | Closed:
    """Whether any of the windows is open at ``now`` (seconds since the epoch).

    Without windows it is always open. Windows that overlap or touch are one.
    """
    moment = datetime.fromtimestamp(now, UTC)
    spans = sorted(
        (opens, closes, str(found.zone))
        for found in windows
        for opens, closes in found.openings(moment)
    )
    if not spans:
        return Open()
    closing = moment
    for opens, closes, _zone in spans:
        if opens <= closing:
            closing = max(closing, closes)
    if closing > moment:
        left = closing - moment
        return Open(None if left > _WEEK else left.total_seconds())
    opens, _closes, zone = next(span for span in spans if span[0] > moment)
    local = opens.astimezone(ZoneInfo(zone))
    return Closed((opens - moment).total_seconds(), f"{local:%Y-%m-%d %H:%M} {zone}")


def window(fields: Fields, length_s: float | None) -> Window:
    """The window in a document; raises `ConfigError`."""
    if not length_s or length_s > _WEEK.total_seconds():
        raise fields.error(f"{fields.at('duration')}: expected a duration of at most a week")
    days = fields.texts("days") or DAYS
    for index, day in enumerate(days):
        if day not in DAYS:
            raise fields.error(
                f"{fields.at('days')}[{index}]: expected one of {', '.join(DAYS)}, "
                f"found {day!r:.40}"
            )
    start = fields.required_text("start")
    try:
        clock = datetime.strptime(start, "%H:%M").time()  # noqa: DTZ007  # a time without a date
    except ValueError as error:
        raise fields.error(
            f"{fields.at('start')}: expected a time such as 01:30, found {start!r:.40}"
        ) from error
    return Window(
        days=frozenset(map(DAYS.index, days)),
        start=clock,
        length=timedelta(seconds=length_s),
        zone=_zone(fields),
    )


def _zone(fields: Fields) -> ZoneInfo:
    name = fields.required_text("timeZone")
    try:
        return ZoneInfo(name)
    # A key is looked for among the files of the system, and may be no name of a file at all.
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise fields.error(
            f"{fields.at('timeZone')}: expected a time zone such as Europe/Berlin, "
            f"found {name!r:.60}"
        ) from error
