"""Pre-flight checks: find what would make an update fail before the node is cordoned.

A fact of None is unknown. An unknown fact never blocks an update: rpm-ostree or bootc finds the
same problem a little later, which is still before the drain.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from treenail import errors, observations, sanitize
from treenail.api.annotations import REBUILD
from treenail.api.pullspec import BOOTABLE_LABELS
from treenail.update.checks import preflight_reason, signature_policy


@dataclass(frozen=True, slots=True)
class PreflightFinding:
    """One problem; one that does not block is reported, and the update continues."""

    reason: preflight_reason.PreflightReason
    message: str
    remedy: str
    is_blocking: bool = True

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


@dataclass(frozen=True, slots=True)
class UnreadableFilesystem:
    """A filesystem that fails with an I/O error."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class PreflightFacts:
    """The facts for the pre-flight checks."""

    now: float
    """Seconds since the epoch."""
    image: str = ""
    """The pull spec; empty if the update keeps the image."""
    inspection: observations.ImageInspection | observations.InspectionProblem | None = None
    signature_rule: signature_policy.SignatureRule | str | None = None
    """The rule of the signature policy, or why it cannot be read; None without a policy."""
    missing_keys: tuple[str, ...] = ()
    """The key files that the policy names and that do not exist."""
    architecture: str = ""
    """The machine's architecture by its OCI name."""
    spaces: tuple[observations.FilesystemSpace | UnreadableFilesystem, ...] = ()
    present_layers: frozenset[str] = frozenset()
    """The digests of the layers that are stored already."""
    needs_storage: bool = False
    """podman stores the image below /var before it is deployed."""
    kernel_bytes: int = 0
    """Size of the booted kernel and initramfs on /boot; the next ones are about as large."""
    freeable_boot_bytes: int = 0
    """Size of older deployments on /boot that are not pinned; ostree removes them if needed."""
    staged_by_other: str = ""
    drivers: tuple[str, ...] = ()
    """Active units that also update this machine."""
    inhibitors: tuple[str, ...] = ()
    """The programs that block a shutdown, with their reasons."""
    is_clock_synchronized: bool | None = None
    """The clock follows a time server."""
    ledger_problem: str = ""
    lacks_agent: bool = False
    """The staged image has no agent, and the booted one has."""


# ostree refuses to go below this part of the file system (ostree.repo-config(5),
# core.min-free-space-percent).
_RESERVE = 0.03
# Layers are compressed; their content is about twice as large.
_UNPACKED = 2.0
_FILES_PER_BYTE = 1 / 16_000
_LEAST_FILES = 1_000
_BOOT_FILES = 16
# For the ledger, backups of replaced files, and logs of other programs.
_VAR_BYTES = 64 * 1024 * 1024
_CLOCK_SLACK_S = 3600.0
_MIB = 1024 * 1024
_NAMED_PLATFORMS = 8


def find_preflight_problems(
    facts: PreflightFacts, *, only_warn: frozenset[str] = frozenset()
) -> tuple[PreflightFinding, ...]:
    """Return all problems, blocking ones first; the reasons in ``only_warn`` never block."""
    everything = [
        *_check_ledger(facts),
        *_check_filesystems(facts),
        *_check_space(facts),
        *_check_other_programs(facts),
        *_check_clock(facts),
        *_check_signature_policy(facts),
        *_check_registry(facts),
        *_check_agent(facts),
    ]
    judged = [
        replace(problem, is_blocking=False) if problem.reason in only_warn else problem
        for problem in everything
    ]
    return tuple(sorted(judged, key=lambda problem: not problem.is_blocking))


def _check_agent(facts: PreflightFacts) -> Iterator[PreflightFinding]:
    if facts.lacks_agent:
        yield PreflightFinding(
            preflight_reason.PreflightReason.AGENT_MISSING,
            f"{facts.image} has no treenail.service: no agent would manage this node after it",
            'add the agent to the image; or permit such images by only_warn = ["AgentMissing"] in '
            "section preflight of agent.toml, and run on this node: treenail retry",
        )


def _check_ledger(facts: PreflightFacts) -> Iterator[PreflightFinding]:
    if facts.ledger_problem:
        yield PreflightFinding(
            preflight_reason.PreflightReason.LEDGER_NOT_WRITABLE,
            f"cannot write the ledger: {facts.ledger_problem}",
            "make /var/lib/treenail writable for root",
        )


