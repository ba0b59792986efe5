"""HTTPS requests with a limit on every size and wait.

``http.client`` limits the length and number of headers.
"""

import contextlib
import http.client
import ipaddress
import re
import socket
import ssl
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol
from urllib.parse import urlsplit

from treenail import clocks, deadline_socket, memory, sanitize
from treenail.errors import ConfigError
from treenail.registry.errors import AnswerInvalid, CertificateUnknown, RegistryError, Unreachable
from treenail.registry.proxies import Proxy, ProxySettings

PIECE = 256 * 1024
_HTTPS_PORT, _HTTP_PORT = 443, 80
_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----[^-]*-----END CERTIFICATE-----")


@dataclass(frozen=True, slots=True)
class RegistryLimits:
    """Maximum sizes in bytes and waits in seconds."""

    attempts: int = 5
    """Calls of one request while the registry is unreachable or busy."""
    connect_s: float = 10.0
    idle_s: float = 60.0
    """Between two received or sent pieces; a registry computes digests for long at an upload."""
    request_s: float = 120.0
    """A whole request without its blob."""
    bytes_per_s: float = 50_000.0
    """Minimum rate of a blob; its time is added to ``request_s``."""
    manifest_bytes: int = 4 * memory.MIB
    page_bytes: int = 4 * memory.MIB
    config_bytes: int = 8 * memory.MIB
    token_bytes: int = 256 * 1024
    error_bytes: int = 16 * 1024
    pages: int = 1000
    tag_page: int = 1000
    """Tags that one page is requested to have; docker-registry 2.8 has no pages."""
    tags: int = 100_000
    redirects: int = 5
    chunk_bytes: int = 32 * memory.MIB
    """Larger blobs are uploaded in chunks of this size."""


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """CA certificates that are trusted beside those of the system, PEM."""

    ca_pem: str = field(default="", repr=False)
    is_plain: bool = False
    """Use HTTP without TLS; only for a registry on this host."""


@dataclass(frozen=True, slots=True)
class Url:
    """An absolute URL without user, password and fragment."""

    scheme: str
    host: str
    port: int
    target: str
    """Path with query."""

    @property
    def origin(self) -> tuple[str, str, int]:
        """Scheme, host and port: what an Authorization belongs to."""
        return self.scheme, self.host, self.port

    @property
    def address(self) -> str:
        """Host with its port where that is not the default."""
        default = _HTTPS_PORT if self.scheme == "https" else _HTTP_PORT
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == default else f"{host}:{self.port}"


def parse_url(text: str, base: Url | None = None) -> Url:
    """Parse a URL, relative to ``base`` if there is one; raise ValueError."""
    if any(ord(char) <= 32 or ord(char) > 126 for char in text):
        raise ValueError("a character that no URL has")
    parts = urlsplit(text)
    if base is not None and not parts.scheme and not parts.netloc:
        if not parts.path.startswith("/"):
            raise ValueError("a relative path")
        scheme, host, port = base.origin
    elif parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc:
        raise ValueError("not an HTTP URL")
    else:
        scheme, host = parts.scheme, parts.hostname
        port = parts.port or (_HTTPS_PORT if scheme == "https" else _HTTP_PORT)
    return Url(scheme, host, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))


class ByteBody(Protocol):
    """The body of a request: its size, and its pieces from the beginning each time."""

    @property
    def size(self) -> int: ...

    def iter_pieces(self) -> Iterator[bytes]: ...


class RegistryAnswer:
    """One response. Read the body with one of the methods, then the connection is used again."""

    def __init__(
        self, transport: "RegistryTransport", connection: "_Connection", action: str, url: Url
    ) -> None:
        self._transport = transport
        self._connection = connection
        self._action = action
        self.url = url
        response = connection.response
        self.status = response.status
        self._headers = response.headers

    def get_header(self, name: str) -> str:
        """Return the first value of a header; empty without one."""
        return (self._headers.get(name) or "").strip()

    def get_headers(self, name: str) -> list[str]:
        """Return all values of a header."""
        return [str(text) for text in self._headers.get_all(name) or ()]

    def read(self, limit: int) -> bytes:
        """Read a body of at most ``limit`` bytes; raise `AnswerInvalid` for a longer one."""
        content = bytearray()
        for piece in self.iter_pieces():
            content += piece
            if len(content) > limit:
                self.close()
                raise AnswerInvalid(
                    f"cannot {self._action}: the answer of {self.url.address} is longer than "
                    f"{limit} bytes",
                    status=self.status,
                )
        return bytes(content)

    def iter_pieces(self) -> Iterator[bytes]:
        """Yield the body; raise `Unreachable` when the connection breaks before its end."""
        response = self._connection.response
        is_complete = False
        try:
            with translate_errors(self._action, self.url.address):
                left = response.length
                while piece := response.read(PIECE if left is None else min(PIECE, left)):
                    left = None if left is None else left - len(piece)
                    yield piece
                # A read with a size returns what there is when the connection ends.
                if left:
                    raise http.client.IncompleteRead(b"", left)
            is_complete = True
        finally:
            if not is_complete:
                self.close()
        self._transport.keep_connection(self._connection)

    def discard_body(self, limit: int) -> None:
        """Drop a short body, so that the connection is used again."""
        with contextlib.suppress(RegistryError):
            self.read(limit)

    def allow_transfer(self, size: int) -> None:
        """Give a body of this size its time, counted from now."""
        self._connection.extend_deadline(self._transport.compute_deadline(size))

    def close(self) -> None:
        """Close the connection without reading the rest."""
        self._connection.close()


