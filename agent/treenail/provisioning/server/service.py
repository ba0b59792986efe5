"""Decides about a request for the config of a pool; knows no sockets."""

import logging
from dataclasses import dataclass, field
from http import HTTPStatus

from treenail.config.ignition_emit import VersionTooOldError
from treenail.errors import TreenailError
from treenail.escape import escape_line
from treenail.provisioning.content.accept import AcceptError, choose_version
from treenail.provisioning.content.cache import CacheKey, DocumentCache
from treenail.provisioning.content.document import ServedDocument, build_document
from treenail.provisioning.content.source import (
    RETRY_AFTER_S,
    PoolMissingError,
    PoolSource,
    ServedInputs,
    SourceUnreadyError,
)
from treenail.provisioning.server.access import Access, AccessVerdict, RequestOutcome
from treenail.provisioning.server.unexpected import withhold_message

log = logging.getLogger(__name__)

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
    verdict: AccessVerdict = field(default_factory=AccessVerdict)
    version: str = ""
    image: str = ""
    is_cached: bool = False
    retry_after_s: int = RETRY_AFTER_S
    """Of a response with status 503."""


class ConfigService:
    """Answers requests for configs from any number of threads."""

    def __init__(self, source: PoolSource, access: Access, *, cache_entries: int = 64) -> None:
        self._source = source
        self._access = access
        self._cache: DocumentCache[ServedDocument] = DocumentCache(cache_entries)

    def answer(self, request: ConfigRequest) -> ConfigResponse:
        """Return the response; never raises.

        Access comes first: a client without a token does not learn which pools exist. A use of the
        token is claimed last, when the config exists; the caller then calls `confirm_sent` or
        `release`.
        """
        verdict = AccessVerdict()
        version = ""
        try:
            verdict = self._access.check(request.token, request.pool, request.address)
            if not verdict.is_allowed:
                return _refuse_request(verdict)
            version = choose_version(request.accept)
            inputs = self._source.read_inputs(request.pool)
            found = self._cache.get(
                CacheKey((request.pool, version), inputs.versions),
                lambda: self._build(inputs, version),
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
            document=found.document,
            verdict=verdict,
            version=version,
            image=found.document.image,
            is_cached=found.is_cached,
        )

    def confirm_sent(self, verdict: AccessVerdict) -> None:
        """Record that the client was sent the last byte of a config; never raises."""
        try:
            self._access.confirm_sent(verdict)
        except Exception as error:  # the client has the config
            log.error(  # noqa: TRY400  # without the message
                "cannot record the use of token %s",
                verdict.token_name,
                exc_info=withhold_message(error),
            )

    def release(self, verdict: AccessVerdict) -> None:
        """Give the use of a token back after an incomplete response; never raises."""
        try:
            self._access.release(verdict)
        except Exception:
            log.exception("cannot release the use of token %s", verdict.token_name)

    def describe_staleness(self) -> str:
        """Say why and since when the inputs may be outdated; empty when they are current."""
        return self._source.describe_staleness()

    def _build(self, inputs: ServedInputs, version: str) -> ServedDocument:
        document = build_document(inputs, version)
        log.info(
            "built the config of pool %s in Ignition %s from %s; image: %s",
            inputs.pool.name,
            version,
            document.rendered,
            inputs.image.reason,
        )
        return document


def _refuse_request(verdict: AccessVerdict) -> ConfigResponse:
    return ConfigResponse(verdict.status, RequestOutcome.REFUSED, verdict.reason, verdict=verdict)


def _describe_error(error: Exception) -> tuple[HTTPStatus, RequestOutcome, str]:
    match error:
        case PoolMissingError():
            return HTTPStatus.NOT_FOUND, RequestOutcome.INVALID, _format_error(error)
        case AcceptError():
            return HTTPStatus.BAD_REQUEST, RequestOutcome.INVALID, _format_error(error)
        case VersionTooOldError():
            return HTTPStatus.NOT_ACCEPTABLE, RequestOutcome.INVALID, _format_error(error)
        case SourceUnreadyError():
            return HTTPStatus.SERVICE_UNAVAILABLE, RequestOutcome.FAILED, _format_error(error)
        case TreenailError():
            return HTTPStatus.INTERNAL_SERVER_ERROR, RequestOutcome.FAILED, _format_error(error)
        case _:
            pass
    log.error("cannot build a config", exc_info=withhold_message(error))
    return (
        HTTPStatus.INTERNAL_SERVER_ERROR,
        RequestOutcome.FAILED,
        "cannot build the config: the log of the server has the error",
    )


def _format_error(error: TreenailError) -> str:
    return escape_line(str(error))[:_ERROR_LIMIT]