def _check_filesystems(facts: PreflightFacts) -> Iterator[PreflightFinding]:
    for space in facts.spaces:
        if isinstance(space, UnreadableFilesystem):
            yield PreflightFinding(
                preflight_reason.PreflightReason.FILE_SYSTEM_FAILING,
                f"cannot read the filesystem of {space.path}: {space.text}",
                "read the kernel's errors with: journalctl -k -p err; check or replace the disk",
            )
        elif space.is_read_only and space.path != "/boot":
            # Some systems mount /boot read-only; libostree remounts it to write a deployment.
            yield PreflightFinding(
                preflight_reason.PreflightReason.READ_ONLY_FILE_SYSTEM,
                f"cannot write to the filesystem of {space.path}: it is read-only, which the "
                "kernel does after errors",
                "read the kernel's errors with: journalctl -k -p err; check the filesystem, then "
                "mount it read-write",
            )


_SPACE_REASONS = {
    "/boot": (
        preflight_reason.PreflightReason.NO_SPACE_ON_BOOT,
        preflight_reason.PreflightReason.NO_INODES_ON_BOOT,
    ),
    "/sysroot": (
        preflight_reason.PreflightReason.NO_SPACE_ON_SYSROOT,
        preflight_reason.PreflightReason.NO_INODES_ON_SYSROOT,
    ),
    "/var": (
        preflight_reason.PreflightReason.NO_SPACE_ON_VAR,
        preflight_reason.PreflightReason.NO_INODES_ON_VAR,
    ),
}
_SPACE_REMEDIES = {
    "/boot": "remove old deployments: rpm-ostree cleanup --rollback (pinned ones after: ostree "
    "admin pin --unpin INDEX), or files of other programs",
    "/sysroot": "remove old deployments: rpm-ostree cleanup --rollback, or unused container "
    "images: crictl rmi --prune",
    "/var": "remove unused container images: crictl rmi --prune, or old logs: journalctl "
    "--vacuum-size=500M",
}


def _check_space(facts: PreflightFacts) -> Iterator[PreflightFinding]:
    """Check the space of each filesystem; paths on the same one need the sum."""
    needed_bytes: dict[int, int] = {}
    needed_files: dict[int, int] = {}
    for space in facts.spaces:
        if isinstance(space, UnreadableFilesystem) or space.path not in _SPACE_REASONS:
            continue
        bytes_needed, files_needed = _compute_space_needed(facts, space)
        needed_bytes[space.device] = needed_bytes.get(space.device, 0) + bytes_needed
        needed_files[space.device] = needed_files.get(space.device, 0) + files_needed
        of_bytes, of_files = _SPACE_REASONS[space.path]
        if bytes_needed and space.free_bytes < needed_bytes[space.device]:
            yield PreflightFinding(
                of_bytes,
                f"{space.path} has {space.free_bytes // _MIB} MiB free, and the update needs "
                f"{-(-needed_bytes[space.device] // _MIB)} MiB",
                _SPACE_REMEDIES[space.path],
            )
        if files_needed and space.files and space.free_files < needed_files[space.device]:
            yield PreflightFinding(
                of_files,
                f"{space.path} has {space.free_files} free inodes, and the update needs "
                f"{needed_files[space.device]}",
                _SPACE_REMEDIES[space.path],
            )


def _compute_space_needed(
    facts: PreflightFacts, space: observations.FilesystemSpace
) -> tuple[int, int]:
    """Return the bytes and the inodes that the update needs on the filesystem."""
    layers = (
        facts.inspection.layers
        if isinstance(facts.inspection, observations.ImageInspection)
        else ()
    )
    if space.path == "/var":
        stored = sum(layer.size_bytes for layer in layers) if facts.needs_storage else 0
        unpacked, files = int(stored * _UNPACKED), int(stored * _FILES_PER_BYTE)
        return _VAR_BYTES + unpacked, _LEAST_FILES + files
    if space.path == "/boot":
        needed = facts.kernel_bytes - facts.freeable_boot_bytes
        return (max(needed, 0), _BOOT_FILES) if facts.kernel_bytes else (0, 0)
    missing = sum(layer.size_bytes for layer in layers if layer.digest not in facts.present_layers)
    if not missing:
        return 0, 0
    reserve = int(space.size_bytes * _RESERVE)
    files = max(int(missing * _FILES_PER_BYTE), _LEAST_FILES)
    return int(missing * _UNPACKED) + reserve, files


