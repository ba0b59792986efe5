"""Result of one container of a build, and the reasons of failed builds with retries and remedies.

The result is the JSON in the termination message of the container.

The state of a build follows from its Job. Order, reasons and messages of its conditions are those
of the Machine Config Operator (MCO).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Annotated

from treenail import errors, oci_content, sanitize
from treenail.api import decode, machineosbuild, object_meta
from treenail.encoding import codec

PRE_BUILT_SEEDED = "PreBuiltImageSeeded"
"""Reason of a build whose image a user built before the cluster, as the MCO names it."""

BUILT_AT_INSTALL = "BuiltAtInstall"
"""Reason of a build whose image the bootstrap host built."""


class BuildReason(StrEnum):
    """Why an image build failed or ended without an image: the reason of its condition."""

    CONTAINERFILE_INVALID = "ContainerfileInvalid"
    INSTRUCTION_FAILED = "InstructionFailed"
    BASE_NOT_FOUND = "BaseNotFound"
    BASE_LOGIN_REFUSED = "BaseLoginRefused"
    PUSH_LOGIN_REFUSED = "PushLoginRefused"
    PUSH_DENIED = "PushDenied"
    REGISTRY_FULL = "RegistryFull"
    REGISTRY_BUSY = "RegistryBusy"
    REGISTRY_UNREACHABLE = "RegistryUnreachable"
    CERTIFICATE_UNKNOWN = "CertificateUnknown"
    DISK_FULL = "DiskFull"
    OUT_OF_MEMORY = "OutOfMemory"
    EVICTED = "Evicted"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    SUPERSEDED = "Superseded"
    CANCELLED = "Cancelled"
    DIGEST_MISMATCH = "DigestMismatch"
    CONFIG_NOT_BAKEABLE = "ConfigNotBakeable"
    BUILDER_FAILED = "BuilderFailed"
    """The builder cannot work on this node, or failed in a way that no other reason names."""


class RetryClass(StrEnum):
    """Whether a failed build is retried without a change of its inputs."""

    USER = "user"
    """Wait for a change by a user."""
    EXTERNAL = "external"
    """Retry: the cause is outside of the build and can end without a user."""
    ONCE = "once"
    """Retry once, then wait for a change by a user."""


def classify_retry(reason: BuildReason) -> RetryClass:
    """Return whether a build that failed with ``reason`` is retried."""
    if reason in _EXTERNAL:
        return RetryClass.EXTERNAL
    return RetryClass.ONCE if reason in _ONCE else RetryClass.USER


def compute_retry_delay(attempts: int, retry: RetryClass = RetryClass.EXTERNAL) -> timedelta | None:
    """Return the time from the end of failed attempt number ``attempts`` to the next one.

    The delays are 1, 5 and 15 minutes, then one hour. None means no further attempt: the delays
    would exceed 24 hours together. With `RetryClass.ONCE`, ``attempts`` counts the failures with
    that reason, and the second one is final.
    """
    if retry is RetryClass.USER or attempts < 1:
        return None
    if retry is RetryClass.ONCE:
        return _FIRST_DELAYS[0] if attempts == 1 else None
    if attempts <= len(_FIRST_DELAYS):
        return _FIRST_DELAYS[attempts - 1]
    waited = sum(_FIRST_DELAYS, timedelta()) + (attempts - len(_FIRST_DELAYS)) * _HOUR
    return _HOUR if waited <= _RETRY_LIMIT else None


_HOUR = timedelta(hours=1)
_FIRST_DELAYS = (timedelta(minutes=1), timedelta(minutes=5), timedelta(minutes=15))
_RETRY_LIMIT = timedelta(hours=24)

# Both logins are external: many registries give out logins that expire and are replaced hourly.
_EXTERNAL = frozenset({
    BuildReason.REGISTRY_FULL, BuildReason.REGISTRY_BUSY, BuildReason.REGISTRY_UNREACHABLE,
    BuildReason.DISK_FULL, BuildReason.EVICTED, BuildReason.DIGEST_MISMATCH,
    BuildReason.BASE_LOGIN_REFUSED, BuildReason.PUSH_LOGIN_REFUSED, BuildReason.BUILDER_FAILED,
})  # fmt: skip
_ONCE = frozenset({BuildReason.OUT_OF_MEMORY, BuildReason.DEADLINE_EXCEEDED})

REMEDIES: dict[BuildReason, str] = {
    BuildReason.CONTAINERFILE_INVALID: (
        "correct spec.containerFile of the MachineOSConfig; check it with: "
        "treenail-controller build -f DIR"
    ),
    BuildReason.INSTRUCTION_FAILED: (
        "correct the instruction in spec.containerFile of the MachineOSConfig; try it with: "
        "treenail-controller build -f DIR --local"
    ),
    BuildReason.BASE_NOT_FOUND: (
        "name an image that exists in osImageURL, in the annotation treenail.io/base-image or in "
        "FROM; check it with: skopeo inspect docker://IMAGE"
    ),
    BuildReason.BASE_LOGIN_REFUSED: (
        "correct the login for the base image's registry in the Secret that "
        "spec.baseImagePullSecret names, or in the cluster's pull secret"
    ),
    BuildReason.PUSH_LOGIN_REFUSED: (
        "correct the login for the registry in the Secret that spec.renderedImagePushSecret names"
    ),
    BuildReason.PUSH_DENIED: (
        "allow the login of spec.renderedImagePushSecret to push to the repository, or change "
        "spec.renderedImagePushSpec"
    ),
    BuildReason.REGISTRY_FULL: "free space in the registry",
    BuildReason.REGISTRY_BUSY: "reduce the load on the registry, or wait for the next attempt",
    BuildReason.REGISTRY_UNREACHABLE: (
        "check that the registry runs, and that its name and port are reachable from the builder"
    ),
    BuildReason.CERTIFICATE_UNKNOWN: (
        "add the CA of the registry to the additional trust bundle of the ControllerConfig"
    ),
    BuildReason.DISK_FULL: (
        "free disk space on the builder's node, or raise the ephemeral-storage limit of builds"
    ),
    BuildReason.OUT_OF_MEMORY: (
        "raise the memory limit of builds, or reduce what the instruction needs"
    ),
    BuildReason.EVICTED: "free memory and disk space on the nodes that run builds",
    BuildReason.DEADLINE_EXCEEDED: (
        "set the annotation treenail.io/build-deadline of the MachineOSConfig to more seconds"
    ),
    BuildReason.SUPERSEDED: "none: a build of newer inputs replaced this one",
    BuildReason.CANCELLED: (
        "request the build again with: kubectl annotate machineosconfig NAME "
        "machineconfiguration.openshift.io/rebuild="
    ),
    BuildReason.DIGEST_MISMATCH: (
        "check that no other client pushes to the repository of spec.renderedImagePushSpec"
    ),
    BuildReason.CONFIG_NOT_BAKEABLE: (
        "remove the named paths from the MachineConfigs of the pool, or move them"
    ),
    BuildReason.BUILDER_FAILED: (
        "check that nodes for builds allow user namespaces, and that the builder image has buildah"
    ),
}
"""Remedy of each reason, in the imperative."""


EXIT_USER = 64
"""Exit code when the user's text or files are wrong: the Job ends at once."""
EXIT_EXTERNAL = 75
"""Exit code of every other failure: the Job may try again."""

