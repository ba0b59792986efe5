"""Reasons of failed builds.

Errors of registries, of the disk and of the inputs end a phase. The reason of a failed buildah
follows from its exit code and its last output.
"""

import errno
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from treenail import memory
from treenail.builder.disk_space import DiskSpace
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

_CONTAINERFILE_INVALID = (
    r"unknown instruction",
    r"parsing main dockerfile",
    r"no from statement found",
    r"no contents in \"",
    r"only supports the --mount flag",
    r"flag provided but not defined",
    r"no stage or image found with that name",
    r"failed to parse",
    r"invalid (?:containerfile|dockerfile|instruction|mount type|reference format)",
    r"must have (?:two|at least|exactly) ",
    r"requires (?:at least|exactly) ",
    r"mounting .* unsupported|invalid mount option",
)
_BASE_NOT_FOUND = (r"image not known", r"creating build container: .*(?:not found|no such image)")
_NO_SPACE = (r"no space left on device", r"disk quota exceeded")
# Package managers compute what they need before they begin: much space may be free.
_NEEDS_SPACE = (
    r"not enough (?:free )?(?:disk )?space",
    r"needs \d+ ?[kmg]b (?:more space )?on the / filesystem",
    r"at least \d+ ?[kmg]b more space needed on the / filesystem",
)
# The kernel refuses a large allocation while less than this is free.
_FULL_BELOW = 512 * memory.MIB
# More than packages of one transaction need.
_NEEDED_BELOW = 8192 * memory.MIB
_FEW_FILES = 100
# Of imagebuildah/stage_executor.go: the instruction, which may have several lines, and the error of
# its container.
_STEP_FAILED = re.compile(r'building at STEP "(.*)": ((?:exit status|while running).*)', re.DOTALL)
_ERROR = re.compile(r"(?:^|\s)Error: (.*)")
# With chroot isolation a process of buildah runs the command, and prints this when a signal ended
# it (package chroot).
_SIGNAL = re.compile(r"subprocess exited on (\w+)")
# buildah logs with logrus, whose lines on a pipe begin like this. Other lines are the output of
# instructions.
_OWN_LOG = re.compile(r'^time="[^"]*" level=(?:error|fatal) ')
_HERE_DOCUMENT = re.compile(r"STEP \d+/\d+: (?:RUN|COPY|ADD)\b.*<<")
# 128 and the number of the signal, as in a shell.
_BY_SIGNAL = 128
# Others, such as SIGSEGV, come from the kernel for a fault of buildah itself.
_SENT_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Lines before the end in which a program reports a full disk: rpm and dnf add a summary.
_OUTPUT_LINES = 15


@dataclass(frozen=True, slots=True)
class BuildFailure:
    """Why buildah failed: reason and one sentence for users."""

    reason: build_result.BuildReason
    cause: str


def classify_failure(
    exit_code: int,
    tail: Sequence[str],
    *,
    oom_kills: int | None = None,
    space: DiskSpace | None = None,
) -> BuildFailure:
    """Classify a failed run of buildah by its exit code and its last lines.

    ``oom_kills`` counts the processes of this build that the kernel killed for lack of memory.
    ``space`` is the least free space of the disk during the build. Both are None where that is
    unknown; then the output alone decides.
    """
    error = find_error(tail)
    own_text = "\n".join([error, *filter(_OWN_LOG.match, tail)]).lower()
    step = _STEP_FAILED.search(error)
    if oom_kills:
        return BuildFailure(build_result.BuildReason.OUT_OF_MEMORY, _describe_oom(error, oom_kills))
    output = "\n".join(tail[-_OUTPUT_LINES:]).lower() if step else own_text
    if _is_disk_full(output, space):
        return BuildFailure(
            build_result.BuildReason.DISK_FULL, _describe_full_disk(error or tail[-1], space)
        )
    if step:
        cause = _describe_step(step, tail, is_memory_known=oom_kills is not None)
        return BuildFailure(build_result.BuildReason.INSTRUCTION_FAILED, cause)
    if _matches(own_text, _CONTAINERFILE_INVALID):
        return BuildFailure(
            build_result.BuildReason.CONTAINERFILE_INVALID, _describe_text_error(error, tail)
        )
    if _matches(own_text, _BASE_NOT_FOUND):
        return BuildFailure(build_result.BuildReason.BASE_NOT_FOUND, error)
    if exit_code > _BY_SIGNAL and not error:
        return _classify_signal(exit_code - _BY_SIGNAL, oom_kills)
    if "building at step" in own_text or re.search(r"^(copy|add) ", own_text):
        return BuildFailure(build_result.BuildReason.INSTRUCTION_FAILED, error)
    return BuildFailure(
        build_result.BuildReason.BUILDER_FAILED,
        error or f"buildah failed with exit code {exit_code}",
    )


