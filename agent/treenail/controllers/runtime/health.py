"""HTTP server of /healthz, /readyz and /metrics."""

from collections.abc import Callable
from http import HTTPStatus

from treenail.controllers.runtime import connection_limits, controller_metrics, http_server
from treenail.errors import UsageError

ReadinessCheck = Callable[[], str]
"""Returns the problem in one sentence; empty without a problem."""

_LIMITS = connection_limits.ConnectionLimits(connections=32, per_block=24)
_PLAIN = "text/plain; charset=utf-8"


class HealthServer(http_server.ServerThread):
    """Serves probes and metrics; use it as a context manager. It serves no secrets."""

    def __init__(
        self,
        host: str,
        port: int,
        metrics: controller_metrics.ControllerMetrics,
        *,
        healthy: ReadinessCheck,
        ready: ReadinessCheck,
        degraded: ReadinessCheck = str,
    ) -> None:
        pages = {
            "/healthz": lambda: _render_check(healthy()),
            "/readyz": lambda: _render_check(ready(), degraded()),
            "/metrics": lambda: (
                HTTPStatus.OK,
                controller_metrics.CONTENT_TYPE,
                metrics.render_text(),
            ),
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


_Page = Callable[[], tuple[HTTPStatus, str, str]]


class _HealthHttpServer(http_server.HttpListener):
    def __init__(self, address: tuple[str, int], pages: dict[str, _Page]) -> None:
        self.pages = pages
        super().__init__(address, _HealthRequestHandler, _LIMITS)


class _HealthRequestHandler(http_server.LimitedRequestHandler):
    server: _HealthHttpServer

    def do_GET(self) -> None:  # noqa: N802  # named by the base class
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


def _render_check(problem: str, note: str = "") -> tuple[HTTPStatus, str, str]:
    if problem:
        return HTTPStatus.SERVICE_UNAVAILABLE, _PLAIN, f"{problem}\n"
    return HTTPStatus.OK, _PLAIN, f"ok\n{note}\n" if note else "ok\n"
