"""A log of answered requests, for benchmarks and tests."""

from collections import Counter, deque
from dataclasses import dataclass

from treenail.clock import Clock, format_micro_time
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.request import ServerRequest

_REMEMBERED = 2_000


@dataclass(frozen=True, slots=True)
class RequestEntry:
    """One request; ``time`` in seconds since the epoch, ``code`` 0 without an answer."""

    time: float
    user: str
    verb: str
    resource: str
    namespace: str
    name: str
    code: int

    def to_json(self) -> Json:
        return {
            "time": format_micro_time(self.time),
            "user": self.user,
            "verb": self.verb,
            "resource": self.resource,
            "namespace": self.namespace,
            "name": self.name,
            "code": self.code,
        }


class RequestLog:
    """Counts by user, verb and resource since the last reset, and the latest requests."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._latest: deque[RequestEntry] = deque(maxlen=_REMEMBERED)

    def note_request(self, request: ServerRequest, user: str, code: int) -> None:
        resource = request.resource or request.path
        self._counts[user, request.verb, resource] += 1
        self._latest.append(
            RequestEntry(
                self._clock.now(),
                user,
                request.verb,
                resource,
                request.namespace,
                request.name,
                code,
            )
        )

    def count_requests(self, *, user: str = "", verb: str = "", resource: str = "") -> int:
        """Count the requests; empty matches all."""
        wanted = (user, verb, resource)
        return sum(
            number
            for found, number in self._counts.items()
            if all(not a or a == f for a, f in zip(wanted, found, strict=True))
        )

    def count_by_user(self) -> dict[tuple[str, str, str], int]:
        """Return the number of requests by user, verb and resource."""
        return dict(self._counts)

    def list_latest(self) -> tuple[RequestEntry, ...]:
        """Return the latest requests, oldest first."""
        return tuple(self._latest)

    def reset(self) -> None:
        self._counts.clear()
        self._latest.clear()

    def to_json(self) -> Json:
        counts = [
            {"user": user, "verb": verb, "resource": resource, "count": number}
            for (user, verb, resource), number in sorted(self._counts.items())
        ]
        return {"counts": counts, "latest": [entry.to_json() for entry in self._latest]}
