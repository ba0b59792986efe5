"""The listener of a small HTTP server, and the address that a user gives it."""

import logging
import socket
import socketserver
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from treenail.errors import UsageError

log = logging.getLogger(__name__)


class HttpListener(ThreadingHTTPServer):
    """Listens on one address; an empty host is all addresses, with IPv6 where the host has it."""

    daemon_threads = True
    # Shutdown does not wait for requests; each has its own time limit.
    block_on_close = False
    # With the 5 of socketserver, a client among many waits a second until it tries again.
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
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

    def handle_error(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        """Log a client that hung up; socketserver would print a traceback."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            log.debug("a client ended its connection: %s", error.strerror or error)
        else:
            super().handle_error(request, client_address)


def parse_address(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``, ``[HOST]:PORT`` or ``:PORT``; raise `UsageError`."""
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port[:6]) > 65535:
        raise UsageError(
            f"invalid address {text!r}: expected HOST:PORT, or :PORT for all addresses"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)
