"""HTTPS server of Ignition configs: ``GET|HEAD /config/<pool>``, ``/healthz`` and ``/status``.

Paths and status codes are those of the Machine Config Operator's server (api.go), except that an
unknown pool is 404 and that every error has a body. Only the bootstrap host of an installation has
``/status``. A request handler reads a request, and `service.ConfigService` answers it. The
listener limits connections, as those of all our servers.
"""

import json
import logging
import re
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Self
from urllib.parse import parse_qs

from treenail import clocks, errors, memory
from treenail.api import decode, object_meta
from treenail.controllers.runtime import connection_limits, http_server
from treenail.provisioning.content.document import ServedDocument
from treenail.provisioning.content.source import RETRY_AFTER_S
from treenail.provisioning.machines import logged_requests
from treenail.provisioning.server.certificate import ServerCertificate
from treenail.provisioning.server.service import (
    ConfigRequest,
    ConfigResponse,
    ConfigService,
    withhold_message,
)

log = logging.getLogger(__name__)

CERTIFICATE_CHECK_S = 5.0
"""Interval between checks of the certificate's files."""

REST_LIMIT_S = 2.0
"""Time after a response in which the server drops what the client still sends. A client that never
ends must not keep the place of a machine."""
_REST_BYTES = 16 * memory.MIB

_Request = socket.socket | tuple[bytes, socket.socket]


@dataclass(frozen=True, slots=True)
class ServerLimits(connection_limits.ConnectionLimits):
    """Limits of the server. The listener limits the time of a request's head to 10 s."""

    response_s: float = 60.0
    head_bytes: int = 8192


class TlsListener(http_server.HttpListener):
    """Listens with TLS. The handshake is in the thread of the connection, never in this one."""

    refuses_with_response = True
    limits: ServerLimits

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[http_server.LimitedRequestHandler],
        certificate: ServerCertificate,
        limits: ServerLimits,
        *,
        clock: clocks.Clock | None = None,
    ) -> None:
        self._certificate = certificate
        self._next_check = 0.0
        super().__init__(address, handler, limits, clock=clock, response_limit_s=limits.response_s)
        self._responses_ended = threading.Condition(self._lock)
        self._with_rest: set[object] = set()

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

    def wait_for_responses(self, limit_s: float) -> bool:
        """Wait until no response is in progress; return False after ``limit_s``."""
        with self._lock:
            return self._responses_ended.wait_for(
                lambda: not any(row.is_responding for row in self._connections.values()), limit_s
            )

    def expect_rest(self, request: object) -> None:
        """Note that the client sends more than the request that was read."""
        with self._lock:
            self._with_rest.add(request)

    def shutdown_request(self, request: _Request) -> None:
        """Close the connection, also after an error."""
        with self._lock:
            has_rest = request in self._with_rest
            self._with_rest.discard(request)
            connection = self._connections.get(request)
            if has_rest and connection:
                limit = self._clock.monotonic() + REST_LIMIT_S
                connection.deadline = min(limit, connection.deadline)
        if has_rest and isinstance(request, socket.socket):
            _discard_rest(request)
        super().shutdown_request(request)
        with self._lock:
            self._responses_ended.notify_all()

    def service_actions(self) -> None:
        """End connections whose time is over, and reload a changed certificate."""
        super().service_actions()
        now = self._clock.monotonic()
        if now >= self._next_check:
            self._next_check = now + CERTIFICATE_CHECK_S
            self._certificate.reload_changed_files()
            self._certificate.check_expiry(self._clock.now())

    def handle_error(self, request: _Request, client_address: object) -> None:
        """Log a client that speaks no TLS, and errors; the base logs a client that hung up."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError) and self.describe_end(request):
            return  # the base has logged it
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            reason = (error.reason or "unknown error").replace("_", " ").lower()
            log.info(
                "refused connection from %s: TLS: %s",
                http_server.read_address(client_address),
                reason,
            )
        elif isinstance(error, OSError):
            super().handle_error(request, client_address)
        elif error is not None:
            log.error(
                "request of %s failed",
                http_server.read_address(client_address),
                exc_info=withhold_message(error),
            )


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


PORT = 22623
"""The port of the Machine Config Operator's server."""


