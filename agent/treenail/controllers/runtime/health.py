"""HTTP server of /healthz, /readyz and /metrics."""

import logging
import socket
import socketserver
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from treenail.controllers.runtime.metrics import CONTENT_TYPE, ControllerMetrics
from treenail.controllers.runtime.server_thread import ServerThread
from treenail.errors import UsageError

log = logging.getLogger(__name__)

ReadinessCheck = Callable[[], str]
"""Returns the problem in one sentence; empty without a problem."""

_REQUEST_LIMIT_S = 10.0
_PLAIN = "text/plain; charset=utf-8"


class HealthServer(ServerThread):
    """Serves probes and metrics; use it as a context manager. It serves no secrets."""

    def __init__(
        self,
        host: str,
        port: int,
        metrics: ControllerMetrics,
        *,
        healthy: ReadinessCheck,
        ready: ReadinessCheck,
    ) -> None:
        pages = {
            "/healthz": lambda: _render_check(healthy()),
            "/readyz": lambda: _render_check(ready()),
            "/metrics": lambda: (HTTPStatus.OK, CONTENT_TYPE, metrics.render_text()),
        }
        try:
            self._server = _HealthHttpServer((host, port), pages)
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host or '*'}:{port}: {error.strerror or error}",
                remedy="choose another address: --metrics HOST:PORT",
            ) from error
        super().__init__(self._server, "health")

    @property
    def port(self) -> int:
        """The port in use, also after a request for port 0."""
        return self._server.server_port


def parse_address(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``, ``[HOST]:PORT`` or ``:PORT``; raise `UsageError`."""
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError(
            f"invalid address {text!r}: expected HOST:PORT, or :PORT for all addresses"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


_Page = Callable[[], tuple[HTTPStatus, str, str]]


class _HealthHttpServer(ThreadingHTTPServer):
    daemon_threads = True
    # Shutdown does not wait for requests; each has its own time limit.
    block_on_close = False

    def __init__(self, address: tuple[str, int], pages: dict[str, _Page]) -> None:
        self.pages = pages
        host, _ = address
        if ":" in host or (not host and socket.has_dualstack_ipv6()):
            self.address_family = socket.AF_INET6
        super().__init__(address, _HealthRequestHandler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # HTTPServer.server_bind calls getfqdn, which may block on DNS (http/server.py).
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.socket.getsockname()[1]


class _HealthRequestHandler(BaseHTTPRequestHandler):
    timeout = _REQUEST_LIMIT_S
    server_version = "treenail"
    sys_version = ""
    server: _HealthHttpServer

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        status, content_type, text = page()
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base's name
        log.debug("%s %s", self.address_string(), format % args)


def _render_check(problem: str) -> tuple[HTTPStatus, str, str]:
    if problem:
        return HTTPStatus.SERVICE_UNAVAILABLE, _PLAIN, f"{problem}\n"
    return HTTPStatus.OK, _PLAIN, "ok\n"
