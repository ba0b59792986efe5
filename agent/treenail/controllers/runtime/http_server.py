"""HTTP server: its listener, its thread, and the address that a user gives it."""

import logging
import socket
import socketserver
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from treenail import clocks, errors

log = logging.getLogger(__name__)

HEAD_LIMIT_S = 10.0
"""Time from the connection to the end of the request's head."""
RESPONSE_LIMIT_S = 30.0
"""Time for the response, until the client has received it."""
_Request = socket.socket | tuple[bytes, socket.socket]
_END_S = 10.0


class HttpListener(ThreadingHTTPServer):
    """Listens on one address; an empty host is all addresses, with IPv6 where the host has it."""

    daemon_threads = True
    # Shutdown does not wait for requests; each has its own time limit.
    block_on_close = False
    # With the 5 of socketserver, a client among many waits a second until it tries again.
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        handler: "type[LimitedRequestHandler]",
        *,
        clock: clocks.Clock | None = None,
        max_connections: int | None = None,
        response_limit_s: float = RESPONSE_LIMIT_S,
    ) -> None:
        self._clock = clock or clocks.SystemClock()
        self._response_limit_s = response_limit_s
        self._max_connections = max_connections
        self._deadlines: dict[object, float] = {}
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
        # A client that sends its request slowly has a thread for a long time.
        if self._max_connections is not None and len(self._deadlines) >= self._max_connections:
            return False
        self._deadlines[request] = self._clock.monotonic() + HEAD_LIMIT_S
        return super().verify_request(request, client_address)

    def begin_response(self, request: object) -> None:
        """Give the connection the time of a response: its request is complete."""
        self._deadlines[request] = self._clock.monotonic() + self._response_limit_s

    def service_actions(self) -> None:
        """End connections whose time is over; `serve_forever` calls this twice a second."""
        now = self._clock.monotonic()
        for request, deadline in [*self._deadlines.items()]:
            if now >= deadline and isinstance(request, socket.socket):
                # The thread of the connection wakes up, and closes it. SSLSocket.shutdown drops the
                # encryption first, and the thread could send plain text (ssl.py).
                self.note_end(request)
                with suppress(OSError):
                    socket.socket.shutdown(request, socket.SHUT_RDWR)

    def note_end(self, request: object) -> None:
        """Note that a connection is ended because its time is over; may repeat."""

    def shutdown_request(self, request: _Request) -> None:
        """Close the connection, also after an error."""
        self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: _Request, client_address: object) -> None:
        """Log a client that hung up; socketserver would print a traceback."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            log.debug("a client ended its connection: %s", error.strerror or error)
        else:
            super().handle_error(request, client_address)


class LimitedRequestHandler(BaseHTTPRequestHandler):
    """Handles one request of a connection, within the limits of `HttpListener`."""

    # Of one read or write. A client that sends a byte now and then never exceeds it.
    timeout = HEAD_LIMIT_S
    server_version = "treenail"
    sys_version = ""
    server: HttpListener

    def parse_request(self) -> bool:
        """Parse the request; it is complete when this returns."""
        is_valid = super().parse_request()
        self.server.begin_response(self.request)
        return is_valid

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base's name
        log.debug("%s %s", self.address_string(), format % args)


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
