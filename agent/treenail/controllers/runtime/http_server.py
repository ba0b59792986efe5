"""HTTP server: its listener, its thread, and the address that a user gives it."""

import http.client
import io
import ipaddress
import logging
import socket
import socketserver
import sys
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from treenail import clocks, errors
from treenail.controllers.runtime import connection_limits

log = logging.getLogger(__name__)

HEAD_LIMIT_S = 10.0
"""Time from the connection to the end of the request's head."""
RESPONSE_LIMIT_S = 30.0
"""Time for the response, until the client has received it."""
_Request = socket.socket | tuple[bytes, socket.socket]
_END_S = 10.0


class HttpListener(ThreadingHTTPServer):
    """Listens on one address; an empty host is all addresses, with IPv6 where the host has it.

    It limits the connections in all and of each client, so that no client keeps others out.
    """

    daemon_threads = True
    # Shutdown does not wait for requests; each has its own time limit.
    block_on_close = False
    # With the 5 of socketserver, a client among many waits a second until it tries again.
    request_queue_size = 128
    refuses_with_response = False
    """Connections above a limit get a thread too, which refuses the request; as many as others."""

    def __init__(
        self,
        address: tuple[str, int],
        handler: "type[LimitedRequestHandler]",
        limits: connection_limits.ConnectionLimits,
        *,
        clock: clocks.Clock | None = None,
        response_limit_s: float = RESPONSE_LIMIT_S,
    ) -> None:
        self.limits = limits
        self._clock = clock or clocks.SystemClock()
        self._response_limit_s = response_limit_s
        self._lock = threading.Lock()
        self._connections: dict[object, connection_limits.Connection] = {}
        host, _ = address
        if ":" in host or (not host and socket.has_dualstack_ipv6()):
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # HTTPServer.server_bind calls getfqdn, which may block on DNS (http/server.py).
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.socket.getsockname()[1]

    def verify_request(self, request: _Request, client_address: object) -> bool:
        """Return whether the connection gets a thread; socketserver closes it otherwise."""
        now = self._clock.monotonic()
        address = read_address(client_address)
        connection = connection_limits.Connection(
            address, connection_limits.find_blocks(address), now, now + HEAD_LIMIT_S
        )
        with self._lock:
            excess = self._take_place(connection)
            if excess and self.refuses_with_response:
                connection.excess = excess
                excess = self._take_place(connection)
            if not excess:
                self._connections[request] = connection
        if excess:
            log.info("closed connection from %s: %s", connection.address, excess)
        return not excess

    def _take_place(self, client: connection_limits.Connection) -> str:
        """End a connection for the new one if need be; return the limit that leaves no place."""
        # Threads of ended connections run for a moment.
        if len(self._connections) >= 4 * self.limits.connections:
            return "too many connections"
        others = {
            connection: request
            for request, connection in self._connections.items()
            if bool(connection.excess) == bool(client.excess) and not connection.end_reason
        }
        excess, victim = connection_limits.find_excess(others, client, self.limits)
        if victim is None:
            return excess
        self._end_connection(others[victim], victim, f"another client needed its place: {excess}")
        return ""

    def begin_response(self, request: object) -> None:
        """Give the connection the time of a response: its request is complete."""
        with self._lock:
            if connection := self._connections.get(request):
                connection.is_responding = True
                connection.since = self._clock.monotonic()
                connection.deadline = connection.since + self._response_limit_s

    def describe_excess(self, request: object) -> str:
        """Say which limit the connection exceeds; empty when it has a place."""
        connection = self._connections.get(request)
        return connection.excess if connection else ""

    def describe_end(self, request: object) -> str:
        """Say why the listener ended a connection; empty when it did not."""
        connection = self._connections.get(request)
        return connection.end_reason if connection else ""

    def service_actions(self) -> None:
        """End connections whose time is over; `serve_forever` calls this twice a second."""
        now = self._clock.monotonic()
        with self._lock:
            for request, connection in self._connections.items():
                if now >= connection.deadline:
                    reason = (
                        f"the response took more than {self._response_limit_s:g} s"
                        if connection.is_responding
                        else f"no complete request in {HEAD_LIMIT_S:g} s"
                    )
                    self._end_connection(request, connection, reason)

    def _end_connection(
        self, request: object, connection: connection_limits.Connection, reason: str
    ) -> None:
        """End it, and log that unless the log of the response will contain it; may repeat."""
        if not connection.end_reason:
            connection.end_reason = reason
            if not connection.is_responding:
                log.info("ended connection from %s: %s", connection.address, reason)
        if isinstance(request, socket.socket):
            # The thread of the connection wakes up, and closes it. SSLSocket.shutdown drops the
            # encryption first, and the thread could send plain text (ssl.py).
            with suppress(OSError):
                socket.socket.shutdown(request, socket.SHUT_RDWR)

    def shutdown_request(self, request: _Request) -> None:
        """Close the connection, also after an error."""
        super().shutdown_request(request)
        with self._lock:
            self._connections.pop(request, None)

    def handle_error(self, request: _Request, client_address: object) -> None:
        """Log a client that hung up; socketserver would print a traceback."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            log.debug("a client ended its connection: %s", error.strerror or error)
        else:
            super().handle_error(request, client_address)


class HeadTooLargeError(http.client.HTTPException):
    """The head of a request is longer than the limit."""


class _HeadReader(io.BufferedIOBase):
    """Reads lines of a request's head, up to a limit in all."""

    def __init__(self, stream: io.BufferedIOBase, limit: int) -> None:
        self._stream = stream
        self._rest = limit

    def readline(self, size: int | None = -1, /) -> bytes:  # noqa: ARG002  # of the base class
        line = self._stream.readline(self._rest + 1)
        self._rest -= len(line)
        if self._rest < 0:
            raise HeadTooLargeError
        return line

    def close(self) -> None:
        self._stream.close()
        super().close()


