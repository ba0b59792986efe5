"""Reasons of a failed or ended image build, their retries and remedies."""

from datetime import timedelta
from enum import StrEnum

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
