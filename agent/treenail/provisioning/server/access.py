"""Interfaces of the Ignition server: who may fetch a config, and the log of all requests."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import Protocol


@dataclass(frozen=True, slots=True)
class AccessVerdict:
    """Whether one request may receive the config of a pool."""

    status: HTTPStatus = HTTPStatus.OK
    """OK, UNAUTHORIZED, FORBIDDEN, or SERVICE_UNAVAILABLE when the server cannot decide."""
    reason: str = ""
    """Why the request was refused. The client receives it, so it contains no part of a token."""
    token_name: str = ""
    """Public name of the token; empty without one."""
    machine: str = ""
    """Machine that the token is for; empty for any."""
    kubeconfig: bytes | None = field(default=None, repr=False)
    """Bootstrap kubeconfig for the machine; None leaves the file out. Before `Access.claim` its
    credential may be a placeholder of the same length."""
    pool: str = ""
    address: str = ""
    """IP address of the client."""
    token: str = field(default="", repr=False)
    """The whole token; empty for a refused request."""

    @property
    def is_allowed(self) -> bool:
        return self.status == HTTPStatus.OK


class Access(Protocol):
    """Decides which requests receive a config. The server calls it from many threads."""

    def check(self, token: str, pool: str, address: str) -> AccessVerdict:
        """Decide about a request; ``token`` is empty when the client sent none. Writes nothing."""

    def claim(self, verdict: AccessVerdict) -> AccessVerdict:
        """Reserve a use of the token before the first byte of a config; may refuse after all.

        The server calls it for GET only. An allowed claim ends with `confirm_sent` or `release`.
        """

    def confirm_sent(self, verdict: AccessVerdict) -> None:
        """Record a use of the token: the client was sent the last byte of the config."""

    def release(self, verdict: AccessVerdict) -> None:
        """Give a claimed use back: the client was not sent the whole config."""


class OpenAccess:
    """Allows every request, as the server of the Machine Config Operator does."""

    def __init__(self, load_kubeconfig: Callable[[], bytes | None] = lambda: None) -> None:
        """``load_kubeconfig`` returns the kubeconfig that all machines share."""
        self._load_kubeconfig = load_kubeconfig

    def check(self, token: str, pool: str, address: str) -> AccessVerdict:  # noqa: ARG002  # interface
        """Allow the request."""
        return AccessVerdict(kubeconfig=self._load_kubeconfig())

    def claim(self, verdict: AccessVerdict) -> AccessVerdict:
        """Allow the request: no token has a number of uses."""
        return verdict

    def confirm_sent(self, verdict: AccessVerdict) -> None:
        """Do nothing."""

    def release(self, verdict: AccessVerdict) -> None:
        """Do nothing."""


class RequestOutcome(StrEnum):
    """How a request ended."""

    SERVED = "served"
    """The client was sent the whole config."""
    CHECKED = "checked"
    """The response to HEAD."""
    REFUSED = "refused"
    """The token does not permit the request, or the server cannot decide whether it does."""
    INVALID = "invalid"
    """The pool is missing, or its config cannot be expressed in the version requested."""
    FAILED = "failed"
    """The config of the pool cannot be built."""
    BUSY = "busy"
    """Too many connections."""
    DISCONNECTED = "disconnected"
    """The client disconnected, or the time limit ended the response."""


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request for the config of a pool."""

    at: float
    """Time of the end of the request, in seconds since the epoch."""
    address: str
    """IP address of the client."""
    pool: str
    token: str
    """Public name of the token; empty without one."""
    machine: str
    """Machine that the token is for; empty for any."""
    version: str
    """Version of Ignition's format; empty if the request was refused before it was chosen."""
    outcome: RequestOutcome
    image: str
    """Pull spec that the config names, apart from that of the rendered config; may be empty."""
    status: int
    """HTTP status of the response."""
    bytes: int
    """Bytes of the response's body that were sent."""
    seconds: float
    """From the complete request to the last byte of the response."""
    rendered: str = ""
    """Name of the rendered config; empty if none was sent."""
    reason: str = ""
    """Why the request got no config. Contains nothing secret."""
    is_cached: bool = False
    """True when the config was not built for this request."""


class ConfigRequestLog(Protocol):
    """Receives every request for the config of a pool. The server calls it from many threads.

    It must return quickly: the thread holds a place of the server's limits.
    """

    def record(self, row: RequestRow) -> None:
        """Record a request that has ended."""


class NoConfigRequestLog:
    """Records nothing; the server's own log has a line for each request."""

    def record(self, row: RequestRow) -> None:
        """Do nothing."""