@dataclass(frozen=True, slots=True)
class ConfigRoute:
    """Where a server has configs."""

    title: str
    """The path for users."""
    path: re.Pattern[str]
    """Its group is the name of the pool; an empty one where the token decides."""
    has_open_tokens: bool = True
    """True if a token may be in the query, and the first of several headers counts."""


POOL_ROUTE = ConfigRoute("/config/POOL", re.compile("/config/(.+)", re.DOTALL))
HOSTED_ROUTE = ConfigRoute("/ignition", re.compile("/ignition()[^/ ]*"), has_open_tokens=False)
"""That of HyperShift's server."""

_HEALTH_PATH = "/healthz"
_STATUS_PATH = "/status"
_CHUNK = 64 * 1024
_END_S = 10.0
"""A pod has 30 s until it is killed."""
_METHODS = ("GET", "HEAD")
_SENTENCES: Mapping[int, str] = {
    HTTPStatus.BAD_REQUEST: "cannot read the request: expected HTTP/1.1",
    HTTPStatus.REQUEST_URI_TOO_LONG: "the head of the request is too long",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "the head of the request is too long",
    HTTPStatus.HTTP_VERSION_NOT_SUPPORTED: "cannot read the request: expected HTTP/1.1",
}


class IgnitionServer(http_server.ServerThread):
    """Serves configs while entered; a context manager."""

    def __init__(
        self,
        address: tuple[str, int],
        certificate: ServerCertificate,
        service: ConfigService,
        requests: logged_requests.ConfigRequestLog,
        *,
        limits: ServerLimits = ServerLimits(),
        clock: clocks.Clock | None = None,
        describe_status: Callable[[], decode.Json] | None = None,
        route: ConfigRoute = POOL_ROUTE,
    ) -> None:
        """Listen; raise `UsageError`.

        ``describe_status`` returns the document of ``/status``, which every client may read.
        """
        host, port = address
        try:
            self._server = _IgnitionListener(
                address,
                certificate,
                service,
                requests,
                limits,
                clock or clocks.SystemClock(),
                describe_status,
                route,
            )
        except OSError as error:
            raise errors.UsageError(
                f"cannot listen on {host or '*'}:{port}: {error.strerror or error}",
                remedy="choose another address: --listen HOST:PORT",
            ) from error
        super().__init__(self._server, "ignition")
        self._host = f"[{host}]" if ":" in host else host or "*"

    def __enter__(self) -> Self:
        path = self._server.route.title
        log.info("serving Ignition configs at https://%s:%d%s", self._host, self.port, path)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        """Accept no further connection, and wait for responses in progress."""
        super().__exit__(*error)
        if not self._server.wait_for_responses(_END_S):
            log.warning("ending with responses in progress")

    @property
    def port(self) -> int:
        """The port in use, also after a request for port 0."""
        return self._server.server_port


class _IgnitionListener(TlsListener):
    def __init__(
        self,
        address: tuple[str, int],
        certificate: ServerCertificate,
        service: ConfigService,
        requests: logged_requests.ConfigRequestLog,
        limits: ServerLimits,
        clock: clocks.Clock,
        describe_status: Callable[[], decode.Json] | None,
        route: ConfigRoute,
    ) -> None:
        self.route = route
        self.service = service
        self.describe_status = describe_status
        self.requests = requests
        self.clock = clock
        super().__init__(address, _IgnitionRequestHandler, certificate, limits, clock=clock)


