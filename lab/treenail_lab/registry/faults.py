"""Faults of a registry: what a test or a demo injects between the registry and its clients."""

import re
import threading
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """How a request goes wrong."""

    STATUS = "status"
    """Answer `RegistryFault.status` without asking the registry."""
    DROP = "drop"
    """Close the connection without an answer; the registry never gets the request."""
    CUT = "cut"
    """Give the registry only ``after_bytes`` of the body, then close without an answer."""
    LOSE = "lose"
    """Give the registry the whole request, then close without an answer."""
    HANG = "hang"
    """Answer nothing until the front stops."""
    TRUNCATE = "truncate"
    """Announce the whole answer, send ``after_bytes`` of its body, and close."""
    CORRUPT = "corrupt"
    """Change the first byte of the answer's body."""
    WRONG_DIGEST = "wrong digest"
    """Answer another Docker-Content-Digest than the registry."""
    REDIRECT = "redirect"
    """Answer 307 with `RegistryFault.location`."""


@dataclass(frozen=True, slots=True)
class RegistryFault:
    """One fault; it applies to the next ``times`` requests that match, or to all with 0."""

    kind: FaultKind
    method: str = ""
    """Methods as a regular expression; empty for all."""
    path: str = ""
    """A regular expression that is searched in the path with its query; empty for all."""
    times: int = 1
    status: int = 500
    text: str = ""
    """The message in the body of the answer."""
    code: str = ""
    """The error code in the body of the answer."""
    retry_after: str = ""
    challenge: str = 'Basic realm="lab"'
    """WWW-Authenticate of an answer with the status 401."""
    after_bytes: int = 0
    location: str = ""


class FaultPlan:
    """The faults that wait for a request; safe for several threads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._faults: list[tuple[RegistryFault, int]] = []

    def add(self, fault: RegistryFault) -> None:
        """Add a fault after those that wait."""
        with self._guard:
            self._faults.append((fault, fault.times))

    def clear(self) -> None:
        """Drop all faults."""
        with self._guard:
            self._faults.clear()

    @property
    def is_empty(self) -> bool:
        """Whether every fault was applied as often as it should."""
        with self._guard:
            return not self._faults

    def take(self, method: str, path: str) -> RegistryFault | None:
        """Return the fault of this request, which counts as one of its times."""
        with self._guard:
            for index, (fault, left) in enumerate(self._faults):
                if _matches(fault, method, path):
                    if left == 1:
                        del self._faults[index]
                    elif left:
                        self._faults[index] = fault, left - 1
                    return fault
        return None


def _matches(fault: RegistryFault, method: str, path: str) -> bool:
    is_method = not fault.method or re.fullmatch(fault.method, method) is not None
    return is_method and re.search(fault.path, path) is not None
