"""HTTP server of the read-only page: one static file and one JSON document, and nothing else.

The document comes from the watches of the controllers.
"""

import base64
import hashlib
import json
import logging
import re
import threading
import zlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from importlib.resources import files
from ipaddress import ip_address
from typing import Self

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import decode
from treenail.controllers.pools import node_facts, pool_membership, pool_views
from treenail.controllers.runtime import connection_limits, http_server, informer_set
from treenail.controllers.status import leader_status, status_table
from treenail.kube import resources, watch

MAX_NODES = 10_000
"""Nodes in the document, of all pools together: about 5 MB. It counts the others."""
DOCUMENT_VERSION = "statuspage.treenail.io/v1"
_MIN_AGE_S = 1.0
_GZIP = 16 + zlib.MAX_WBITS


@dataclass(frozen=True, slots=True)
class EncodedDocument:
    """The document, encoded once for all readers."""

    plain: bytes
    compressed: bytes
    """With gzip."""


class StatusSource:
    """Builds the document, at most once a second for any number of readers. Thread-safe."""

    def __init__(
        self,
        informers: informer_set.InformerSet,
        clock: clocks.Clock,
        *,
        image_key: str = key.DESIRED_OS_IMAGE,
        read_leader: Callable[[], leader_status.LeaderReport] | None = None,
    ) -> None:
        self._read_leader = read_leader
        self._informers = informers
        self._clock = clock
        self._pools = informers.add_view(
            watch.WatchScope(resources.MACHINECONFIGPOOLS), pool_membership.ObservedPool.from_json
        )
        self._nodes = informers.add_view(
            watch.WatchScope(resources.NODES),
            lambda node: node_facts.NodeFacts.from_json(node, image_key=image_key),
        )
        self._policies = pool_views.add_policy_view(informers)
        self._image_configs, self._image_builds = pool_views.add_build_views(informers)
        self._lock = threading.Lock()
        self._built_at = float("-inf")
        self._latest = EncodedDocument(b"", b"")

    def read_document(self) -> EncodedDocument:
        """Return the document with the present state of all pools and nodes."""
        with self._lock:
            now = self._clock.monotonic()
            if now - self._built_at >= _MIN_AGE_S:
                plain = json.dumps(self.build_document(), separators=(",", ":")).encode()
                encoder = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
                self._latest = EncodedDocument(plain, encoder.compress(plain) + encoder.flush())
                self._built_at = now
            return self._latest

    def build_document(self) -> decode.Json:
        """Build the document; ``problem`` says why it may be outdated."""
        now = self._clock.now()
        leader = None if self._read_leader is None else self._read_leader()
        rows = status_table.build_rows(
            self._pools.get_all(),
            self._nodes.get_all(),
            self._policies.get_all(),
            now=now,
            leader=leader,
            builds=status_table.find_pool_builds(
                self._image_configs.get_all(), self._image_builds.get_all(), now
            ),
        )
        document = status_table.build_status_document(rows, now=now, leader=leader)
        problem = self._informers.summarize_problem()
        omitted = limit_nodes(document, MAX_NODES)
        return {
            "apiVersion": DOCUMENT_VERSION,
            "problem": problem,
            "omittedNodes": omitted,
            **document,
        }


def limit_nodes(document: decode.Json, limit: int) -> int:
    """Leave out the nodes beyond the limit, idle ones first; return their number."""
    omitted = 0
    pools = document["pools"]
    for pool in pools if isinstance(pools, list) else ():
        nodes = pool["nodes"]
        if len(nodes) > limit:
            ranked = sorted(nodes, key=lambda node: node["phase"] in ("updated", "waiting"))
            kept = {node["name"] for node in ranked[:limit]}
            pool["nodes"] = [node for node in nodes if node["name"] in kept]
            omitted += len(nodes) - limit
        limit -= len(pool["nodes"])
    return omitted


log = logging.getLogger(__name__)

MAX_REQUESTS = 16
"""Requests at the same time; further ones get 503."""
# A proxy or `kubectl port-forward` has one address for all its users.
LIMITS = connection_limits.ConnectionLimits(per_address=32)
_INLINE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)
_LOOPBACK_NAMES = ("localhost", "")