class _IgnitionRequestHandler(http_server.LimitedRequestHandler):
    """Handles one request of a connection, then closes it."""

    protocol_version = "HTTP/1.1"
    # http.server would send errors without a head to clients whose request line it cannot read.
    default_request_version = "HTTP/1.1"
    # The listener ends a slow head or response. One write to a slow client may take more than 10 s.
    timeout = 60.0
    # The body follows the head in another write, which would wait for an acknowledgement.
    disable_nagle_algorithm = True
    server: _IgnitionListener

    def setup(self) -> None:
        """Finish the handshake, in the thread of the connection."""
        self.request.settimeout(self.timeout)
        self.request.do_handshake()
        super().setup()
        self._began = self.server.clock.monotonic()
        self._address = http_server.read_address(self.client_address)
        self._sent = 0

    def handle(self) -> None:
        """Read one request and send the response."""
        self.close_connection = True
        # An error before these are parsed needs them.
        self.command, self.requestline, self.request_version = "", "", self.protocol_version
        try:
            self.raw_requestline = self.rfile.readline()
            is_valid = bool(self.raw_requestline) and self.parse_request()
        except http_server.HeadTooLargeError:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        if not is_valid:
            if self.raw_requestline and not self.requestline.split():
                self.send_error(HTTPStatus.BAD_REQUEST)  # http.server ignores an empty line
            return
        self._began = self.server.clock.monotonic()
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.server.expect_rest(self.request)
        words = self.requestline.split()
        if len(words) != 3:  # method, target and version
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        # `path` would begin with one slash where the target begins with two.
        path, _, query = words[1].partition("?")
        self._route_request(path, query)

    def handle_expect_100(self) -> bool:
        """Send no "100 Continue": the server reads no body."""
        return True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base's name
        """Log nothing: the request line may contain a token."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002  # of the base class
        """Send an error of http.server, without its texts: they repeat the request."""
        status = HTTPStatus(code)
        # The request was not read to its end.
        self.server.expect_rest(self.request)
        self._refuse_request(status, _SENTENCES.get(status, status.phrase))

    def _route_request(self, path: str, query: str) -> None:
        route = self.server.route
        match = route.path.fullmatch(path)
        pool = match[1] if match else ""
        is_config = match is not None and (not pool or object_meta.is_object_name(pool))
        describe_status = self.server.describe_status if path == _STATUS_PATH else None
        if not is_config and path != _HEALTH_PATH and describe_status is None:
            expected = f"expected {route.title} or /healthz"
            expected += ", and POOL is the name of a pool" if route is POOL_ROUTE else ""
            self._refuse_request(HTTPStatus.NOT_FOUND, f"unknown path: {expected}")
        elif self.command not in _METHODS:
            self._refuse_request(HTTPStatus.METHOD_NOT_ALLOWED, "expected GET or HEAD", allow=True)
        elif describe_status is not None:
            self._send_json(HTTPStatus.OK, describe_status())
        elif not is_config:
            self._send_head(HTTPStatus.OK, 0)
        elif limit := self.server.describe_excess(self.request):
            response = ConfigResponse(
                HTTPStatus.SERVICE_UNAVAILABLE,
                logged_requests.RequestOutcome.BUSY,
                f"too many requests: {limit}",
            )
            self._send_response(pool, response)
        else:
            accept = ",".join(self.headers.get_all("Accept", []))
            is_head = self.command == "HEAD"
            request = ConfigRequest(pool, self._address, self._read_token(query), accept, is_head)
            self._send_response(pool, self.server.service.answer(request))

    def _read_token(self, query: str) -> str:
        """Return the token of the Authorization header, or else of the query.

        Ignition before 3.1 cannot send headers.
        """
        values, is_open = (
            self.headers.get_all("Authorization", [""]),
            self.server.route.has_open_tokens,
        )
        scheme, _, token = values[0].partition(" ")
        if scheme.lower() == "bearer" and (is_open or len(values) == 1):
            return token.strip()
        if not is_open:
            return ""
        try:
            return parse_qs(query, max_num_fields=8).get("token", [""])[0]
        except ValueError:
            return ""

    def _send_response(self, pool: str, response: ConfigResponse) -> None:
        try:
            self._send_config(response)
        except OSError as error:
            ended = f"the connection ended: {error.strerror or type(error).__name__}"
            response = replace(
                response,
                outcome=logged_requests.RequestOutcome.DISCONNECTED,
                error=self.server.describe_end(self.request) or ended,
            )
        finally:
            self._record_request(pool, response)

    def _send_config(self, response: ConfigResponse) -> None:
        if response.document is None:
            self._send_json_error(
                response.status, response.error, retry_after_s=response.retry_after_s
            )
            return
        if self.command == "HEAD":
            self._send_document(response, response.document)
            return
        try:
            self._send_document(response, response.document)
        except BaseException:
            self.server.service.release(response.verdict)
            raise
        self.server.service.confirm_sent(response.verdict)

    def _send_document(self, response: ConfigResponse, document: ServedDocument) -> None:
        parts = document.list_parts(response.verdict.kubeconfig)
        later = {"X-Treenail-Image": "later"} if document.is_image_later else {}
        self._send_head(response.status, sum(map(len, parts)), later)
        if self.command == "HEAD":
            return
        for part in parts:
            view = memoryview(part)
            for begin in range(0, len(view), _CHUNK):
                self._sent += self.wfile.write(view[begin : begin + _CHUNK])

    def _refuse_request(self, status: HTTPStatus, error: str, *, allow: bool = False) -> None:
        if self.server.describe_end(self.request):
            return  # the listener ended a slow request, whose rest is unknown
        log.info("refused request from %s: %d: %s", self._address, status, error)
        self._send_json_error(status, error, {"Allow": ", ".join(_METHODS)} if allow else {})

    def _send_json_error(
        self,
        status: HTTPStatus,
        error: str,
        headers: Mapping[str, str] | None = None,
        *,
        retry_after_s: int = RETRY_AFTER_S,
    ) -> None:
        more = dict(headers or {})
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            more["Retry-After"] = str(retry_after_s)
        if status == HTTPStatus.UNAUTHORIZED:
            more["WWW-Authenticate"] = "Bearer"
        self._send_json(status, {"error": error}, more)

    def _send_json(
        self, status: HTTPStatus, document: decode.Json, headers: Mapping[str, str] | None = None
    ) -> None:
        body = json.dumps(document).encode() + b"\n"
        self._send_head(status, len(body), headers)
        if self.command != "HEAD":
            self._sent += self.wfile.write(body)

    def _send_head(
        self, status: HTTPStatus, length: int, headers: Mapping[str, str] | None = None
    ) -> None:
        # http.server sends no head for HTTP/0.9.
        self.request_version = self.protocol_version
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(length))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()

    def _record_request(self, pool: str, response: ConfigResponse) -> None:
        clock = self.server.clock
        document, verdict = response.document, response.verdict
        outcome = response.outcome
        if outcome == logged_requests.RequestOutcome.SERVED and self.command == "HEAD":
            outcome = logged_requests.RequestOutcome.CHECKED
        row = logged_requests.RequestRow(
            at=clock.now(),
            address=self._address,
            pool=verdict.pool or pool,
            token=verdict.token_name,
            machine=verdict.machine,
            version=response.version,
            outcome=outcome,
            image=response.image,
            status=int(response.status),
            bytes=self._sent,
            seconds=clock.monotonic() - self._began,
            rendered=document.rendered if document else "",
            reason=response.error,
            is_cached=response.is_cached,
        )
        _log_row(row, self.server.service.describe_staleness())
        try:
            self.server.requests.record(row)
        except Exception as error:  # the client has its response
            log.error(  # noqa: TRY400  # without the message
                "cannot record a request of %s", row.address, exc_info=withhold_message(error)
            )


def _log_row(row: logged_requests.RequestRow, staleness: str) -> None:
    by = f" with token {row.token}" if row.token else ""
    if row.outcome in (
        logged_requests.RequestOutcome.SERVED,
        logged_requests.RequestOutcome.CHECKED,
    ):
        log.info(
            "%s config of pool %s to %s%s: %s in Ignition %s, %d bytes in %.3f s%s",
            row.outcome,
            row.pool,
            row.address,
            by,
            row.rendered,
            row.version,
            row.bytes,
            row.seconds,
            f"; {staleness}" if staleness else "",
        )
    else:
        log.warning(
            "request of %s for pool %s%s failed (%s, status %d, %d bytes in %.3f s): %s%s",
            row.address,
            row.pool,
            by,
            row.outcome,
            row.status,
            row.bytes,
            row.seconds,
            row.reason,
            f"; {staleness}" if staleness else "",
        )