def _check_other_programs(facts: PreflightFacts) -> Iterator[PreflightFinding]:
    if facts.staged_by_other:
        yield make_foreign_staged_problem(facts.staged_by_other)
    for driver in facts.drivers:
        yield PreflightFinding(
            preflight_reason.PreflightReason.OTHER_UPDATE_DRIVER,
            f"{driver} is active and also updates this machine",
            f"run: systemctl disable --now {driver}, or stop treenail",
        )
    for holder in facts.inhibitors:
        yield PreflightFinding(
            preflight_reason.PreflightReason.SHUTDOWN_INHIBITED,
            f"{holder} blocks a reboot",
            "wait for it, or end it; list all with: systemd-inhibit --list",
        )


def make_foreign_staged_problem(deployment: str) -> PreflightFinding:
    """Return the problem of a deployment that another program staged; treenail must not drop it."""
    return PreflightFinding(
        preflight_reason.PreflightReason.STAGED_BY_OTHER,
        f"another program staged deployment {deployment} on this machine",
        "drop it with: rpm-ostree cleanup --pending, or reboot into it",
    )


def _check_clock(facts: PreflightFacts) -> Iterator[PreflightFinding]:
    remedy = "set the clock; check it with: timedatectl, and: chronyc tracking"
    image = facts.inspection
    if isinstance(image, observations.ImageInspection) and image.created is not None:
        behind_s = image.created - facts.now
        if behind_s > _CLOCK_SLACK_S:
            yield PreflightFinding(
                preflight_reason.PreflightReason.CLOCK_BEHIND_IMAGE,
                f"this machine's clock is {behind_s / 3600:.1f} h behind the build time of the "
                "image",
                remedy,
            )
    if facts.is_clock_synchronized is False:
        yield PreflightFinding(
            preflight_reason.PreflightReason.CLOCK_NOT_SYNCHRONIZED,
            "this machine's clock is not synchronized with a time server",
            remedy,
            is_blocking=False,
        )


def _check_signature_policy(facts: PreflightFacts) -> Iterator[PreflightFinding]:
    if not facts.image:
        return
    if isinstance(facts.signature_rule, str):
        yield PreflightFinding(
            preflight_reason.PreflightReason.SIGNATURE_POLICY_UNUSABLE,
            facts.signature_rule,
            f"fix {signature_policy.POLICY_PATH}; see containers-policy.json(5)",
        )
    elif (
        isinstance(facts.signature_rule, signature_policy.SignatureRule)
        and facts.signature_rule.trust is signature_policy.SignatureTrust.REJECTED
    ):
        yield PreflightFinding(
            preflight_reason.PreflightReason.SIGNATURE_REJECTED,
            f"the signature policy rejects {facts.image}, by {facts.signature_rule.scope}",
            f"allow it in {signature_policy.POLICY_PATH}, or request an image that is allowed",
        )
    for key in facts.missing_keys:
        yield PreflightFinding(
            preflight_reason.PreflightReason.SIGNATURE_KEY_MISSING,
            f"the signature policy requires the key {key}, and this file does not exist",
            f"install the key, or change {signature_policy.POLICY_PATH}",
        )