class RegistryTransport:
    """Connections to registries; one request at a time, so each thread needs its own."""

    def __init__(
        self, tls: TlsSettings, proxies: ProxySettings, limits: RegistryLimits, clock: clocks.Clock
    ) -> None:
        self._tls = tls
        self._proxies = proxies
        self._limits = limits
        self._clock = clock
        self._idle: dict[tuple[str, str, int], _Connection] = {}
        self._is_local: bool | None = None
        # Callers need not close a client.
        weakref.finalize(self, _close_connections, self._idle)

    def send(
        self,
        method: str,
        url: Url,
        headers: Mapping[str, str],
        body: ByteBody | bytes | None = None,
        *,
        action: str,
    ) -> RegistryAnswer:
        """Send one request, and return when the head of its answer is read."""
        size = 0 if body is None else len(body) if isinstance(body, bytes) else body.size
        deadline = self.compute_deadline(size)
        fields = {"Host": url.address, "User-Agent": "treenail", **headers}
        if body is not None or method in {"POST", "PUT", "PATCH"}:
            fields["Content-Length"] = str(size)
        # A part of a blob must not be sent twice: the caller asks how much of it arrived.
        is_repeatable = body is None or isinstance(body, bytes)
        idle = self._idle.pop(url.origin, None) if is_repeatable else None
        if idle is not None:
            # The server may have closed it meanwhile: then the request goes over a new one.
            with contextlib.suppress(OSError, http.client.HTTPException):
                idle.extend_deadline(deadline)
                idle.exchange(method, url.target, fields, body)
                return RegistryAnswer(self, idle, action, url)
            idle.close()
        with translate_errors(action, url.address):
            connection = self._connect(url, deadline, action)
            try:
                connection.exchange(method, url.target, fields, body)
            except BaseException:
                connection.close()
                raise
        return RegistryAnswer(self, connection, action, url)

    def clone(self) -> "RegistryTransport":
        """Return a transport for another thread."""
        return RegistryTransport(self._tls, self._proxies, self._limits, self._clock)

    def compute_deadline(self, size: int) -> float:
        """Return the end of a request with a body of this size, by the clock's monotonic time."""
        limit_s = self._limits.request_s + size / self._limits.bytes_per_s
        return self._clock.monotonic() + limit_s

    def keep_connection(self, connection: "_Connection") -> None:
        """Use a connection again whose answer is read."""
        if connection.can_reuse and connection.origin not in self._idle:
            self._idle[connection.origin] = connection
        else:
            connection.close()

    def close(self) -> None:
        """Close the connections that wait for a request."""
        _close_connections(self._idle)

    def _connect(self, url: Url, deadline: float, action: str) -> "_Connection":
        proxy = None
        if url.scheme == "https":
            proxy = self._proxies.find_proxy(url.host, url.port)
        place = (url.host, url.port) if proxy is None else (proxy.host, proxy.port)
        plain = socket.create_connection(place, self._limits.connect_s)
        try:
            if proxy is None:
                self._check_address(plain.getpeername()[0], url, action)
            # http.client sends head and body apart: Nagle's algorithm would hold back the body
            # until the server has acknowledged the head.
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if proxy is not None:
                self._open_tunnel(plain, url, proxy, deadline)
            if url.scheme == "https":
                plain.settimeout(self._limits.connect_s)
                plain = _make_context(self._tls.ca_pem).wrap_socket(plain, server_hostname=url.host)
        except BaseException:
            plain.close()
            raise
        limited = deadline_socket.DeadlineSocket(plain, self._clock, self._limits.idle_s, deadline)
        return _Connection(limited, url.origin)

    def _check_address(self, address: str, url: Url, action: str) -> None:
        """Reject services of this host or link, as of a redirect, unless the registry is there."""
        ip = ipaddress.ip_address(address.partition("%")[0])
        ip = getattr(ip, "ipv4_mapped", None) or ip
        is_local = ip.is_loopback or ip.is_link_local
        # The first connection is to the registry.
        if self._is_local is None:
            self._is_local = is_local
        if is_local and not self._is_local:
            raise AnswerInvalid(
                f"cannot {action}: the registry sends to {url.address}, which is {ip}: expected no "
                "address of this host or link"
            )

    def _open_tunnel(self, plain: socket.socket, url: Url, proxy: Proxy, deadline: float) -> None:
        limited = deadline_socket.DeadlineSocket(
            plain, self._clock, self._limits.connect_s, deadline
        )
        host = f"[{url.host}]" if ":" in url.host else url.host
        lines = [f"CONNECT {host}:{url.port} HTTP/1.1", f"Host: {host}:{url.port}"]
        if proxy.authorization:
            lines.append(f"Proxy-Authorization: {proxy.authorization}")
        limited.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode("ascii"))
        response = http.client.HTTPResponse(limited, method="CONNECT")  # type: ignore[arg-type]
        response.begin()
        # A proxy answers 407 without a valid login, and often 403 for a port other than 443.
        if response.status != 200:
            raise _ProxyRefusal(f"the proxy {proxy.host}:{proxy.port} answered {response.status}")


