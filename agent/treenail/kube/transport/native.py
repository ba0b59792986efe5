"""HTTP to the API server with ssl only, to keep memory and processor time small."""

import ssl
import threading
import zlib
from collections.abc import Iterator
from urllib.parse import urlsplit

from treenail import clocks, errors
from treenail.kube.request import (
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
    has its own connection. Connecting may take ``connect_s``.
    """

    def __init__(
        self,
        config: kubeconfig.ApiServerConfig,
        clock: clocks.Clock,
        *,
        max_kept: int = 1,
        connect_s: float = 10.0,
    ) -> None:
        self._protocol = _HttpProtocol(config, clock, connect_s)
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
        connection = self.take_connection()
        try:
            return self._exchange_request(connection, request, deadline)
        except _CONNECTION_ERRORS as error:
            if not (connection.is_reused and request.method == "GET") or isinstance(
                error, TimeoutError
            ):
                raise self._protocol.make_unreachable(request, error, request.limit_s) from error
        try:
            return self._exchange_request(self.make_connection(), request, deadline)
        except _CONNECTION_ERRORS as error:
            raise self._protocol.make_unreachable(request, error, request.limit_s) from error

    def open_stream(self, request: ApiRequest, *, duration_s: float) -> "HttpStream":
        """Return a stream that is not connected yet; it ends after ``duration_s`` at the latest."""
        return HttpStream(self, self._protocol, self._clock, request, duration_s)

    def close(self) -> None:
        """Close all connections; running requests and streams fail at once.

        A request that another thread sends later closes its connection itself.
        """
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.abort()
        for connection in idle:
            connection.close()

    def _exchange_request(
        self, connection: TlsConnection, request: ApiRequest, deadline: float
    ) -> ApiResponse:
        keep = False
        try:
            response = self._protocol.begin_response(connection, request, deadline, gzip=True)
            reply = self._protocol.read_response(request, response)
            keep = response.can_reuse
            return reply
        finally:
            self.release_connection(connection, keep=keep)

    def take_connection(self) -> TlsConnection:
        """Return an idle connection, or a new one that is not connected yet."""
        context = self._protocol.credentials.get_tls_context()
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if connection.context is context and connection.is_idle():
                    connection.is_reused = True
                    self._busy.add(connection)
                    return connection
                connection.close()
        return self.make_connection()

    def make_connection(self) -> TlsConnection:
        """Return a connection that is not connected yet."""
        connection = self._protocol.make_connection()
        with self._lock:
            self._busy.add(connection)
        return connection

    def release_connection(self, connection: TlsConnection, *, keep: bool) -> None:
        """Keep the connection for another request, or close it."""
        with self._lock:
            self._busy.discard(connection)
            if keep and not self._is_closed and len(self._idle) < self._max_kept:
                self._idle.append(connection)
                return
        connection.close()


class HttpStream:
    """A streaming response on its own connection, which serves other requests afterwards.

    One thread calls ``read_response`` once and then iterates ``iter_lines``. Any thread may call
    ``close``.
    """

    def __init__(
        self,
        transport: HttpTransport,
        protocol: "_HttpProtocol",
        clock: clocks.Clock,
        request: ApiRequest,
        duration_s: float,
    ) -> None:
        self._transport = transport
        self._protocol = protocol
        self._clock = clock
        self._request = request
        self._duration_s = duration_s
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
            connection = self._begin_reading()
            try:
                response = self._protocol.begin_response(
                    connection, self._request, deadline, gzip=False
                )
            except _CONNECTION_ERRORS as error:
                # The server may close an idle connection at any time.
                if not connection.is_reused or isinstance(error, TimeoutError):
                    raise
                connection = self._replace_connection()
                response = self._protocol.begin_response(
                    connection, self._request, deadline, gzip=False
                )
            if response.status != _HTTP_OK:
                reply = self._protocol.read_response(self._request, response)
                self._release_connection(keep=response.can_reuse)
                return reply
        except _CONNECTION_ERRORS as error:
            self._release_connection(keep=False)
            raise self._protocol.make_unreachable(
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
            connection = self._begin_reading()
            connection.deadline = self._clock.monotonic() + self._duration_s
            yield from self._protocol.iter_lines(self._request, self._response)
        except _CONNECTION_ERRORS as error:
            if not self._is_closed:
                raise self._protocol.make_unreachable(
                    self._request, error, self._duration_s
                ) from error
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
            connection, self._connection = self._connection, None
            keep = keep and not self._is_closed
        if connection is not None:
            self._transport.release_connection(connection, keep=keep)


class _HttpProtocol:
    """Formats requests to one server and reads its responses."""

    def __init__(
        self,
        config: kubeconfig.ApiServerConfig,
        clock: clocks.Clock,
        connect_s: float,
    ) -> None:
        server = urlsplit(config.server)
        self.credentials = credentials.ApiCredentials(config)
        self._clock = clock
        self._host = server.hostname or ""
        self._port = server.port or _HTTPS_PORT
        self._prefix = server.path
        self._authority = server.netloc
        self._server_name = config.tls_server_name or self._host
        self._connect_s = connect_s

    def make_connection(self) -> TlsConnection:
        return TlsConnection(self.credentials.get_tls_context(), self._clock)

    def begin_response(
        self, connection: TlsConnection, request: ApiRequest, deadline: float, *, gzip: bool
    ) -> HttpResponse:
        """Connect if needed, send, and read the headers of the response, until ``deadline``."""
        connection.deadline = deadline
        if not connection.is_reused:
            connection.connect(
                self._host, self._port, server_name=self._server_name, limit_s=self._connect_s
            )
        connection.write_bytes(self._format_head(request, gzip=gzip) + request.body)
        return HttpResponse(connection)

    def read_response(self, request: ApiRequest, response: HttpResponse) -> ApiResponse:
        """Read the body; raise TooLargeError when it is longer than allowed."""
        body = read_body(response.iter_body(), request.max_bytes, self._describe_request(request))
        return ApiResponse(
            response.status,
            self._decompress(request, response, body),
            parse_retry_after_s(response.headers.get("retry-after")),
        )

    def iter_lines(self, request: ApiRequest, response: HttpResponse) -> Iterator[bytes]:
        """Yield each line of the body as it arrives, without its end."""
        yield from iter_lines(
            response.iter_body(), request.max_bytes, self._describe_request(request)
        )

    def make_unreachable(
        self, request: ApiRequest, error: Exception, limit_s: float
    ) -> errors.UnreachableError:
        operation = self._describe_request(request)
        match error:
            case ssl.SSLCertVerificationError():
                return errors.UnreachableError(
                    f"{operation}: the server certificate is not trusted: {error.verify_message}",
                    remedy="set certificate-authority in the kubeconfig to the CA that signed it",
                )
            case TimeoutError():
                return errors.UnreachableError(f"{operation}: no response within {limit_s:g} s")
            case TruncatedResponseError() | ConnectionResetError() | BrokenPipeError():
                return errors.UnreachableError(
                    f"{operation}: the connection ended before the response was complete"
                )
            case OSError(strerror=str(reason)):
                return errors.UnreachableError(f"{operation}: {reason}")
            case _:
                return errors.UnreachableError(f"{operation}: {str(error) or type(error).__name__}")

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
            # Stop above the limit: a small body can decompress to gigabytes.
            plain = unzip.decompress(body, request.max_bytes + 1)
        except zlib.error as error:
            raise MalformedResponseError("the response is not gzip") from error
        check_length(len(plain), request.max_bytes, self._describe_request(request))
        return plain

    def _describe_request(self, request: ApiRequest) -> str:
        return f"{request.method} {request.path} at {self._authority}"