LIMIT_BYTES = 4096
"""The kubelet truncates a longer termination message."""

_MAX_PHASES = 16
_MAX_NAME = 32
_FAILURE_MESSAGE_LIMIT = 2000
_OMITTED = "\n…\n"


class BuildPhase(StrEnum):
    """The containers of a build, in their order."""

    FETCH = "fetch"
    BUILD = "build"
    PUSH = "push"


def _read_reason(text: str) -> object:
    return codec.get_reader(BuildReason)(text) if text else None


def _limit_steps(seconds: Mapping[str, float]) -> dict[str, float]:
    steps = list(seconds.items())[:_MAX_PHASES]
    return {name[:_MAX_NAME]: round(value, 3) for name, value in steps}


_Seconds = Annotated[float, codec.require("a number of seconds", lambda seconds: seconds >= 0)]


@dataclass(frozen=True, slots=True)
class BuildResult(codec.JsonObject, where="build result"):
    """Report of one container of a build at its end."""

    phase: BuildPhase
    digest: Annotated[
        str,
        codec.require(
            "sha256: and 64 hex digits", lambda digest: not digest or oci_content.is_digest(digest)
        ),
    ] = ""
    """Manifest digest of the pushed image; empty unless ``push`` succeeded."""
    reason: Annotated[BuildReason | None, codec.Via(_read_reason, wire=str)] = None
    """None when the phase succeeded."""
    line: Annotated[int, codec.require("a line number", lambda line: line >= 0)] = 0
    """Line of the composed Containerfile that failed, from 1; 0 for none."""
    message: str = ""
    """Cause and last output, without credentials; `to_text` shortens it in the middle."""
    seconds: Annotated[Mapping[str, _Seconds], codec.Via(_limit_steps, _limit_steps)] = field(
        default_factory=dict
    )
    """Seconds by step: pull, build, push and others."""

    @property
    def has_succeeded(self) -> bool:
        return self.reason is None

    @property
    def exit_code(self) -> int:
        """Return the exit code of the container."""
        if self.reason is None:
            return 0
        is_user = classify_retry(self.reason) is RetryClass.USER
        return EXIT_USER if is_user else EXIT_EXTERNAL

    def to_text(self) -> str:
        """Return the JSON text of at most `LIMIT_BYTES` bytes of UTF-8."""
        text = self._encode(self.message)
        low, high = 0, len(self.message)
        if len(text.encode()) > LIMIT_BYTES:
            # The encoded length depends on each character, so search for the longest that fits.
            while low < high:
                middle = (low + high + 1) // 2
                if len(self._encode(_shorten(self.message, middle)).encode()) <= LIMIT_BYTES:
                    low = middle
                else:
                    high = middle - 1
            text = self._encode(_shorten(self.message, low))
        return text

    @classmethod
    def from_text(cls, text: str | bytes) -> "BuildResult":
        """Parse a termination message; raise `ConfigError` for anything else.

        A reason of a newer builder is an error too: a failure must not look like a success.
        """
        size = len(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        if size > LIMIT_BYTES:
            raise errors.ConfigError(
                f"build result: expected at most {LIMIT_BYTES} bytes, found {size} bytes"
            )
        return cls.from_json(decode.load_json(text, where="build result"))

    def _encode(self, message: str) -> str:
        document = {**self.to_json(), "message": message}
        # Half a surrogate pair cannot be encoded as UTF-8; output of a program may contain one.
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace").decode()


def _shorten(text: str, length: int) -> str:
    """Return ``text`` with ``length`` characters: its first third and its end."""
    if length >= len(text):
        return text
    head = length // 3
    return text[:head] + _OMITTED + text[len(text) - (length - head) :]


@dataclass(frozen=True, slots=True)
class AttemptFailure(codec.JsonObject):
    """Why one attempt of a build failed."""

    reason: BuildReason
    message: Annotated[str, codec.Via(write=lambda message: message[:_FAILURE_MESSAGE_LIMIT])]
    line: int = 0
    """Line of the user's Containerfile, from 1; 0 for none."""
    log: str = ""
    """The last output of the instruction, without credentials."""
    seconds: Annotated[Mapping[str, float], codec.EXCLUDED] = field(default_factory=dict)
    """Duration of each phase."""


BASE_IMAGE_UNRESOLVED = "BaseImageUnresolved"
"""Reason of a MachineOSConfig whose base image is not resolved yet."""
MAX_FAILED_PODS = 3
"""``backoffLimit`` of a Job: one more failed pod ends it."""
MESSAGE_LIMIT = 4096
"""Maximum characters of a message; the API server accepts 32768."""

# Order, reasons and messages are those of the MCO.
_CONDITIONS: dict[machineosbuild.BuildState, tuple[str, str]] = {
    machineosbuild.BuildState.PREPARED: ("Prepared", "Build Prepared and Pending"),
    machineosbuild.BuildState.BUILDING: ("Building", "Image Build In Progress"),
    machineosbuild.BuildState.FAILED: ("Failed", "Build Failed"),
    machineosbuild.BuildState.INTERRUPTED: ("Interrupted", "Build Interrupted"),
    machineosbuild.BuildState.SUCCEEDED: ("Ready", "Build Ready"),
}


@dataclass(frozen=True, slots=True)
class JobStatus(codec.JsonObject, where="Job"):
    """Counts and conditions of a Job."""

    active: Annotated[int, codec.Key("status.active")] = 0
    succeeded: Annotated[int, codec.Key("status.succeeded")] = 0
    failed: Annotated[int, codec.Key("status.failed")] = 0
    uncounted_succeeded: Annotated[
        tuple[str, ...], codec.Key("status.uncountedTerminatedPods.succeeded")
    ] = ()
    uncounted_failed: Annotated[
        tuple[str, ...], codec.Key("status.uncountedTerminatedPods.failed")
    ] = ()
    conditions: object_meta.StatusConditions = ()
    is_deleting: Annotated[
        bool, codec.Key("metadata.deletionTimestamp"), codec.Via(bool, wire=str)
    ] = False

    @property
    def has_uncounted_pods(self) -> bool:
        """Pods ended that no count contains yet."""
        return bool(self.uncounted_succeeded or self.uncounted_failed)

    def find_condition(self, kind: str) -> object_meta.Condition | None:
        """Return the condition of a type if it is True."""
        matches = (
            condition
            for condition in self.conditions
            if (condition.type, condition.status) == (kind, "True")
        )
        return next(matches, None)


def compute_job_state(job: JobStatus) -> machineosbuild.BuildState:
    """Return the state of a build whose Job has this status.

    Unlike the MCO, a Job with the condition Failed has failed whatever its counts are: a
    ``podFailurePolicy`` and a deadline end it at the first failed pod. FailureTarget comes before
    Failed while other pods end.
    """
    has_failed = any(map(job.find_condition, ("Failed", "FailureTarget")))
    if job.is_deleting and not (job.succeeded or has_failed or job.failed > MAX_FAILED_PODS):
        return machineosbuild.BuildState.INTERRUPTED
    if has_failed:
        return machineosbuild.BuildState.FAILED
    if job.succeeded:
        is_complete = job.find_condition("Complete") is not None or not job.conditions
        return (
            machineosbuild.BuildState.SUCCEEDED
            if is_complete
            else machineosbuild.BuildState.BUILDING
        )
    if job.failed > MAX_FAILED_PODS:
        return machineosbuild.BuildState.FAILED
    if not (job.active or job.failed or job.has_uncounted_pods):
        return machineosbuild.BuildState.PREPARED
    return machineosbuild.BuildState.BUILDING


def compute_build_conditions(
    state: machineosbuild.BuildState, reason: str = "", message: str = ""
) -> tuple[object_meta.Condition, ...]:
    """Return the five conditions without times; only that of ``state`` is True.

    ``reason`` and ``message`` replace those of the MCO in the condition that is True.
    """
    conditions: list[object_meta.Condition] = []
    for kind, (usual_reason, usual_message) in _CONDITIONS.items():
        if kind is state:
            text = sanitize.escape_text(message)[:MESSAGE_LIMIT] or usual_message
            conditions.append(object_meta.Condition(kind, "True", reason or usual_reason, text))
        else:
            conditions.append(object_meta.Condition(kind, "False", usual_reason, usual_message))
    return tuple(conditions)


def can_change_state(before: machineosbuild.BuildState, after: machineosbuild.BuildState) -> bool:
    """Return whether a build may go from one state to another one.

    States only move forward: from none to any, from Prepared to Building, and from both to an end.
    """
    if before.has_ended or before is after or after is machineosbuild.BuildState.INITIAL:
        return False
    return not (
        before is machineosbuild.BuildState.BUILDING and after is machineosbuild.BuildState.PREPARED
    )