@lru_cache(maxsize=8)
def _make_context(ca_pem: str) -> ssl.SSLContext:
    # Reading the certificates of the system takes 30 ms.
    context = ssl.create_default_context()
    if ca_pem:
        # Comments between the certificates may be in any language, and ssl accepts ASCII only.
        certificates = "\n".join(_CERTIFICATE.findall(ca_pem))
        try:
            context.load_verify_locations(cadata=certificates)
        except (ssl.SSLError, TypeError, ValueError) as error:
            raise ConfigError(
                "cannot use the CA bundle for registries: expected certificates in PEM",
                remedy="write certificates that begin with -----BEGIN CERTIFICATE-----",
            ) from error
    return context


def _close_connections(connections: "dict[tuple[str, str, int], _Connection]") -> None:
    while connections:
        connections.popitem()[1].close()


class _ProxyRefusal(OSError):
    """A proxy opens no tunnel."""


class _Connection:
    """A connection and the response that is read from it."""

    response: http.client.HTTPResponse

    def __init__(
        self, limited: deadline_socket.DeadlineSocket, origin: tuple[str, str, int]
    ) -> None:
        self.origin = origin
        self._socket = limited
        self._connection = http.client.HTTPConnection("registry")
        # http.client would open a connection of its own, without TLS and without the deadline, when
        # the server has closed this one.
        self._connection.auto_open = 0
        self._connection.sock = limited

    @property
    def can_reuse(self) -> bool:
        """Whether the answer is complete and the server keeps the connection."""
        # After an answer with "Connection: close" http.client drops its socket (getresponse).
        return self.response.isclosed() and self._connection.sock is not None

    def extend_deadline(self, deadline: float) -> None:
        self._socket.deadline = deadline

    def exchange(
        self, method: str, target: str, headers: Mapping[str, str], body: "ByteBody | bytes | None"
    ) -> None:
        content: bytes | Iterable[bytes] | None
        content = body if body is None or isinstance(body, bytes) else body.iter_pieces()
        self._connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            self._connection.putheader(name, value)
        # The server may refuse a body before it has read it: its answer says why.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.endheaders(content)
        self.response = self._connection.getresponse()

    def close(self) -> None:
        self._connection.close()
        response: http.client.HTTPResponse | None = getattr(self, "response", None)
        if response is not None:
            response.close()
        self._socket.close()


def _add_port(address: str) -> str:
    return address if re.search(r":[0-9]+$", address) else f"{address}:{_HTTPS_PORT}"


@contextlib.contextmanager
def translate_errors(action: str, address: str) -> Iterator[None]:
    """Translate errors of sockets, TLS and HTTP; none contains a header or a body."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise CertificateUnknown(
            f"cannot {action}: the certificate of {address} is not trusted: "
            f"{sanitize.escape_line(error.verify_message)[:200]}",
            remedy="add the CA of the registry to the trust bundle; see its certificate with: "
            f"openssl s_client -showcerts -connect {_add_port(address)} </dev/null",
        ) from error
    # TimeoutError and gaierror are subclasses of OSError, so they come first.
    except TimeoutError as error:
        raise Unreachable(f"cannot {action}: {address} does not answer in time") from error
    except socket.gaierror as error:
        raise Unreachable(
            f"cannot {action}: the host name {address} is unknown: {error.strerror}",
            remedy="check the registry's name, and the name servers",
        ) from error
    except (http.client.HTTPException, ValueError) as error:
        if isinstance(error, http.client.IncompleteRead | http.client.RemoteDisconnected):
            cause = f"cannot {action}: {address} closed the connection before the end"
            raise Unreachable(cause) from None
        # The text may contain what the server sent.
        name = type(error).__name__
        raise AnswerInvalid(f"cannot {action}: {address} does not speak HTTP: {name}") from None
    except OSError as error:
        text = sanitize.escape_line(error.strerror or str(error) or type(error).__name__)[:200]
        raise Unreachable(f"cannot {action}: cannot reach {address}: {text}") from error