class LimitedRequestHandler(BaseHTTPRequestHandler):
    """Handles one request of a connection, within the limits of `HttpListener`."""

    # Of one read or write. A client that sends a byte now and then never exceeds it.
    timeout = HEAD_LIMIT_S
    server_version = "treenail"
    sys_version = ""
    server: HttpListener

    def setup(self) -> None:
        """Limit the head: http.server reads 100 lines of 64 KiB, and copies them."""
        super().setup()
        self.rfile = _HeadReader(self.rfile, self.server.limits.head_bytes)

    def handle(self) -> None:
        """Read one request and answer it; parse_request answers a head with too long headers."""
        self.command, self.requestline, self.request_version = "", "", self.protocol_version
        try:
            super().handle()
        except HeadTooLargeError:
            self.send_error(HTTPStatus.REQUEST_URI_TOO_LONG)

    def parse_request(self) -> bool:
        """Parse the request; it is complete when this returns."""
        is_valid = super().parse_request()
        self.server.begin_response(self.request)
        return is_valid

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base's name
        log.debug("%s %s", self.address_string(), format % args)


def read_address(client_address: object) -> str:
    """Return the IP address of a client as text; that of IPv4 also on a socket of IPv6."""
    text = str(client_address[0]) if isinstance(client_address, tuple) else ""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def parse_address(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``, ``[HOST]:PORT`` or ``:PORT``; raise `UsageError`."""
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port[:6]) > 65535:
        raise errors.UsageError(
            f"invalid address {text!r}: expected HOST:PORT, or :PORT for all addresses"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


class ServerThread:
    """Serves while entered. At the end it waits for the thread, and for no request in progress."""

    def __init__(self, server: socketserver.BaseServer, name: str) -> None:
        self._listener = server
        self._thread = threading.Thread(target=server.serve_forever, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join(_END_S)
