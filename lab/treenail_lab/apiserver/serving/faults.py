"""Faults on request: what an API server and the network before it do on a bad day."""

import itertools
from dataclasses import dataclass

from treenail.clock import Clock
from treenail_lab.apiserver.errors import ApiError
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.request import ServerRequest

_REASONS = {
    429: ("TooManyRequests", "Too many requests, please try again later."),
    500: ("InternalError", "Internal error occurred: injected fault"),
    503: ("ServiceUnavailable", "the server is currently unable to handle the request"),
}


@dataclass(frozen=True, slots=True)
class RefuseFault:
    """Connections are dropped without an answer."""


@dataclass(frozen=True, slots=True)
class DelayFault:
    """Requests wait before anything happens."""

    seconds: float


@dataclass(frozen=True, slots=True)
class RejectFault:
    """Requests are answered with an error (429, 500, 503) and have no effect."""

    code: int
    retry_after_s: int = 1

    def to_error(self) -> ApiError:
        reason, message = _REASONS[self.code]
        return ApiError(self.code, reason, message, retry_after_s=self.retry_after_s)


@dataclass(frozen=True, slots=True)
class LoseAnswerFault:
    """Writes take effect, and the connection is dropped instead of an answer."""


Fault = RefuseFault | DelayFault | RejectFault | LoseAnswerFault


@dataclass(frozen=True, slots=True)
class FaultMatch:
    """Which requests; empty matches all. ``resource`` is ``pods`` or ``pods/eviction``."""

    verb: str = ""
    resource: str = ""
    namespace: str = ""
    name: str = ""
    user: str = ""

    def is_match(self, ask: ServerRequest, user: str) -> bool:
        pairs = (
            (self.verb, ask.verb),
            (self.resource, ask.resource),
            (self.namespace, ask.namespace),
            (self.name, ask.name),
            (self.user, user),
        )
        return all(not wanted or wanted == found for wanted, found in pairs)


MATCH_FIELDS = ("verb", "resource", "namespace", "name", "user")


@dataclass(slots=True)
class FaultInjection:
    """A fault at work: for ``times`` more requests, until a monotonic moment, or until lifted."""

    number: int
    fault: Fault
    match: FaultMatch
    times: int | None
    until: float | None

    def to_json(self) -> Json:
        return {
            "id": self.number,
            "fault": type(self.fault).__name__,
            "times": self.times,
            "match": {name: value for name in MATCH_FIELDS if (value := getattr(self.match, name))},
        }


class FaultInjector:
    """The faults at work."""

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
        """Begin a fault for the next ``times`` matching requests, for a time, or until lifted."""
        until = None if for_s is None else self._clock.monotonic() + for_s
        number = next(self._numbers)
        self._injections.append(FaultInjection(number, fault, match or FaultMatch(), times, until))
        return number

    def lift_fault(self, number: int | None = None) -> None:
        """End a fault, or all of them."""
        self._injections = [
            one for one in self._injections if number is not None and one.number != number
        ]

    def list_active(self) -> tuple[FaultInjection, ...]:
        self._drop_ended()
        return tuple(self._injections)

    def match_request(self, ask: ServerRequest, user: str) -> list[Fault]:
        """The faults that a request meets; it counts for those that end after some requests."""
        self._drop_ended()
        met = []
        for injection in self._injections:
            # Reading can't lose the answer of a write, so it does not use this fault up.
            spares = isinstance(injection.fault, LoseAnswerFault) and not ask.is_change
            if spares or not injection.match.is_match(ask, user):
                continue
            if injection.times is not None:
                injection.times -= 1
            met.append(injection.fault)
        return met

    def _drop_ended(self) -> None:
        now = self._clock.monotonic()
        self._injections = [
            one
            for one in self._injections
            if one.times != 0 and (one.until is None or one.until > now)
        ]
