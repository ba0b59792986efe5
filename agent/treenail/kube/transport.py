"""HTTP to the API server on http.client and ssl alone: what the agent can afford on a node."""

import http.client
import ssl
import threading
import zlib
from collections.abc import Iterator
from urllib.parse import urlsplit

from treenail.clock import Clock
from treenail.errors import Unreachable
from treenail.kube.body import MOST_BYTES, PIECE, lines, refuse_too_long, whole
from treenail.kube.credentials import Credentials
from treenail.kube.kubeconfig import Connection
from treenail.kube.link import Link
from treenail.kube.request import Reply, Request, retry_after_s

_Broken = (OSError, http.client.HTTPException)


class HttpTransport:
    """Sends requests over kept connections, and opens streams, each on its own connection.

    Thread-safe. At most ``keep`` connections are kept between requests; requests at the same
    time open more. Making a connection may take ``connect_s``. An answer, or a line of a
    stream, of more than ``most_bytes`` is refused.
    """

    def __init__(
        self,
        connection: Connection,
        clock: Clock,
        *,
        keep: int = 1,
        connect_s: float = 10.0,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._wire = _Wire(connection, clock, connect_s, most_bytes)
        self._clock = clock
        self._keep = keep
        self._lock = threading.Lock()
        self._kept: list[Link] = []
        self._busy: set[Link] = set()

    def send(self, request: Request) -> Reply:
        """The answer, whatever its status; Unreachable when there is none in time.

        A kept connection may end at any moment. What only reads is then sent once more; what
        writes is not, because it may have taken effect.
        """
        deadline = self._clock.monotonic() + request.limit_s
        link = self._take()
        try:
            return self._exchange(link, request, deadline)
        except _Broken as error:
            if not (link.used and request.method == "GET") or isinstance(error, TimeoutError):
                raise self._wire.unreachable(request, error, request.limit_s) from error
        try:
            return self._exchange(self._new(), request, deadline)
        except _Broken as error:
            raise self._wire.unreachable(request, error, request.limit_s) from error

    def open(self, request: Request, *, lasts_s: float) -> "HttpStream":
        """A stream, which nothing was sent for yet; it ends after ``lasts_s`` at the latest."""
        return HttpStream(self._wire, self._clock, request, lasts_s)

    def close(self) -> None:
        """End the connections; requests under way fail at once. Streams are their owners'."""
        with self._lock:
            kept, self._kept = self._kept, []
            for link in self._busy:
                link.abort()
        for link in kept:
            link.close()

    def _exchange(self, link: Link, request: Request, deadline: float) -> Reply:
        keep = False
        try:
            response = self._wire.begin(link, request, deadline, gzip=True)
            reply = self._wire.read(request, response)
            keep = not response.will_close
            response.close()
            return reply
        finally:
            self._put_back(link, keep=keep)

    def _take(self) -> Link:
        context = self._wire.credentials.context()
        with self._lock:
            while self._kept:
                link = self._kept.pop()
                if link.context is context and link.idle():
                    link.used = True
                    self._busy.add(link)
                    return link
                link.close()
        return self._new()

    def _new(self) -> Link:
        link = self._wire.link()
        with self._lock:
            self._busy.add(link)
        return link

    def _put_back(self, link: Link, *, keep: bool) -> None:
        with self._lock:
            self._busy.discard(link)
            if keep and len(self._kept) < self._keep:
                self._kept.append(link)
                return
        link.close()


class HttpStream:
    """One answer that goes on, on a connection of its own.

    One thread calls ``reply`` once and then iterates ``lines``; ``close`` may come from any.
    """

    def __init__(self, wire: "_Wire", clock: Clock, request: Request, lasts_s: float) -> None:
        self._wire = wire
        self._clock = clock
        self._request = request
        self._lasts_s = lasts_s
        self._link = wire.link()
        self._lock = threading.Lock()
        self._reading = False
        self._closed = False
        self._response: http.client.HTTPResponse | None = None

    def reply(self) -> Reply:
        """How the server answers: 200 and no body, or another status with its body.

        Unreachable when it does not within the request's limit, or after ``close``.
        """
        deadline = self._clock.monotonic() + self._request.limit_s
        self._note(reading=True)
        try:
            response = self._wire.begin(self._link, self._request, deadline, gzip=False)
            if response.status != http.client.OK:
                reply = self._wire.read(self._request, response)
                self._link.close()
                return reply
        except _Broken as error:
            self._link.close()
            raise self._wire.unreachable(self._request, error, self._request.limit_s) from error
        self._note(reading=False)
        self._response = response
        return Reply(response.status)

    def lines(self) -> Iterator[bytes]:
        """Each line as it comes, until the server ends the stream or somebody closes it.

        Unreachable when the connection ends before the stream does, or ``lasts_s`` is over.
        """
        if self._response is None:
            return
        self._note(reading=True)
        self._link.deadline = self._clock.monotonic() + self._lasts_s
        try:
            yield from self._wire.lines(self._request, self._response)
        except _Broken as error:
            if not self._closed:
                raise self._wire.unreachable(self._request, error, self._lasts_s) from error
        finally:
            self._link.close()

    def close(self) -> None:
        """End it: the thread that waits in ``reply`` or ``lines`` wakes up at once."""
        with self._lock:
            self._closed = True
            self._link.abort()
            if not self._reading:
                self._link.close()

    def _note(self, *, reading: bool) -> None:
        """Note whether a thread reads; while one does, the socket is its to give back."""
        with self._lock:
            self._reading = reading
            if self._closed and not reading:
                self._link.close()


class _Wire:
    """How requests look on a connection to this server, and what its answers mean."""

    def __init__(
        self, connection: Connection, clock: Clock, connect_s: float, most_bytes: int
    ) -> None:
        server = urlsplit(connection.server)
        self.credentials = Credentials(connection)
        self._clock = clock
        self._host = server.hostname or ""
        self._port = server.port or http.client.HTTPS_PORT
        self._prefix = server.path
        self._authority = server.netloc
        self._server_name = connection.tls_server_name or self._host
        self._connect_s = connect_s
        self._most_bytes = most_bytes

    def link(self) -> Link:
        return Link(self.credentials.context(), self._clock)

    def begin(
        self, link: Link, request: Request, deadline: float, *, gzip: bool
    ) -> http.client.HTTPResponse:
        """Connect if needed, send, and read the headers of the answer, until ``deadline``."""
        link.deadline = deadline
        if not link.used:
            link.connect(
                self._host, self._port, server_name=self._server_name, limit_s=self._connect_s
            )
        link.write(self._head(request, gzip=gzip) + request.body)
        return link.answer(request.method)

    def read(self, request: Request, response: http.client.HTTPResponse) -> Reply:
        """The whole answer; ClusterError when it is longer than allowed."""
        body = whole(_pieces(response), self._most_bytes, self._what(request))
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        return Reply(
            response.status,
            self._plain(request, response, body),
            retry_after_s(response.getheader("Retry-After")),
        )

    def lines(self, request: Request, response: http.client.HTTPResponse) -> Iterator[bytes]:
        """Each line of the answer as it comes, without its end."""
        yield from lines(_pieces(response), self._most_bytes, self._what(request))

    def unreachable(self, request: Request, error: Exception, limit_s: float) -> Unreachable:
        what = self._what(request)
        match error:
            case ssl.SSLCertVerificationError():
                return Unreachable(
                    f"{what}: its certificate is not trusted: {error.verify_message}",
                    remedy="name the CA that signed it in the kubeconfig",
                )
            case TimeoutError():
                return Unreachable(f"{what}: no answer within {limit_s:g} s")
            case http.client.IncompleteRead() | ConnectionResetError() | BrokenPipeError():
                return Unreachable(f"{what}: the connection ended before the answer did")
            case OSError(strerror=str(reason)):
                return Unreachable(f"{what}: {reason}")
            case _:
                return Unreachable(f"{what}: {str(error) or type(error).__name__}")

    def _head(self, request: Request, *, gzip: bool) -> bytes:
        lines = [
            f"{request.method} {self._prefix}{request.target} HTTP/1.1",
            f"Host: {self._authority}",
            "User-Agent: treenail",
            "Accept: application/json",
            f"Accept-Encoding: {'gzip' if gzip else 'identity'}",
        ]
        if authorization := self.credentials.authorization():
            lines.append(f"Authorization: {authorization}")
        if request.body:
            lines.append(f"Content-Type: {request.content_type}")
        if request.method != "GET":
            lines.append(f"Content-Length: {len(request.body)}")
        return "\r\n".join([*lines, "", ""]).encode("ascii")

    def _plain(self, request: Request, response: http.client.HTTPResponse, body: bytes) -> bytes:
        if response.getheader("Content-Encoding") != "gzip":
            return body
        unzip = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        try:
            plain = unzip.decompress(body, self._most_bytes + 1)
        except zlib.error as error:
            raise http.client.HTTPException("the answer is not gzip") from error
        refuse_too_long(len(plain), self._most_bytes, self._what(request))
        return plain

    def _what(self, request: Request) -> str:
        return f"{request.method} {request.path} at {self._authority}"


def _pieces(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while piece := response.read1(PIECE):
        yield piece
