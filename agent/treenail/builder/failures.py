"""Reasons of errors that end a phase: of the registry, of the disk, and of the inputs."""

import errno

from treenail.errors import ConfigError, CredentialError, TreenailError
from treenail.image import build_result
from treenail.registry.errors import (
    AnswerInvalid,
    Busy,
    CertificateUnknown,
    Denied,
    DigestMismatch,
    LoginRefused,
    NotFound,
    ServerFailure,
    TooLarge,
    Unreachable,
)

_DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})

# By phase, because a refused pull and a refused push have other remedies.
_BY_PHASE: dict[type[TreenailError], tuple[build_result.BuildReason, build_result.BuildReason]] = {
    LoginRefused: (
        build_result.BuildReason.BASE_LOGIN_REFUSED,
        build_result.BuildReason.PUSH_LOGIN_REFUSED,
    ),
    # Registries answer 403 to a login without the right to pull, and some to an unknown one.
    Denied: (build_result.BuildReason.BASE_LOGIN_REFUSED, build_result.BuildReason.PUSH_DENIED),
    NotFound: (build_result.BuildReason.BASE_NOT_FOUND, build_result.BuildReason.PUSH_DENIED),
    TooLarge: (build_result.BuildReason.BASE_NOT_FOUND, build_result.BuildReason.PUSH_DENIED),
}
_BY_CAUSE: dict[type[TreenailError], build_result.BuildReason] = {
    Busy: build_result.BuildReason.REGISTRY_BUSY,
    ServerFailure: build_result.BuildReason.REGISTRY_BUSY,
    Unreachable: build_result.BuildReason.REGISTRY_UNREACHABLE,
    AnswerInvalid: build_result.BuildReason.REGISTRY_UNREACHABLE,
    CertificateUnknown: build_result.BuildReason.CERTIFICATE_UNKNOWN,
    DigestMismatch: build_result.BuildReason.DIGEST_MISMATCH,
}


def choose_reason(error: TreenailError, phase: build_result.BuildPhase) -> build_result.BuildReason:
    """Choose the reason of an error that ends this phase."""
    if is_disk_full(error):
        return build_result.BuildReason.DISK_FULL
    if isinstance(error, ServerFailure) and error.is_full:
        return build_result.BuildReason.REGISTRY_FULL
    for kind, (pull, push) in _BY_PHASE.items():
        if isinstance(error, kind):
            return push if phase is build_result.BuildPhase.PUSH else pull
    for kind, reason in _BY_CAUSE.items():
        if isinstance(error, kind):
            return reason
    if isinstance(error, CredentialError):
        is_push = phase is build_result.BuildPhase.PUSH
        return (
            build_result.BuildReason.PUSH_LOGIN_REFUSED
            if is_push
            else build_result.BuildReason.BASE_LOGIN_REFUSED
        )
    if isinstance(error, ConfigError):
        return build_result.BuildReason.CONTAINERFILE_INVALID
    return build_result.BuildReason.BUILDER_FAILED


def make_failed_result(
    error: TreenailError, phase: build_result.BuildPhase
) -> build_result.BuildResult:
    """Make the result of a phase that this error ended."""
    message = f"{error}\n{error.remedy}" if error.remedy else str(error)
    return build_result.BuildResult(phase, reason=choose_reason(error, phase), message=message)


def is_disk_full(error: BaseException) -> bool:
    """Whether the error, or one that caused it, is that of a full disk of this machine."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _DISK_ERRNOS:
            return True
        cause = cause.__cause__
    return "no space left on device" in str(error).lower() and not isinstance(error, ServerFailure)
