"""Faults on request, of the API server and of the network in front of it."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from treenail.clocks import Clock
from treenail_lab.apiserver.errors import ApiError
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.registry.list_watch import WatchPace
from treenail_lab.apiserver.request import ServerRequest

_REASONS = {
    429: ("TooManyRequests", "Too many requests, please try again later."),
    500: ("InternalError", "Internal error occurred: injected fault"),
    503: ("ServiceUnavailable", "the server is currently unable to handle the request"),
}


@dataclass(frozen=True, slots=True)
class RefuseFault:
    """Close connections without an answer."""


@dataclass(frozen=True, slots=True)
class DelayFault:
    """Delay requests before they are executed."""

    seconds: float


@dataclass(frozen=True, slots=True)
class RejectFault:
    """Answer requests with an error (429, 500, 503), without an effect."""

    code: int
    retry_after_s: int = 1

    def to_error(self) -> ApiError:
        reason, message = _REASONS[self.code]
        return ApiError(self.code, reason, message, retry_after_s=self.retry_after_s)


@dataclass(frozen=True, slots=True)
class LoseAnswerFault:
    """Execute writes, and close the connection instead of answering."""


@dataclass(frozen=True, slots=True)
class HoldWatchesFault:
    """Keep watches open, and deliver nothing until the fault is lifted."""


@dataclass(frozen=True, slots=True)
class DelayWatchesFault:
    """Deliver the events of watches late.

    With random delays, the watches of different kinds and users overtake each other. The order
    within a watch stays, as kube-apiserver guarantees it.
    """

    seconds: float
    is_random: bool = False


WatchFault = HoldWatchesFault | DelayWatchesFault
RequestFault = RefuseFault | DelayFault | RejectFault | LoseAnswerFault
Fault = RequestFault | WatchFault


@dataclass(frozen=True, slots=True)
class FaultMatch:
    """The requests that a fault affects; empty matches all.

    ``resource`` is ``pods`` or ``pods/eviction``.
    """

    verb: str = ""
    resource: str = ""
    namespace: str = ""
    name: str = ""
    user: str = ""

    def is_match(self, request: ServerRequest, user: str) -> bool:
        pairs = (
            (self.verb, request.verb),
            (self.resource, request.resource),
            (self.namespace, request.namespace),
            (self.name, request.name),
            (self.user, user),
        )
        return all(not wanted or wanted == actual for wanted, actual in pairs)


FAULT_NAMES: Mapping[type, str] = {
    RefuseFault: "refuse",
    DelayFault: "delay",
    RejectFault: "reject",
    LoseAnswerFault: "lose-answer",
    HoldWatchesFault: "hold-watches",
    DelayWatchesFault: "delay-watches",
}
MATCH_FIELDS = ("verb", "resource", "namespace", "name", "user")


@dataclass(slots=True)
class FaultInjection:
    """An active fault, for ``times`` more requests, until a monotonic time, or until lifted."""

    number: int
    fault: Fault
    match: FaultMatch
    times: int | None
    until: float | None

    def to_json(self) -> Json:
        return {
            "id": self.number,
            "fault": FAULT_NAMES[type(self.fault)],
            "times": self.times,
            "match": {name: value for name in MATCH_FIELDS if (value := getattr(self.match, name))},
        }


class FaultInjector:
    """The active faults."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._numbers = itertools.count(1)
        self._injections: list[FaultInjection] = []

    def inject_fault(
        self,
        fault: Fault,
        match: FaultMatch | None = None,
        *,
        times: int | None = None,
        for_s: float | None = None,
    ) -> int:
        """Begin a fault for ``times`` matching requests, for some seconds, or until lifted."""
        until = None if for_s is None else self._clock.monotonic() + for_s
        number = next(self._numbers)
        self._injections.append(FaultInjection(number, fault, match or FaultMatch(), times, until))
        return number

    def lift_fault(self, number: int | None = None) -> None:
        """End one fault, or all faults."""
        self._injections = [
            one for one in self._injections if number is not None and one.number != number
        ]

    def list_active(self) -> tuple[FaultInjection, ...]:
        self._drop_ended()
        return tuple(self._injections)

    def match_request(self, request: ServerRequest, user: str) -> list[RequestFault]:
        """Return the faults that a request matches, and count it for those with ``times``."""
        self._drop_ended()
        matched: list[RequestFault] = []
        for injection in self._injections:
            if isinstance(injection.fault, WatchFault):
                continue
            # A read has no effect that its lost answer could hide, so it does not count.
            is_exempt = isinstance(injection.fault, LoseAnswerFault) and not request.is_change
            if is_exempt or not injection.match.is_match(request, user):
                continue
            if injection.times is not None:
                injection.times -= 1
            matched.append(injection.fault)
        return matched

    def find_watch_pace(self, plural: str, user: str) -> WatchPace:
        """Return how late the watches of a kind and user deliver events now."""
        self._drop_ended()
        pace = WatchPace()
        for injection in self._injections:
            match = injection.match
            if match.resource not in {"", plural} or match.user not in {"", user}:
                continue
            match injection.fault:
                case HoldWatchesFault():
                    pace = replace(pace, is_held=True)
                case DelayWatchesFault(seconds, is_random):
                    pace = replace(pace, delay_s=seconds, is_random=is_random)
                case _:
                    pass  # A fault of requests.
        return pace

    def _drop_ended(self) -> None:
        now = self._clock.monotonic()
        self._injections = [
            one
            for one in self._injections
            if one.times != 0 and (one.until is None or one.until > now)
        ]
