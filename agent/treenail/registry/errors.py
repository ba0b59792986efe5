"""Errors of requests to an image registry, one class for each cause that callers tell apart."""

import re

from treenail.errors import TreenailError

_FULL = re.compile(
    r"no space left|disk (is )?full|disk quota|quota exceeded|insufficient storage|out of storage"
    # docker-registry shows the number of ENOSPC.
    r"|\"Err\": ?28\b",
    re.IGNORECASE,
)


class RegistryError(TreenailError):
    """A request to an image registry failed. ``status`` is the HTTP status, 0 without an answer."""

    def __init__(self, message: str, *, status: int = 0, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.status = status


class LoginRefused(RegistryError):
    """401: the registry needs a login, or refuses this one."""


class Denied(RegistryError):
    """403: the login lacks the permission."""


class NotFound(RegistryError):
    """404: the repository, manifest or blob does not exist, or is hidden from this login."""


class TooLarge(RegistryError):
    """413: the registry accepts no content of this size."""


class Unsupported(RegistryError):
    """405, or the code UNSUPPORTED: the registry lacks or forbids the operation."""


class Busy(RegistryError):
    """429: too many requests; retry after ``retry_after_s`` seconds if not 0."""

    def __init__(
        self, message: str, *, status: int = 429, retry_after_s: float = 0.0, remedy: str = ""
    ) -> None:
        super().__init__(message, status=status, remedy=remedy)
        self.retry_after_s = retry_after_s


class ServerFailure(RegistryError):
    """5xx; ``is_full`` when the registry's text says that its storage has no space."""

    def __init__(
        self, message: str, *, status: int = 500, is_full: bool = False, remedy: str = ""
    ) -> None:
        super().__init__(message, status=status, remedy=remedy)
        self.is_full = is_full


class Unreachable(RegistryError):
    """No complete answer: unknown host name, no or a broken connection, a time limit."""


class CertificateUnknown(RegistryError):
    """The registry's certificate is not signed by a trusted CA, expired, or of another host."""


class DigestMismatch(RegistryError):
    """Content does not have the digest by which it was requested or pushed."""


class AnswerInvalid(RegistryError):
    """The registry's answer breaks the protocol or a limit."""


def is_temporary(error: BaseException) -> bool:
    """Return whether the same request may succeed within seconds."""
    if isinstance(error, ServerFailure):
        return not error.is_full
    return isinstance(error, Busy | Unreachable)


def get_retry_after_s(error: BaseException) -> float:
    """Return the pause that the registry requests, in seconds; 0 without one."""
    return error.retry_after_s if isinstance(error, Busy) else 0.0


def make_status_error(
    action: str, host: str, status: int, text: str, *, code: str = "", retry_after_s: float = 0.0
) -> RegistryError:
    """Return the error for an answer with this status.

    ``action`` completes "cannot …". ``text`` is what the registry says, without credentials.
    """
    detail = f": {text}" if text else ""
    if status == 401:
        return LoginRefused(
            f"cannot {action}: {host} refuses the login (401{detail})",
            status=status,
            remedy=f"check the login of {host} in the Secret, with: podman login {host}",
        )
    if status == 403:
        return Denied(
            f"cannot {action}: {host} denies the permission (403{detail})",
            status=status,
            remedy="give the login the permission for this repository, or use another login",
        )
    # docker-registry answers 405 to a DELETE unless REGISTRY_STORAGE_DELETE_ENABLED is true.
    if code == "UNSUPPORTED" or status == 405:
        return Unsupported(
            f"cannot {action}: {host} does not support it ({status}{detail})",
            status=status,
            remedy="enable it in the registry's configuration",
        )
    if status == 404:
        return NotFound(f"cannot {action}: not found on {host} (404{detail})", status=status)
    if status == 413:
        return TooLarge(
            f"cannot {action}: {host} refuses its size (413{detail})",
            status=status,
            remedy="raise the size limit of the registry or of the proxy before it",
        )
    if status == 429:
        return Busy(
            f"cannot {action}: {host} limits the request rate (429{detail})",
            retry_after_s=retry_after_s,
        )
    # 507 is Insufficient Storage (RFC 4918, 11.5). docker-registry answers 500 for a full disk.
    if status == 408 or status >= 500:
        is_full = status == 507 or _FULL.search(text) is not None
        cause = "has no space left" if is_full else "failed"
        remedy = "free or add space in the registry's storage" if is_full else ""
        return ServerFailure(
            f"cannot {action}: {host} {cause} ({status}{detail})",
            status=status,
            is_full=is_full,
            remedy=remedy,
        )
    if code == "DIGEST_INVALID":
        return DigestMismatch(
            f"cannot {action}: {host} received other content than announced ({status}{detail})",
            status=status,
        )
    return AnswerInvalid(f"cannot {action}: {host} answered {status}{detail}", status=status)
