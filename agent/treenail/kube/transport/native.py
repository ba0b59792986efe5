"""HTTP to the API server with ssl only, to keep memory and processor time small."""

import ssl
import threading
import zlib
from collections.abc import Iterator
from urllib.parse import urlsplit

from treenail import clocks, errors
from treenail.kube.request import (
    MAX_BYTES,
    ApiRequest,
    ApiResponse,
    check_length,
    iter_lines,
    parse_retry_after_s,
    read_body,
)
from treenail.kube.transport import credentials, kubeconfig
from treenail.kube.transport.connection import (
    HttpResponse,
    MalformedResponseError,
    TlsConnection,
    TruncatedResponseError,
)

_CONNECTION_ERRORS = (OSError, MalformedResponseError, TruncatedResponseError)
_HTTPS_PORT = 443
_HTTP_OK = 200


class HttpTransport:
    """Sends requests over a pool of connections and opens streams. Thread-safe.

    The pool keeps at most ``max_kept`` idle connections; concurrent requests open more. Each stream
    has its own connection. Connecting may take ``connect_s``. A response, or a line of a stream,
    of more than ``max_bytes`` raises ClusterError.
    """

    def __init__(
        self,
        connection: kubeconfig.ApiServerConfig,
        clock: clocks.Clock,
        *,
        max_kept: int = 1,
        connect_s: float = 10.0,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._wire = _HttpProtocol(connection, clock, connect_s, max_bytes)
        self._clock = clock
        self._max_kept = max_kept
        self._lock = threading.Lock()
        self._is_closed = False
        self._idle: list[TlsConnection] = []
        self._busy: set[TlsConnection] = set()

    def send(self, request: ApiRequest) -> ApiResponse:
        """Return the response with any status; raise UnreachableError without one in time.

        The server may close an idle connection at any time. A GET is then sent again. A write is
        not, because it may have taken effect.
        """
        deadline = self._clock.monotonic() + request.limit_s
        link = self.take_connection()
        try:
            return self._exchange_request(link, request, deadline)
        except _CONNECTION_ERRORS as error:
            if not (link.is_reused and request.method == "GET") or isinstance(error, TimeoutError):
                raise self._wire.make_unreachable(request, error, request.limit_s) from error
        try:
            return self._exchange_request(self.make_connection(), request, deadline)
        except _CONNECTION_ERRORS as error:
            raise self._wire.make_unreachable(request, error, request.limit_s) from error

    def open_stream(self, request: ApiRequest, *, duration_s: float) -> "HttpStream":
        """Return a stream that is not connected yet; it ends after ``duration_s`` at the latest."""
        return HttpStream(self, self._wire, self._clock, request, duration_s)

    def close(self) -> None:
        """Close all connections; running requests and streams fail at once.

        A request that another thread sends later closes its connection itself.
        """
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for link in self._busy:
                link.abort()
        for link in idle:
            link.close()

    def _exchange_request(
        self, link: TlsConnection, request: ApiRequest, deadline: float
    ) -> ApiResponse:
        keep = False
        try:
            response = self._wire.begin_response(link, request, deadline, gzip=True)
            reply = self._wire.read_response(request, response)
            keep = response.can_reuse
            return reply
        finally:
            self.release_connection(link, keep=keep)

    def take_connection(self) -> TlsConnection:
        """Return an idle connection, or a new one that is not connected yet."""
        context = self._wire.credentials.get_tls_context()
        with self._lock:
            while self._idle:
                link = self._idle.pop()
                if link.context is context and link.is_idle():
                    link.is_reused = True
                    self._busy.add(link)
                    return link
                link.close()
        return self.make_connection()

    def make_connection(self) -> TlsConnection:
        """Return a connection that is not connected yet."""
        link = self._wire.make_connection()
        with self._lock:
            self._busy.add(link)
        return link

    def release_connection(self, link: TlsConnection, *, keep: bool) -> None:
        """Keep the connection for another request, or close it."""
        with self._lock:
            self._busy.discard(link)
            if keep and not self._is_closed and len(self._idle) < self._max_kept:
                self._idle.append(link)
                return
        link.close()


class HttpStream:
    """A streaming response on its own connection, which serves other requests afterwards.

    One thread calls ``read_response`` once and then iterates ``iter_lines``. Any thread may call
    ``close``.
    """

    def __init__(
        self,
        transport: HttpTransport,
        wire: "_HttpProtocol",
        clock: clocks.Clock,
        request: ApiRequest,
        lasts_s: float,
    ) -> None:
        self._transport = transport
        self._wire = wire
        self._clock = clock
        self._request = request
        self._lasts_s = lasts_s
        self._connection: TlsConnection | None = transport.take_connection()
        self._lock = threading.Lock()
        self._is_reading = False
        self._is_closed = False
        self._response: HttpResponse | None = None

    def read_response(self) -> ApiResponse:
        """Connect and return status 200 without a body, or another status with its body.

        Raises UnreachableError without a response within the request's limit, or after ``close``.
        """
        deadline = self._clock.monotonic() + self._request.limit_s
        try:
            link = self._begin_reading()
            try:
                response = self._wire.begin_response(link, self._request, deadline, gzip=False)
            except _CONNECTION_ERRORS as error:
                # The server may close an idle connection at any time.
                if not link.is_reused or isinstance(error, TimeoutError):
                    raise
                link = self._replace_connection()
                response = self._wire.begin_response(link, self._request, deadline, gzip=False)
            if response.status != _HTTP_OK:
                reply = self._wire.read_response(self._request, response)
                self._release_connection(keep=response.can_reuse)
                return reply
        except _CONNECTION_ERRORS as error:
            self._release_connection(keep=False)
            raise self._wire.make_unreachable(
                self._request, error, self._request.limit_s
            ) from error
        except BaseException:
            # For example a body of an error that is too long.
            self._release_connection(keep=False)
            raise
        self._end_reading()
        self._response = response
        return ApiResponse(response.status)

    def iter_lines(self) -> Iterator[bytes]:
        """Yield each line as it arrives, until the server ends the stream or ``close`` is called.

        Raises UnreachableError when the connection breaks, or after ``duration_s``.
        """
        if self._response is None:
            return
        try:
            link = self._begin_reading()
            link.deadline = self._clock.monotonic() + self._lasts_s
            yield from self._wire.iter_lines(self._request, self._response)
        except _CONNECTION_ERRORS as error:
            if not self._is_closed:
                raise self._wire.make_unreachable(self._request, error, self._lasts_s) from error
        finally:
            self._release_connection(keep=self._response.can_reuse)

    def close(self) -> None:
        """End the stream; the thread that waits in ``read_response`` or ``iter_lines`` returns."""
        with self._lock:
            self._is_closed = True
            if self._connection is not None:
                self._connection.abort()
        if not self._is_reading:
            self._release_connection(keep=False)

    def _begin_reading(self) -> TlsConnection:
        """Return the connection, which only the reading thread closes until `_end_reading`."""
        with self._lock:
            if self._connection is None:
                raise OSError("closed")
            self._is_reading = True
            return self._connection

    def _end_reading(self) -> None:
        with self._lock:
            self._is_reading = False
        if self._is_closed:
            self._release_connection(keep=False)

    def _replace_connection(self) -> TlsConnection:
        """Use a new connection in place of one that the server closed."""
        self._release_connection(keep=False)
        with self._lock:
            if self._is_closed:
                raise OSError("closed")
            self._connection = self._transport.make_connection()
            return self._connection

    def _release_connection(self, *, keep: bool) -> None:
        with self._lock:
            link, self._connection = self._connection, None
            keep = keep and not self._is_closed
        if link is not None:
            self._transport.release_connection(link, keep=keep)


class _HttpProtocol:
    """Formats requests to one server and reads its responses."""

    def __init__(
        self,
        connection: kubeconfig.ApiServerConfig,
        clock: clocks.Clock,
        connect_s: float,
        most_bytes: int,
    ) -> None:
        server = urlsplit(connection.server)
        self.credentials = credentials.ApiCredentials(connection)
        self._clock = clock
        self._host = server.hostname or ""
        self._port = server.port or _HTTPS_PORT
        self._prefix = server.path
        self._authority = server.netloc
        self._server_name = connection.tls_server_name or self._host
        self._connect_s = connect_s
        self._max_bytes = most_bytes

    def make_connection(self) -> TlsConnection:
        return TlsConnection(self.credentials.get_tls_context(), self._clock)

    def begin_response(
        self, link: TlsConnection, request: ApiRequest, deadline: float, *, gzip: bool
    ) -> HttpResponse:
        """Connect if needed, send, and read the headers of the response, until ``deadline``."""
        link.deadline = deadline
        if not link.is_reused:
            link.connect(
                self._host, self._port, server_name=self._server_name, limit_s=self._connect_s
            )
        link.write_bytes(self._format_head(request, gzip=gzip) + request.body)
        return HttpResponse(link)

    def read_response(self, request: ApiRequest, response: HttpResponse) -> ApiResponse:
        """Read the body; raise ClusterError when it is longer than allowed."""
        body = read_body(response.iter_body(), self._max_bytes, self._describe_request(request))
        return ApiResponse(
            response.status,
            self._decompress(request, response, body),
            parse_retry_after_s(response.headers.get("retry-after")),
        )

    def iter_lines(self, request: ApiRequest, response: HttpResponse) -> Iterator[bytes]:
        """Yield each line of the body as it arrives, without its end."""
        yield from iter_lines(
            response.iter_body(), self._max_bytes, self._describe_request(request)
        )

    def make_unreachable(
        self, request: ApiRequest, error: Exception, limit_s: float
    ) -> errors.UnreachableError:
        what = self._describe_request(request)
        match error:
            case ssl.SSLCertVerificationError():
                return errors.UnreachableError(
                    f"{what}: the server certificate is not trusted: {error.verify_message}",
                    remedy="set certificate-authority in the kubeconfig to the CA that signed it",
                )
            case TimeoutError():
                return errors.UnreachableError(f"{what}: no response within {limit_s:g} s")
            case TruncatedResponseError() | ConnectionResetError() | BrokenPipeError():
                return errors.UnreachableError(
                    f"{what}: the connection ended before the response was complete"
                )
            case OSError(strerror=str(reason)):
                return errors.UnreachableError(f"{what}: {reason}")
            case _:
                return errors.UnreachableError(f"{what}: {str(error) or type(error).__name__}")

    def _format_head(self, request: ApiRequest, *, gzip: bool) -> bytes:
        lines = [
            f"{request.method} {self._prefix}{request.target} HTTP/1.1",
            f"Host: {self._authority}",
            "User-Agent: treenail",
            f"Accept: {request.accept}",
            # kube-apiserver compresses responses of more than 128 KiB (APIResponseCompression).
            f"Accept-Encoding: {'gzip' if gzip else 'identity'}",
        ]
        if authorization := self.credentials.get_authorization():
            lines.append(f"Authorization: {authorization}")
        if request.body:
            lines.append(f"Content-Type: {request.content_type}")
        # Without a length the server cannot tell where the body of a write ends.
        if request.method != "GET":
            lines.append(f"Content-Length: {len(request.body)}")
        return "\r\n".join([*lines, "", ""]).encode("ascii")

    def _decompress(self, request: ApiRequest, response: HttpResponse, body: bytes) -> bytes:
        if response.headers.get("content-encoding") != "gzip":
            return body
        unzip = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        try:
            plain = unzip.decompress(body, self._max_bytes + 1)
        except zlib.error as error:
            raise MalformedResponseError("the response is not gzip") from error
        check_length(len(plain), self._max_bytes, self._describe_request(request))
        return plain

    def _describe_request(self, request: ApiRequest) -> str:
        return f"{request.method} {request.path} at {self._authority}"