class StatusPageServer(http_server.ServerThread):
    """Serves ``/`` and ``/status.json``; use it as a context manager.

    It reads nothing but the document: no query, no body, no other path.
    """

    def __init__(
        self,
        host: str,
        port: int,
        read_document: Callable[[], EncodedDocument],
        *,
        allowed_hosts: Iterable[str] = (),
        clock: clocks.Clock | None = None,
    ) -> None:
        names = frozenset(map(_normalize_host, allowed_hosts))
        try:
            self._server = _PageListener((host, port), read_document, names, clock)
        except OSError as error:
            raise errors.UsageError(
                f"cannot listen on {host or '*'}:{port}: {error.strerror or error}",
                remedy="choose another address: --web HOST:PORT",
            ) from error
        super().__init__(self._server, "statuspage")
        self._host = f"[{host}]" if ":" in host else host

    def __enter__(self) -> Self:
        log.info("serving a page at http://%s:%d/", self._host, self.port)
        return super().__enter__()

    @property
    def port(self) -> int:
        """The port in use, also after a request for port 0."""
        return self._server.server_port


def load_page() -> str:
    """Load the static file."""
    return files("treenail.controllers.status.statuspage").joinpath("page.html").read_text("utf-8")


def build_headers(page: str) -> dict[str, str]:
    """Build the headers of every response; the policy permits the page's own style and script."""
    hashes = {"style": "", "script": ""}
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind] += f" 'sha256-{digest}'"
    policy = (
        f"default-src 'none'; script-src{hashes['script']}; style-src{hashes['style']}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }


def is_expected_host(
    header: str, *, is_loopback: bool, allowed_hosts: Collection[str] = ()
) -> bool:
    """Return whether a request for this Host may be answered.

    A page of another site can make a browser resolve its own name to the address of this page, and
    would then read the answer. So a name must be ``localhost``, which `kubectl port-forward` uses,
    or an allowed one. An address is no name, and a page that is not on the loopback interface
    answers to every address.
    """
    name = _normalize_host(re.sub(r":[0-9]*$", "", header).strip("[]"))
    if name in _LOOPBACK_NAMES or name in allowed_hosts:
        return True
    return _is_loopback_address(name) if is_loopback else _is_address(name)


def _normalize_host(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback_address(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


class _PageListener(http_server.HttpListener):
    def __init__(
        self,
        address: tuple[str, int],
        read_document: Callable[[], EncodedDocument],
        allowed_hosts: frozenset[str],
        clock: clocks.Clock | None,
    ) -> None:
        page = load_page()
        self.page = page.encode()
        self.headers = build_headers(page)
        self.read_document = read_document
        self.places = threading.BoundedSemaphore(MAX_REQUESTS)
        self.allowed_hosts = allowed_hosts
        self.is_loopback = address[0] == "localhost" or _is_loopback_address(address[0])
        super().__init__(address, _PageRequestHandler, LIMITS, clock=clock)


class _PageRequestHandler(http_server.LimitedRequestHandler):
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"
    server: _PageListener

    def do_GET(self) -> None:  # noqa: N802  # named by the base class
        if not self.server.places.acquire(blocking=False):
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests")
            return
        try:
            self._answer_request()
        finally:
            self.server.places.release()

    do_HEAD = do_GET  # noqa: N815  # named by the base class

    def _refuse_method(self) -> None:
        self.send_error(HTTPStatus.METHOD_NOT_ALLOWED, "this page is read-only")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse_method  # noqa: N815  # of http.server

    def _answer_request(self) -> None:
        host = self.headers.get("Host", "")
        if not is_expected_host(
            host, is_loopback=self.server.is_loopback, allowed_hosts=self.server.allowed_hosts
        ):
            use = "localhost" if self.server.is_loopback else "an IP address"
            message = f"unknown host name: use {use}, or allow the name with --web-host"
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, message)
            return
        match self.path.partition("?")[0]:
            case "/":
                self._send_response(self.server.page, "text/html; charset=utf-8")
            case "/status.json":
                document = self.server.read_document()
                is_compressed = "gzip" in self.headers.get("Accept-Encoding", "")
                body = document.compressed if is_compressed else document.plain
                self._send_response(
                    body, "application/json", encoding="gzip" if is_compressed else ""
                )
            case _:
                self.send_error(HTTPStatus.NOT_FOUND, "no such page")

    def _send_response(self, body: bytes, content_type: str, *, encoding: str = "") -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        if encoding:
            self.send_header("Content-Encoding", encoding)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def end_headers(self) -> None:
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        super().end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        if code == HTTPStatus.METHOD_NOT_ALLOWED:
            self.close_connection = True
        super().send_error(code, message, explain)
