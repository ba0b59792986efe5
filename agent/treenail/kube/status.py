"""From an answer that says no to the error class that says what to do about it."""

import json
from collections.abc import Mapping

from treenail.errors import (
    AlreadyExistsError,
    ClusterError,
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidError,
    NotFoundError,
    TooManyRequestsError,
    UnreachableError,
)
from treenail.kube.request import ApiResponse

# A message may quote the object that was refused, and that object may hold a secret.
MESSAGE_CHARS = 256

_BY_CODE: Mapping[int, type[ClusterError]] = {
    400: InvalidError,
    401: ForbiddenError,
    403: ForbiddenError,
    404: NotFoundError,
    405: InvalidError,
    409: ConflictError,
    410: GoneError,
    413: InvalidError,
    415: InvalidError,
    422: InvalidError,
    502: UnreachableError,
    503: UnreachableError,
    504: UnreachableError,
}


def make_response_error(what: str, reply: ApiResponse) -> ClusterError:
    """The error for an answer to ``what`` whose status is not of success."""
    try:
        status = json.loads(reply.body)
    except ValueError:
        status = {}
    if not isinstance(status, dict) or status.get("kind") != "Status":
        status = {}
    return make_status_error(
        what, {"code": reply.status, **status}, retry_after_s=reply.retry_after_s
    )


def make_status_error(
    what: str, status: Mapping[str, object], *, retry_after_s: float = 0.0
) -> ClusterError:
    """The error for a ``BootcStatus`` object, which is also what a watch ends with."""
    code = status.get("code")
    reason = str(status.get("reason") or "")
    said = _format_message(status)[:MESSAGE_CHARS] or f"HTTP {code}"
    message = f"{what}: {said}"
    if code == 429:
        return TooManyRequestsError(
            message, retry_after_s=retry_after_s or _get_retry_after_s(status)
        )
    if reason == "AlreadyExists":
        return AlreadyExistsError(message)
    if code == 401:
        return ForbiddenError(
            f"{what}: the API server does not accept our credential",
            remedy="check that the kubeconfig's certificate or token is still valid",
        )
    if reason == "Timeout":  # the server's own word, unlike a gateway's 504
        return ClusterError(message)
    kind = _BY_CODE.get(code, ClusterError) if isinstance(code, int) else ClusterError
    return kind(message)


def _format_message(status: Mapping[str, object]) -> str:
    """The message and the causes it does not say already, such as the budget's arithmetic."""
    message = str(status.get("message") or status.get("reason") or "").strip()
    details = status.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    for cause in causes if isinstance(causes, list) else []:
        said = str(cause.get("message") or "") if isinstance(cause, dict) else ""
        if said and said not in message:
            message = f"{message} {said}"
    return message


def _get_retry_after_s(status: Mapping[str, object]) -> float:
    details = status.get("details")
    seconds = details.get("retryAfterSeconds") if isinstance(details, dict) else None
    return float(seconds) if isinstance(seconds, int) else 0.0
