"""TLS listener of the Ignition server, with limits of connections in all and of each address."""

import ipaddress
import logging
import socket
import ssl
import sys
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from treenail.clock import Clock
from treenail.controllers.runtime.http_server import (
    HEAD_LIMIT_S,
    HttpListener,
    LimitedRequestHandler,
)
from treenail.provisioning.server.certificate import ServerCertificate
from treenail.provisioning.server.unexpected import withhold_message

log = logging.getLogger(__name__)

CERTIFICATE_CHECK_S = 5.0
"""Interval between checks of the certificate's files."""

BUSY_HEAD_LIMIT_S = 3.0
"""Time from the connection to the end of the request's head while no place is free: clients that
send nothing must not keep the places of machines."""
REST_LIMIT_S = 2.0
"""Time after a response in which the server drops what the client still sends. A client that never
ends must not keep the place of a machine."""
_REST_BYTES = 16 * 1024 * 1024

_Request = socket.socket | tuple[bytes, socket.socket]


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of the server. The listener limits the time of a request's head to 10 s."""

    connections: int = 64
    per_address: int = 8
    response_s: float = 60.0
    head_bytes: int = 8192


class TlsListener(HttpListener):
    """Listens with TLS. The handshake is in the thread of the connection, never in this one.

    A connection above a limit gets a thread too, so that it can be refused with a response. There
    are as many threads for these as for others; connections above that are closed.
    """

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[LimitedRequestHandler],
        certificate: ServerCertificate,
        limits: ServerLimits,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.limits = limits
        self._certificate = certificate
        self._next_check = 0.0
        self._lock = threading.Lock()
        self._responses_ended = threading.Condition(self._lock)
        self._responding: set[object] = set()
        self._served: dict[object, str] = {}
        self._refused: dict[object, str] = {}
        self._ended: dict[object, str] = {}
        self._head_limits: dict[object, float] = {}
        """Time for the head of requests for which it was shortened."""
        self._with_rest: set[object] = set()
        super().__init__(address, handler, clock=clock, response_limit_s=limits.response_s)

    def get_request(self) -> tuple[socket.socket, object]:
        """Accept a connection; its handshake comes later."""
        plain, address = super().get_request()
        try:
            wrapped = self._certificate.context.wrap_socket(
                plain, server_side=True, do_handshake_on_connect=False
            )
        except OSError:
            plain.close()
            raise
        return wrapped, address

    def verify_request(self, request: _Request, client_address: object) -> bool:
        """Return whether the connection gets a thread; socketserver closes it otherwise."""
        address = read_address(client_address)
        with self._lock:
            excess = ""
            if not self._find_excess(self._served, address):
                self._served[request] = address
            elif not (excess := self._find_excess(self._refused, address)):
                self._refused[request] = address
        if excess:
            log.info("closed connection from %s: too many requests: %s", address, excess)
            return False
        return super().verify_request(request, client_address)

    def find_limit(self, request: object) -> str:
        """Return which limit the connection exceeds; empty when it exceeds none."""
        with self._lock:
            address = self._refused.get(request)
            if address is None:
                return ""
            return self._find_excess(self._served, address) or "the server was busy"

    def note_end(self, request: object) -> None:
        """Keep the reason, and log it unless the log of the response will contain it."""
        with self._lock:
            address = self._served.get(request) or self._refused.get(request)
            if address is None or request in self._ended:
                return
            is_responding = request in self._responding
            self._ended[request] = (
                f"the response took more than {self.limits.response_s:g} s"
                if is_responding
                else f"no complete request in {self._head_limits.get(request, HEAD_LIMIT_S):g} s"
            )
            reason = self._ended[request]
        if not is_responding:
            log.info("ended connection from %s: %s", address, reason)

    def describe_end(self, request: object) -> str:
        """Say why the listener ended a connection; empty when it did not."""
        with self._lock:
            return self._ended.get(request, "")

    def begin_response(self, request: object) -> None:
        """Give the connection the time of a response: its request is complete."""
        with self._lock:
            self._responding.add(request)
        super().begin_response(request)

    def wait_for_responses(self, limit_s: float) -> bool:
        """Wait until no response is in progress; return False after ``limit_s``."""
        with self._lock:
            return self._responses_ended.wait_for(lambda: not self._responding, limit_s)

    def expect_rest(self, request: object) -> None:
        """Note that the client sends more than the request that was read."""
        with self._lock:
            self._with_rest.add(request)

    def shutdown_request(self, request: _Request) -> None:
        """Close the connection, also after an error."""
        with self._lock:
            has_rest = request in self._with_rest
            self._with_rest.discard(request)
        if has_rest and isinstance(request, socket.socket):
            limit = self._clock.monotonic() + REST_LIMIT_S
            self._deadlines[request] = min(limit, self._deadlines.get(request, limit))
            _discard_rest(request)
        with self._lock:
            self._served.pop(request, None)
            self._refused.pop(request, None)
            self._ended.pop(request, None)
            self._head_limits.pop(request, None)
        super().shutdown_request(request)
        with self._lock:
            self._responding.discard(request)
            self._responses_ended.notify_all()

    def service_actions(self) -> None:
        """End connections whose time is over, and reload a changed certificate."""
        self._shorten_heads()
        super().service_actions()
        now = self._clock.monotonic()
        if now >= self._next_check:
            self._next_check = now + CERTIFICATE_CHECK_S
            self._certificate.reload_changed_files()
            self._certificate.check_expiry(self._clock.now())

    def _shorten_heads(self) -> None:
        """Give requests that are incomplete less time while no place is free."""
        with self._lock:
            if len(self._served) < self.limits.connections:
                return
            for request in (*self._served, *self._refused):
                deadline = self._deadlines.get(request)
                is_waiting = request not in self._responding and request not in self._head_limits
                if is_waiting and deadline is not None:
                    self._head_limits[request] = BUSY_HEAD_LIMIT_S
                    self._deadlines[request] = deadline - HEAD_LIMIT_S + BUSY_HEAD_LIMIT_S

    def handle_error(self, request: _Request, client_address: object) -> None:
        """Log a client that speaks no TLS, and errors; the base logs a client that hung up."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError) and self.describe_end(request):
            return  # note_end has logged it
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            reason = (error.reason or "unknown error").replace("_", " ").lower()
            log.info("refused connection from %s: TLS: %s", read_address(client_address), reason)
        elif isinstance(error, OSError):
            super().handle_error(request, client_address)
        elif error is not None:
            log.error(
                "request of %s failed",
                read_address(client_address),
                exc_info=withhold_message(error),
            )

    def _find_excess(self, connections: dict[object, str], address: str) -> str:
        if len(connections) >= self.limits.connections:
            return f"more than {self.limits.connections} connections"
        if Counter(connections.values())[address] >= self.limits.per_address:
            return f"more than {self.limits.per_address} connections from this address"
        return ""


def _discard_rest(request: socket.socket) -> None:
    """Drop what the client still sends, until it has received the response or a limit is reached.

    Linux resets a connection that is closed with unread bytes, and drops what is not sent yet.
    """
    with suppress(OSError):
        # Of the base class: an SSLSocket would decrypt, and wait for the peer.
        socket.socket.shutdown(request, socket.SHUT_WR)
        socket.socket.settimeout(request, REST_LIMIT_S)
        rest = _REST_BYTES
        while rest > 0 and (received := socket.socket.recv(request, 65536)):
            rest -= len(received)


def read_address(client_address: object) -> str:
    """Return the IP address of a client as text; that of IPv4 also on a socket of IPv6."""
    text = str(client_address[0]) if isinstance(client_address, tuple) else ""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
