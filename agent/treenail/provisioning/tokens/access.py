"""Interface that decides about the access to configs."""

from collections.abc import Callable
from dataclasses import dataclass, field
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
