"""Transport on the official ``kubernetes`` package, for what `HttpTransport` does not support.

The package merges kubeconfigs, runs credential plugins and connects through proxies. A request
costs six times the processor time. Its generated methods changed between versions 26 and 37; its
configuration and its connection pool did not, so this module uses only those two.
"""

import contextlib
import socket
from collections.abc import Iterator
from typing import cast

import kubernetes.client
import kubernetes.config
import urllib3
import yaml
from urllib3.exceptions import HTTPError, ProtocolError, ReadTimeoutError

from treenail import clocks, errors
from treenail.kube.request import (
    CHUNK_BYTES,
    ApiRequest,
    ApiResponse,
    iter_lines,
    parse_retry_after_s,
    read_body,
)
from treenail.kube.transport.connection import SOCKET_OPTIONS

_REMEDY = "check it with: kubectl config view --kubeconfig FILE"


class OfficialTransport:
    """Sends requests over the connection pool of the package. Thread-safe.

    Differences to HttpTransport: the time limit applies to each read until the whole response is
    late, and a stream waits for a silent server until its duration is over.
    """

    def __init__(
        self,
        api: kubernetes.client.ApiClient,
        clock: clocks.Clock,
        *,
        connect_s: float = 10.0,
        max_kept: int = 32,
    ) -> None:
        self._api = api
        self._pool = api.rest_client.pool_manager
        self._pool.connection_pool_kw["maxsize"] = max_kept
        self._pool.connection_pool_kw["socket_options"] = list(SOCKET_OPTIONS)
        self._clock = clock
        self._connect_s = connect_s

    @classmethod
    def from_kubeconfig(
        cls, path: str, clock: clocks.Clock, *, context: str = ""
    ) -> "OfficialTransport":
        """Connect to the server of a kubeconfig; raise UsageError for an unusable one."""
        try:
            # The package has types for its models only.
            api = kubernetes.config.new_client_from_config(  # type: ignore[no-untyped-call]
                config_file=path, context=context or None, persist_config=False
            )
        except kubernetes.config.ConfigException as error:
            raise errors.UsageError(
                f"cannot use kubeconfig {path}: {error}", remedy=_REMEDY
            ) from error
        except (
            OSError, ValueError, TypeError, AttributeError, LookupError, yaml.YAMLError
        ) as error:  # fmt: skip  # the package checks no types in the file
            # Not chained: the error of a decoder may quote a token or a key.
            raise errors.UsageError(
                f"cannot use kubeconfig {path}: {type(error).__name__}",
                remedy=_REMEDY,
            ) from None
        return cls(api, clock)

    @classmethod
    def from_service_account(cls, clock: clocks.Clock) -> "OfficialTransport":
        """Connect to the API server of this pod; raise UsageError outside a pod."""
        configuration = kubernetes.client.Configuration()
        try:
            kubernetes.config.load_incluster_config(  # type: ignore[no-untyped-call]  # as above
                client_configuration=configuration
            )
        except kubernetes.config.ConfigException as error:
            raise errors.UsageError(
                f"cannot use the service account: {error}", remedy="pass --kubeconfig FILE"
            ) from error
        return cls(kubernetes.client.ApiClient(configuration), clock)

    def send(self, request: ApiRequest) -> ApiResponse:
        """Return the response with any status; raise UnreachableError without one in time.

        A GET is sent again when the server had closed the idle connection.
        """
        try:
            try:
                return self._exchange_request(request)
            except ProtocolError:
                if request.method != "GET":
                    raise
                return self._exchange_request(request)
        except (HTTPError, OSError) as error:
            raise self.make_unreachable(request, error, request.limit_s) from error

    def open_stream(self, request: ApiRequest, *, duration_s: float) -> "OfficialStream":
        """Return a stream that is not connected yet; it ends after ``duration_s`` at the latest."""
        return OfficialStream(self, request, duration_s)

    def close(self) -> None:
        """Close the idle connections."""
        self._pool.clear()

    def begin_response(
        self, request: ApiRequest, read_s: float, *, gzip: bool
    ) -> urllib3.HTTPResponse:
        """Send, and read the headers of the response; ``read_s`` limits each read afterwards."""
        headers = {
            **self._api.default_headers,
            "Accept": request.accept,
            "Accept-Encoding": "gzip" if gzip else "identity",
        }
        # This calls the hook of the package that renews the tokens of credential plugins.
        for setting in self._api.configuration.auth_settings().values():
            headers[setting["key"]] = setting["value"]
        if request.body:
            headers["Content-Type"] = request.content_type
        response = self._pool.request(
            request.method,
            f"{self._api.configuration.host}{request.target}",
            body=request.body or None,
            headers=headers,
            timeout=urllib3.Timeout(connect=self._connect_s, read=read_s),
            # By default urllib3 repeats requests and follows redirects.
            retries=False,
            preload_content=False,
        )
        return cast("urllib3.HTTPResponse", response)

    def read_response(self, request: ApiRequest, response: urllib3.HTTPResponse) -> ApiResponse:
        """Read the body; raise TooLargeError when it is longer than allowed."""
        end = self._clock.monotonic() + request.limit_s
        body = read_body(
            self._iter_chunks(response, end), request.max_bytes, self.describe_request(request)
        )
        return ApiResponse(
            response.status, body, parse_retry_after_s(response.headers.get("Retry-After"))
        )

    def describe_request(self, request: ApiRequest) -> str:
        """Format the request for a message."""
        return f"{request.method} {request.path} at {self._api.configuration.host}"

    def make_unreachable(
        self, request: ApiRequest, error: Exception, limit_s: float
    ) -> errors.UnreachableError:
        """Convert an error of the package to the message that HttpTransport would give."""
        operation = self.describe_request(request)
        if isinstance(error, ReadTimeoutError | TimeoutError):
            return errors.UnreachableError(f"{operation}: no response within {limit_s:g} s")
        if isinstance(error, ProtocolError):
            return errors.UnreachableError(
                f"{operation}: the connection ended before the response was complete"
            )
        # The text of urllib3 contains the memory address of an object, which differs each time.
        cause = error.__context__
        reason = cause.strerror if isinstance(cause, OSError) else ""
        return errors.UnreachableError(f"{operation}: {reason or error}")

    def _exchange_request(self, request: ApiRequest) -> ApiResponse:
        response = self.begin_response(request, request.limit_s, gzip=True)
        try:
            reply = self.read_response(request, response)
        except BaseException:
            response.close()
            raise
        response.release_conn()
        return reply

    def _iter_chunks(self, response: urllib3.HTTPResponse, end: float) -> Iterator[bytes]:
        for piece in response.stream(CHUNK_BYTES, decode_content=True):
            if self._clock.monotonic() > end:
                raise TimeoutError("the time limit is over")
            yield piece