def find_error(tail: Sequence[str]) -> str:
    """Return buildah's own error, the last line that begins with ``Error:``; empty without one."""
    for line in reversed(tail):
        if match := _ERROR.search(line):
            return match[1]
    return ""


def mentions_full_disk(line: str) -> bool:
    """Return whether a line of output is what programs print on a full disk."""
    return _matches(line.lower(), (*_NO_SPACE, *_NEEDS_SPACE))


def _is_disk_full(output: str, space: DiskSpace | None) -> bool:
    """Return whether the output names a full disk, and the disk was indeed full."""
    is_full, needs_more = _matches(output, _NO_SPACE), _matches(output, _NEEDS_SPACE)
    if space is None:
        return is_full or needs_more
    has_few_files = space.free_files is not None and space.free_files < _FEW_FILES
    return (is_full and (space.free_bytes < _FULL_BELOW or has_few_files)) or (
        needs_more and space.free_bytes < _NEEDED_BELOW
    )


def _describe_full_disk(error: str, space: DiskSpace | None) -> str:
    free = "" if space is None else f" ({space.free_bytes // memory.MIB} MiB were free)"
    return f"no space left on the builder's disk{free}: {error}"


def _classify_signal(number: int, oom_kills: int | None) -> BuildFailure:
    cause = f"buildah was killed by signal {number}"
    if number == signal.SIGKILL and oom_kills is None:
        # Not OutOfMemory without evidence: a second attempt would end in the same way.
        return BuildFailure(
            build_result.BuildReason.INSTRUCTION_FAILED,
            f"{cause}: either the instruction sent it to all processes, or the kernel did for lack "
            "of memory; this builder cannot read the kernel's counter",
        )
    if number in _SENT_SIGNALS:
        # buildah runs in a PID namespace: only its own instructions can send it a signal.
        return BuildFailure(
            build_result.BuildReason.INSTRUCTION_FAILED,
            f"{cause}, which the instruction sent to all processes",
        )
    return BuildFailure(build_result.BuildReason.BUILDER_FAILED, cause)


def _describe_step(step: re.Match[str], tail: Sequence[str], *, is_memory_known: bool) -> str:
    signals = [match[1] for line in tail[-_OUTPUT_LINES:] if (match := _SIGNAL.search(line))]
    outcome = f"the command was {signals[-1]} by a signal" if signals else step[2]
    if "killed" in signals and not is_memory_known:
        outcome += ", by a program or by the kernel for lack of memory"
    return f"{step[1]}: {outcome}"


def _describe_oom(error: str, oom_kills: int) -> str:
    processes = "process" if oom_kills == 1 else "processes"
    cause = f"the kernel killed {oom_kills} {processes} of the build for lack of memory"
    return f"{cause}: {error}" if error else cause


def _describe_text_error(error: str, tail: Sequence[str]) -> str:
    """Remove the dump of an internal structure that buildah appends, and name here-documents."""
    cause = error.partition(" &imagebuilder.")[0]
    if "nknown instruction" in cause and any(map(_HERE_DOCUMENT.search, tail)):
        return f"{cause}: here-documents need buildah 1.33, so write the command with && and \\"
    return cause


def _matches(text: str, patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, text) for pattern in patterns)


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
