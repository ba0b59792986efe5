"""Strikes each D-Bus method that an agent calls, once in each phase of an update."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fakes.bus_proxy import BusCall, FaultKind
from treenail.update.state.ledger_record import Phase

_TURNED_BACK = (Phase.CANCELLING, Phase.ROLLING_BACK)


@dataclass(frozen=True, slots=True)
class BusPoint:
    """A method and the phase in which the agent calls it."""

    call: BusCall
    phase: str
    """Empty without an update."""

    def __str__(self) -> str:
        return f"{self.call} ({self.phase or 'at rest'})"


@dataclass
class BusStrikes:
    """Decides which call fails. `choose_fault` runs in the threads of the proxy.

    A strike begins at a call of a method in a phase that was not struck, and lasts until `lift`:
    until then each call of the method fails.
    """

    read_phase: Callable[[], str]
    kind: FaultKind | None = None
    """The fault; None to record only."""
    is_wanted: Callable[[BusPoint], bool] = lambda _: True
    seen: dict[BusPoint, int] = field(default_factory=dict)
    """How often each was called."""
    struck: list[BusPoint] = field(default_factory=list)
    active: BusPoint | None = None
    hits: int = 0
    """How often the active strike has hit."""
    has_continued: bool = False
    """The update continued to another phase under the active strike."""
    later_phase: str = ""
    """That phase."""
    has_turned_back: bool = False
    """The update turned back under the active strike: only the method itself shows progress."""
    reason: str = ""
    """The reason of the Node when the active strike began."""
    read_reason: Callable[[], str] = str
    on_strike: Callable[[BusPoint], None] = lambda _: None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def choose_fault(self, call: BusCall) -> FaultKind | None:
        point = BusPoint(call, self.read_phase())
        with self._lock:
            self.seen[point] = self.seen.get(point, 0) + 1
            if self.kind is None:
                return None
            if self.active is None:
                if point in self.struck or not self.is_wanted(point):
                    return None
                self.struck.append(point)
                self.hits, self.reason = 0, self.read_reason()
                self.has_continued = self.has_turned_back = False
                # Last: the test reads the rest once there is an active strike.
                self.active = point
                self.on_strike(point)
            is_hit = call == self.active.call
            if point.phase != self.active.phase:
                self.has_turned_back |= point.phase in _TURNED_BACK
                if is_hit or not self.has_turned_back:
                    self.has_continued, self.later_phase = True, point.phase
            if not is_hit:
                return None
            self.hits += 1
            return self.kind

    def lift(self) -> None:
        """End the active strike."""
        with self._lock:
            self.active = None
