"""Responses to requests for the config of a pool, without sockets.

The Accept header chooses the version of Ignition. Ignition 2 sends
``application/vnd.coreos.ignition+json;version=3.3.0, */*;q=0.1``, and Ignition 0.35, which reads
version 2, sends ``version=2.4.0``. The rules are those of the MCO's server.

Documents are cached: each is built once, however many machines request it.
"""

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Generic, TypeVar

from treenail import errors, sanitize
from treenail.config.ignition import emit
from treenail.provisioning.content.document import ServedDocument, build_document
from treenail.provisioning.content.source import (
    RETRY_AFTER_S,
    PoolMissingError,
    PoolSource,
    ServedInputs,
    SourceUnreadyError,
)
from treenail.provisioning.machines.logged_requests import RequestOutcome
from treenail.provisioning.tokens import tokens

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Identity of a document. Another one of the same ``slot`` replaces it."""

    slot: Hashable
    """Pool and version of Ignition's format."""
    versions: tuple[str, ...]
    """Versions of everything that the document is built from."""


@dataclass(frozen=True, slots=True)
class CachedDocument(Generic[T]):
    """A document and whether another request had it built."""

    document: T
    is_cached: bool


class DocumentCache(Generic[T]):
    """Keeps at most ``max_entries`` documents, those that were requested last. Thread-safe.

    It drops a replaced document at once. Responses in progress have references of their own, so the
    memory is free after the last of them.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[tuple[str, ...], Future[T]]] = OrderedDict()

    def get(self, key: CacheKey, build: Callable[[], T]) -> CachedDocument[T]:
        """Return the document; the first caller builds it while the others wait.

        Raises the error of ``build``. The cache keeps a `ConfigError`, because the same inputs
        cause it again, and no other error.
        """
        with self._lock:
            known = self._entries.get(key.slot)
            if known is not None and known[0] == key.versions:
                self._entries.move_to_end(key.slot)
                future, is_cached = known[1], True
            else:
                future, is_cached = Future[T](), False
                self._entries[key.slot] = (key.versions, future)
                self._entries.move_to_end(key.slot)
                while len(self._entries) > self._max_entries:
                    self._entries.popitem(last=False)
        if not is_cached:
            self._run_build(key, future, build)
        if (error := future.exception()) is not None:
            # Each raise would add frames to the traceback of the error in the cache.
            raise error.with_traceback(None)
        return CachedDocument(future.result(), is_cached)

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def _run_build(self, key: CacheKey, future: "Future[T]", build: Callable[[], T]) -> None:
        try:
            future.set_result(build())
        except BaseException as error:  # noqa: BLE001  # the waiting threads raise it
            future.set_exception(error)
            if not isinstance(error, errors.ConfigError):
                with self._lock:
                    known = self._entries.get(key.slot)
                    if known is not None and known[1] is future:
                        del self._entries[key.slot]


_ERROR_LIMIT = 500


@dataclass(frozen=True, slots=True)
class ConfigRequest:
    """A request for the config of a pool."""

    pool: str
    address: str
    token: str = field(default="", repr=False)
    """Empty when the client sent none."""
    accept: str = ""
    is_head: bool = False
    """True when the client wants no config, only the head of the response."""


@dataclass(frozen=True, slots=True)
class ConfigResponse:
    """Response to a `ConfigRequest`: a document, or an error.

    After `ConfigService.confirm_sent` or `release` the use of a token is complete.
    """

    status: HTTPStatus
    outcome: RequestOutcome
    error: str = ""
    """One line; contains nothing secret."""
    document: ServedDocument | None = None
    verdict: tokens.AccessVerdict = field(default_factory=tokens.AccessVerdict)
    version: str = ""
    image: str = ""
    is_cached: bool = False
    retry_after_s: int = RETRY_AFTER_S
    """Of a response with status 503."""


class ConfigService:
    """Answers requests for configs from any number of threads."""

    def __init__(
        self, source: PoolSource, access: tokens.Access, *, cache_entries: int = 64
    ) -> None:
        self._source = source
        self._access = access
        self._cache: DocumentCache[ServedDocument] = DocumentCache(cache_entries)

    def answer(self, request: ConfigRequest) -> ConfigResponse:
        """Return the response; never raises.

        Access comes first: a client without a token does not learn which pools exist. A use of the
        token is claimed last, when the config exists; the caller then calls `confirm_sent` or
        `release`.
        """
        verdict = tokens.AccessVerdict()
        version = ""
        try:
            verdict = self._access.check(request.token, request.pool, request.address)
            if not verdict.is_allowed:
                return _refuse_request(verdict)
            version = choose_version(request.accept)
            source = verdict.source or request.pool
            inputs = self._source.read_inputs(source)
            cached = self._cache.get(
                CacheKey((source, version), inputs.versions),
                lambda: self._build_document(inputs, version),
            )
            if not request.is_head:
                verdict = self._access.claim(verdict)
                if not verdict.is_allowed:
                    return _refuse_request(verdict)
        except Exception as error:  # noqa: BLE001  # one request must not end its thread
            status, outcome, text = _describe_error(error)
            return ConfigResponse(
                status,
                outcome,
                text,
                verdict=verdict,
                version=version,
                retry_after_s=(
                    error.retry_after_s if isinstance(error, SourceUnreadyError) else RETRY_AFTER_S
                ),
            )
        return ConfigResponse(
            HTTPStatus.OK,
            RequestOutcome.SERVED,
            document=cached.document,
            verdict=verdict,
            version=version,
            image=cached.document.image,
            is_cached=cached.is_cached,
        )

    def confirm_sent(self, verdict: tokens.AccessVerdict) -> None:
        """Record that the client was sent the last byte of a config; never raises."""
        try:
            self._access.confirm_sent(verdict)
        except Exception as error:  # the client has the config
            log.error(  # noqa: TRY400  # without the message
                "cannot record the use of token %s",
                verdict.token_name,
                exc_info=withhold_message(error),
            )

    def release(self, verdict: tokens.AccessVerdict) -> None:
        """Give the use of a token back after an incomplete response; never raises."""
        try:
            self._access.release(verdict)
        except Exception:
            log.exception("cannot release the use of token %s", verdict.token_name)

    def describe_staleness(self) -> str:
        """Say why and since when the inputs may be outdated; empty when they are current."""
        return self._source.describe_staleness()

    def _build_document(self, inputs: ServedInputs, version: str) -> ServedDocument:
        document = build_document(inputs, version)
        log.info(
            "built the config of pool %s in Ignition %s from %s; image: %s",
            inputs.pool.name,
            version,
            document.rendered,
            inputs.image.reason,
        )
        return document


def _refuse_request(verdict: tokens.AccessVerdict) -> ConfigResponse:
    return ConfigResponse(verdict.status, RequestOutcome.REFUSED, verdict.reason, verdict=verdict)


def _describe_error(error: Exception) -> tuple[HTTPStatus, RequestOutcome, str]:
    match error:
        case PoolMissingError():
            return HTTPStatus.NOT_FOUND, RequestOutcome.INVALID, _format_error(error)
        case AcceptError():
            return HTTPStatus.BAD_REQUEST, RequestOutcome.INVALID, _format_error(error)
        case emit.VersionTooOldError():
            return HTTPStatus.NOT_ACCEPTABLE, RequestOutcome.INVALID, _format_error(error)
        case SourceUnreadyError():
            return HTTPStatus.SERVICE_UNAVAILABLE, RequestOutcome.FAILED, _format_error(error)
        case errors.TreenailError():
            return HTTPStatus.INTERNAL_SERVER_ERROR, RequestOutcome.FAILED, _format_error(error)
        case _:
            pass
    log.error("cannot build a config", exc_info=withhold_message(error))
    return (
        HTTPStatus.INTERNAL_SERVER_ERROR,
        RequestOutcome.FAILED,
        "cannot build the config: the log of the server has the error",
    )


def _format_error(error: errors.TreenailError) -> str:
    return sanitize.escape_line(str(error))[:_ERROR_LIMIT]


ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None]


def withhold_message(error: BaseException) -> ExceptionInfo:
    """Return the error for the argument ``exc_info`` of a log, with its type and traceback only.

    The message of a KeyError or ValueError may contain a part of a request or of a config.
    """
    named = RuntimeError(f"{type(error).__name__}, message withheld")
    return RuntimeError, named, error.__traceback__


IGNITION_SUBTYPE = "vnd.coreos.ignition+json"
DEFAULT_VERSION = emit.VERSIONS_SERVED[0]
"""The version for clients that request none, as curl."""

# Two digits more than any version needs: int() has a limit of its own.
_VERSION = re.compile(
    r"([0-9]{1,6})\.([0-9]{1,6})\.([0-9]{1,6})(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?"
)
_QUALITY = re.compile(r"[0-9]{1,6}(\.[0-9]{0,6})?")
_END = (4, 0, 0, False)

_Version = tuple[int, int, int, bool]


class AcceptError(errors.UsageError):
    """The client reads no Ignition version that the server has; respond with 400."""


def choose_version(accept: str) -> str:
    """Return one of `VERSIONS_SERVED` for an Accept header, which may be empty.

    Of the requested versions the one with the highest q decides. The result is the newest version
    served that is not newer than that. Without a valid version the result is
    `DEFAULT_VERSION`. Raises `AcceptError` when all valid versions are older than 2.2.0 or not
    older than 4.0.0.
    """
    requested = sorted(_list_versions(accept), key=lambda pair: pair[0], reverse=True)
    for _quality, version in requested:
        if _parse_served(DEFAULT_VERSION) <= version < _END:
            return max(
                served for served in emit.VERSIONS_SERVED if _parse_served(served) <= version
            )
    if requested:
        major, minor, patch, _ = requested[0][1]
        raise AcceptError(
            f"cannot serve Ignition {major}.{minor}.{patch}: treenail has "
            f"{', '.join(emit.VERSIONS_SERVED)}",
            remedy="request one of these in the Accept header",
        )
    return DEFAULT_VERSION


def _list_versions(accept: str) -> list[tuple[float, _Version]]:
    """Return the valid versions of Ignition's type with their q, in the order of the header."""
    accepted = []
    for entry in accept.split(","):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        _, slash, subtype = kind.partition("/")
        if not slash or subtype.lower() != IGNITION_SUBTYPE:
            continue
        pairs = [parameter.partition("=") for parameter in parameters]
        versions = [_parse_version(text) for name, _, text in pairs if name.lower() == "version"]
        qualities = [
            float(text) for name, _, text in pairs if name == "q" and _QUALITY.fullmatch(text)
        ]
        version = next((candidate for candidate in versions if candidate is not None), None)
        if version is not None:
            accepted.append((qualities[0] if qualities else 1.0, version))
    return accepted


def _parse_version(text: str) -> _Version | None:
    """Parse a semantic version; a pre-release is older than its release."""
    match = _VERSION.fullmatch(text.strip('"'))
    if match is None:
        return None
    return int(match[1]), int(match[2]), int(match[3]), match[4] is None


def _parse_served(version: str) -> _Version:
    major, minor, patch = map(int, version.split("."))
    return major, minor, patch, True