_CREDENTIAL_REMEDY = (
    "add credentials for {registry} to the cluster's pull secret; list problems of pull secrets "
    "with: treenail status"
)
_NETWORK_REMEDY = (
    "make {registry} reachable from this node; if that takes a proxy, set HTTPS_PROXY and NO_PROXY "
    "in /etc/mco/proxy.env"
)
_CLOCK_OR_CERTIFICATE_REMEDY = "set the clock, or renew the registry's certificate"
_REGISTRY_TEXTS: dict[preflight_reason.PreflightReason, tuple[str, str]] = {
    preflight_reason.PreflightReason.REGISTRY_NAME_UNKNOWN: (
        "cannot resolve the name {registry}",
        "add {registry} to this node's DNS servers",
    ),
    preflight_reason.PreflightReason.REGISTRY_UNREACHABLE: (
        "cannot reach {registry}",
        _NETWORK_REMEDY,
    ),
    preflight_reason.PreflightReason.REGISTRY_UNTRUSTED: (
        "the certificate of {registry} is not trusted",
        "install the registry's CA as /etc/docker/certs.d/{registry}/ca.crt",
    ),
    preflight_reason.PreflightReason.REGISTRY_CERTIFICATE_EXPIRED: (
        "the certificate of {registry} has expired",
        _CLOCK_OR_CERTIFICATE_REMEDY,
    ),
    preflight_reason.PreflightReason.CLOCK_BEHIND_CERTIFICATE: (
        "the certificate of {registry} is not valid yet",
        _CLOCK_OR_CERTIFICATE_REMEDY,
    ),
    preflight_reason.PreflightReason.REGISTRY_UNAUTHORIZED: (
        "{registry} rejected the credentials",
        _CREDENTIAL_REMEDY,
    ),
    preflight_reason.PreflightReason.REGISTRY_FORBIDDEN: (
        "{registry} does not allow the credentials to pull {image}",
        _CREDENTIAL_REMEDY,
    ),
    preflight_reason.PreflightReason.IMAGE_NOT_FOUND: (
        "{registry} has no {image}",
        f"push it again, or build it with: kubectl annotate machineosconfig NAME {REBUILD}=",
    ),
    preflight_reason.PreflightReason.REGISTRY_TIMEOUT: (
        "{registry} did not answer in time",
        _NETWORK_REMEDY,
    ),
    preflight_reason.PreflightReason.WRONG_ARCHITECTURE: (
        "{image} is not built for this machine",
        "request an image of this architecture, or a multi-arch image",
    ),
    preflight_reason.PreflightReason.REGISTRY_FAILED: (
        "cannot read the manifest of {image}",
        "check {registry}; treenail retries",
    ),
}
"""By reason: a sentence, and a remedy, for ``registry`` and ``image``."""


def _check_registry(facts: PreflightFacts) -> Iterator[PreflightFinding]:
    image = facts.inspection
    if isinstance(image, observations.InspectionProblem):
        reason = preflight_reason.PreflightReason(image.kind)
        what, remedy = _REGISTRY_TEXTS.get(
            reason, _REGISTRY_TEXTS[preflight_reason.PreflightReason.REGISTRY_FAILED]
        )
        registry = facts.image.partition("/")[0]
        about = what.format(registry=registry, image=facts.image)
        if reason is preflight_reason.PreflightReason.WRONG_ARCHITECTURE:
            message = _format_missing_platform(facts, image.platforms)
        else:
            message = f"{about}: {sanitize.escape_line(image.text)}"
        yield PreflightFinding(reason, message, remedy.format(registry=registry))
    elif isinstance(image, observations.ImageInspection):
        if not any(label in image.labels for label in BOOTABLE_LABELS):
            yield PreflightFinding(
                preflight_reason.PreflightReason.IMAGE_NOT_BOOTABLE,
                f"{facts.image} is not an operating system: it has no label "
                f"{' or '.join(BOOTABLE_LABELS)}",
                "request the image of an operating system, not of extensions or of a program",
            )
        built_for = image.architecture
        if "" not in (built_for, facts.architecture) and built_for != facts.architecture:
            yield PreflightFinding(
                preflight_reason.PreflightReason.WRONG_ARCHITECTURE,
                f"{facts.image} is built for {built_for}, and this machine is {facts.architecture}",
                "request an image of this architecture, or a multi-arch image",
            )


def _format_missing_platform(facts: PreflightFacts, platforms: tuple[str, ...]) -> str:
    expected = f"linux/{facts.architecture or 'unknown'}, the platform of this machine"
    if not platforms:
        return f"{facts.image} has no manifest for {expected}"
    listed = ", ".join(sanitize.escape_line(platform) for platform in platforms[:_NAMED_PLATFORMS])
    more = len(platforms) - _NAMED_PLATFORMS
    return (
        f"{facts.image} is a manifest list without {expected}; it has {listed}"
        f"{f' and {more} more' if more > 0 else ''}"
    )


def make_preflight_error(problems: tuple[PreflightFinding, ...]) -> errors.PreflightError | None:
    """Return the error with all blocking problems and their remedies; None without any."""
    blocking = [problem for problem in problems if problem.is_blocking]
    if not blocking:
        return None
    return errors.PreflightError(
        "cannot start the update: " + "; ".join(str(problem) for problem in blocking),
        reasons=tuple(str(problem.reason) for problem in blocking),
        remedy="; ".join(dict.fromkeys(problem.remedy for problem in blocking)),
    )