class OfficialStream:
    """A streaming response; see HttpStream."""

    def __init__(
        self, transport: OfficialTransport, request: ApiRequest, duration_s: float
    ) -> None:
        self._transport = transport
        self._request = request
        self._duration_s = duration_s
        self._closed = False
        self._response: urllib3.HTTPResponse | None = None
        self._socket: socket.socket | None = None

    def read_response(self) -> ApiResponse:
        """Connect and return status 200 without a body, or another status with its body."""
        try:
            response = self._transport.begin_response(self._request, self._duration_s, gzip=False)
            if response.status != 200:
                with contextlib.closing(response):
                    return self._transport.read_response(self._request, response)
        except (HTTPError, OSError) as error:
            raise self._transport.make_unreachable(
                self._request, error, self._duration_s
            ) from error
        self._response = response
        # urllib3 cannot interrupt a read. Shutting a duplicate down ends the connection of both.
        self._socket = socket.socket(fileno=socket.dup(response.fileno()))
        if self._closed:
            self.close()
        return ApiResponse(response.status)

    def iter_lines(self) -> Iterator[bytes]:
        """Yield each line as it arrives, until the stream ends or ``close`` is called."""
        if self._response is None or self._socket is None:
            return
        try:
            yield from iter_lines(
                self._response.stream(CHUNK_BYTES, decode_content=True),
                self._request.max_bytes,
                self._transport.describe_request(self._request),
            )
        except (HTTPError, OSError) as error:
            if not self._closed:
                raise self._transport.make_unreachable(
                    self._request, error, self._duration_s
                ) from error
        finally:
            self._socket.close()
            self._response.close()

    def close(self) -> None:
        """End the stream; the thread that waits in ``iter_lines`` returns at once."""
        self._closed = True
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # The connection has ended.
