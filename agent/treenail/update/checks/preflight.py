"""What would make an update fail, found before anything is cordoned: facts to findings.

A fact of None could not be established. That never holds an update up: what it would have shown
is found by rpm-ostree or bootc a little later, which is still before the drain.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from treenail.errors import PreflightError
from treenail.update.checks.registry_errors import REGISTRY_PROBLEM_TEXTS
from treenail.update.checks.signature_policy import POLICY_PATH, SignatureRule, SignatureTrust


class PreflightReason(StrEnum):
    """Why an update can't begin, or should not; never renamed once released."""

    REGISTRY_NAME_UNKNOWN = "RegistryNameUnknown"
    REGISTRY_UNREACHABLE = "RegistryUnreachable"
    REGISTRY_UNTRUSTED = "RegistryUntrusted"
    REGISTRY_CERTIFICATE_EXPIRED = "RegistryCertificateExpired"
    REGISTRY_UNAUTHORIZED = "RegistryUnauthorized"
    REGISTRY_FORBIDDEN = "RegistryForbidden"
    REGISTRY_TIMEOUT = "RegistryTimeout"
    REGISTRY_FAILED = "RegistryFailed"
    IMAGE_NOT_FOUND = "ImageNotFound"
    IMAGE_NOT_BOOTABLE = "ImageNotBootable"
    WRONG_ARCHITECTURE = "WrongArchitecture"
    SIGNATURE_REJECTED = "SignatureRejected"
    SIGNATURE_KEY_MISSING = "SignatureKeyMissing"
    SIGNATURE_POLICY_UNUSABLE = "SignaturePolicyUnusable"
    NO_SPACE_ON_BOOT = "NoSpaceOnBoot"
    NO_SPACE_ON_SYSROOT = "NoSpaceOnSysroot"
    NO_SPACE_ON_VAR = "NoSpaceOnVar"
    NO_INODES_ON_BOOT = "NoInodesOnBoot"
    NO_INODES_ON_SYSROOT = "NoInodesOnSysroot"
    NO_INODES_ON_VAR = "NoInodesOnVar"
    READ_ONLY_FILE_SYSTEM = "ReadOnlyFileSystem"
    FILE_SYSTEM_FAILING = "FileSystemFailing"
    LEDGER_NOT_WRITABLE = "LedgerNotWritable"
    STAGED_BY_OTHER = "StagedByOther"
    OTHER_UPDATE_DRIVER = "OtherUpdateDriver"
    SHUTDOWN_INHIBITED = "ShutdownInhibited"
    CLOCK_BEHIND_IMAGE = "ClockBehindImage"
    CLOCK_BEHIND_CERTIFICATE = "ClockBehindCertificate"
    CLOCK_NOT_SYNCHRONIZED = "ClockNotSynchronized"


@dataclass(frozen=True, slots=True)
class PreflightFinding:
    """One thing that is wrong; what does not block is said, and the update goes on."""

    reason: PreflightReason
    message: str
    remedy: str
    is_blocking: bool = True

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


@dataclass(frozen=True, slots=True)
class ImageLayer:
    """One blob of an image, as it travels."""

    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ImageManifest:
    """What the registry says of the image."""

    architecture: str = ""
    """As OCI names it, such as ``amd64``; empty when unknown, as all here."""
    created: float | None = None
    """Seconds since the epoch."""
    layers: tuple[ImageLayer, ...] = ()
    is_bootable: bool = True
    """It says of itself that it is an operating system."""


@dataclass(frozen=True, slots=True)
class RegistryProblem:
    """The registry did not give the image's manifest away."""

    reason: PreflightReason
    text: str


@dataclass(frozen=True, slots=True)
class FilesystemSpace:
    """The file system below a path; of its files, 0 in all means that it has no fixed number."""

    path: str
    device: int
    free_bytes: int
    size_bytes: int
    free_files: int
    files: int
    is_read_only: bool = False
    """The file system itself, not just this mount of it."""


@dataclass(frozen=True, slots=True)
class UnreadableFilesystem:
    """The file system below a path answers with an error."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class PreflightFacts:
    """Everything that a pre-flight looks at."""

    now: float
    """Seconds since the epoch."""
    image: str = ""
    """The pull spec; empty when no other image is asked for."""
    manifest: ImageManifest | RegistryProblem | None = None
    signature_rule: SignatureRule | str | None = None
    """What the signature policy says, or why it can't be read; None where there is none."""
    missing_keys: tuple[str, ...] = ()
    """The keys that the policy names and that are not there."""
    architecture: str = ""
    """The machine's, as OCI names it."""
    spaces: tuple[FilesystemSpace | UnreadableFilesystem, ...] = ()
    present_layers: frozenset[str] = frozenset()
    """The digests of the layers that need no fetching."""
    needs_storage: bool = False
    """The image waits in podman's storage, below /var, until it is deployed."""
    kernel_bytes: int = 0
    """What the booted kernel and its initramfs take on /boot; the next is about as large."""
    freeable_boot_bytes: int = 0
    """What older deployments take on /boot, but for pinned ones; ostree removes them if need be."""
    staged_by_other: str = ""
    drivers: tuple[str, ...] = ()
    """Units that update this machine too, and are active."""
    inhibitors: tuple[str, ...] = ()
    """Who blocks a shutdown, and why."""
    is_clock_synchronized: bool | None = None
    """Whether the clock follows a time server."""
    ledger_problem: str = ""


# ostree refuses to go below this part of the file system (ostree.repo-config(5),
# core.min-free-space-percent).
_RESERVE = 0.03
# Layers are compressed; what they hold is about twice as large.
_UNPACKED = 2.0
_FILES_PER_BYTE = 1 / 16_000
_LEAST_FILES = 1_000
_BOOT_FILES = 16
# The ledger, the copies of what a config replaces, and room for others' logs.
_VAR_BYTES = 64 * 1024 * 1024
_CLOCK_SLACK_S = 3600.0
BOOTABLE_LABELS = ("ostree.bootable", "containers.bootc")
"""The labels that ostree looks for before it deploys an image; one of them is enough."""
_MIB = 1024 * 1024


def find_preflight_problems(
    found: PreflightFacts, *, only_warn: frozenset[str] = frozenset()
) -> tuple[PreflightFinding, ...]:
    """All that is wrong, what blocks first; the reasons in ``only_warn`` never block."""
    everything = [
        *_check_ledger(found),
        *_check_filesystems(found),
        *_check_space(found),
        *_check_other_programs(found),
        *_check_clock(found),
        *_check_signature_policy(found),
        *_check_registry(found),
    ]
    judged = [
        replace(each, is_blocking=False) if each.reason in only_warn else each
        for each in everything
    ]
    return tuple(sorted(judged, key=lambda each: not each.is_blocking))


def _check_ledger(found: PreflightFacts) -> Iterator[PreflightFinding]:
    if found.ledger_problem:
        yield PreflightFinding(
            PreflightReason.LEDGER_NOT_WRITABLE,
            f"the ledger can't be written: {found.ledger_problem}",
            "see that /var/lib/treenail can be written to by root",
        )


def _check_filesystems(found: PreflightFacts) -> Iterator[PreflightFinding]:
    for space in found.spaces:
        if isinstance(space, UnreadableFilesystem):
            yield PreflightFinding(
                PreflightReason.FILE_SYSTEM_FAILING,
                f"the file system at {space.path} answers with an error: {space.text}",
                "see 'journalctl -k -p err'; check or replace the disk",
            )
        elif space.is_read_only and space.path != "/boot":
            # /boot is mounted read-only on purpose on some systems; ostree remounts it.
            yield PreflightFinding(
                PreflightReason.READ_ONLY_FILE_SYSTEM,
                f"the file system at {space.path} is read-only, as it becomes after errors",
                "see 'journalctl -k -p err'; check the file system, then mount it read-write",
            )


_SPACE_REASONS = {
    "/boot": (PreflightReason.NO_SPACE_ON_BOOT, PreflightReason.NO_INODES_ON_BOOT),
    "/sysroot": (PreflightReason.NO_SPACE_ON_SYSROOT, PreflightReason.NO_INODES_ON_SYSROOT),
    "/var": (PreflightReason.NO_SPACE_ON_VAR, PreflightReason.NO_INODES_ON_VAR),
}
_SPACE_REMEDIES = {
    "/boot": "remove old deployments with 'rpm-ostree cleanup --rollback', pinned ones after "
    "'ostree admin pin --unpin', or files of others",
    "/sysroot": "remove old deployments with 'rpm-ostree cleanup --rollback', or unused container "
    "images with 'crictl rmi --prune'",
    "/var": "remove unused container images with 'crictl rmi --prune', or old logs with "
    "'journalctl --vacuum-size=500M'",
}


def _check_space(found: PreflightFacts) -> Iterator[PreflightFinding]:
    """Each file system must have room for all that goes there: paths may share one."""
    taken_bytes: dict[int, int] = {}
    taken_files: dict[int, int] = {}
    for space in found.spaces:
        if isinstance(space, UnreadableFilesystem) or space.path not in _SPACE_REASONS:
            continue
        bytes_needed, files_needed = _compute_space_needed(found, space)
        taken_bytes[space.device] = taken_bytes.get(space.device, 0) + bytes_needed
        taken_files[space.device] = taken_files.get(space.device, 0) + files_needed
        of_bytes, of_files = _SPACE_REASONS[space.path]
        if bytes_needed and space.free_bytes < taken_bytes[space.device]:
            yield PreflightFinding(
                of_bytes,
                f"{space.path} has {space.free_bytes // _MIB} MiB free, and the update needs "
                f"{-(-taken_bytes[space.device] // _MIB)} MiB there",
                _SPACE_REMEDIES[space.path],
            )
        if files_needed and space.files and space.free_files < taken_files[space.device]:
            yield PreflightFinding(
                of_files,
                f"{space.path} has {space.free_files} inodes left, and the update needs "
                f"{taken_files[space.device]} there",
                _SPACE_REMEDIES[space.path],
            )


def _compute_space_needed(found: PreflightFacts, space: FilesystemSpace) -> tuple[int, int]:
    """Bytes and files that the update needs on the file system."""
    layers = found.manifest.layers if isinstance(found.manifest, ImageManifest) else ()
    if space.path == "/var":
        stored = sum(each.size_bytes for each in layers) if found.needs_storage else 0
        unpacked, files = int(stored * _UNPACKED), int(stored * _FILES_PER_BYTE)
        return _VAR_BYTES + unpacked, _LEAST_FILES + files
    if space.path == "/boot":
        needed = found.kernel_bytes - found.freeable_boot_bytes
        return (max(needed, 0), _BOOT_FILES) if found.kernel_bytes else (0, 0)
    missing = sum(each.size_bytes for each in layers if each.digest not in found.present_layers)
    if not missing:
        return 0, 0
    reserve = int(space.size_bytes * _RESERVE)
    files = max(int(missing * _FILES_PER_BYTE), _LEAST_FILES)
    return int(missing * _UNPACKED) + reserve, files


def _check_other_programs(found: PreflightFacts) -> Iterator[PreflightFinding]:
    if found.staged_by_other:
        yield describe_foreign_staged(found.staged_by_other)
    for driver in found.drivers:
        yield PreflightFinding(
            PreflightReason.OTHER_UPDATE_DRIVER,
            f"{driver} is active and updates this machine too",
            f"leave the updates to one of them: 'systemctl disable --now {driver}'",
        )
    for holder in found.inhibitors:
        yield PreflightFinding(
            PreflightReason.SHUTDOWN_INHIBITED,
            f"a reboot is blocked by {holder}",
            "wait for it, or end it; see: systemd-inhibit --list",
        )


def describe_foreign_staged(deployment: str) -> PreflightFinding:
    """Somebody else staged the deployment of this id; it is not ours to drop."""
    return PreflightFinding(
        PreflightReason.STAGED_BY_OTHER,
        f"deployment {deployment} is staged on this machine, and not by treenail",
        "drop it with 'rpm-ostree cleanup --pending', or reboot into it",
    )


def _check_clock(found: PreflightFacts) -> Iterator[PreflightFinding]:
    remedy = "set the clock; see 'timedatectl' and 'chronyc tracking'"
    manifest = found.manifest
    if isinstance(manifest, ImageManifest) and manifest.created is not None:
        behind_s = manifest.created - found.now
        if behind_s > _CLOCK_SLACK_S:
            yield PreflightFinding(
                PreflightReason.CLOCK_BEHIND_IMAGE,
                f"this machine's clock is {behind_s / 3600:.1f} h behind the moment when the image "
                "was built",
                remedy,
            )
    if found.is_clock_synchronized is False:
        yield PreflightFinding(
            PreflightReason.CLOCK_NOT_SYNCHRONIZED,
            "this machine's clock follows no time server",
            remedy,
            is_blocking=False,
        )


def _check_signature_policy(found: PreflightFacts) -> Iterator[PreflightFinding]:
    if not found.image:
        return
    if isinstance(found.signature_rule, str):
        yield PreflightFinding(
            PreflightReason.SIGNATURE_POLICY_UNUSABLE,
            found.signature_rule,
            f"mend {POLICY_PATH}; see containers-policy.json(5)",
        )
    elif (
        isinstance(found.signature_rule, SignatureRule)
        and found.signature_rule.trust is SignatureTrust.REJECTED
    ):
        yield PreflightFinding(
            PreflightReason.SIGNATURE_REJECTED,
            f"the signature policy rejects {found.image}, by {found.signature_rule.scope}",
            f"allow it in {POLICY_PATH}, or ask for an image that is allowed",
        )
    for key in found.missing_keys:
        yield PreflightFinding(
            PreflightReason.SIGNATURE_KEY_MISSING,
            f"the signature policy wants signatures checked with {key}, and there is no such file",
            f"put the key there, or change {POLICY_PATH}",
        )


def _check_registry(found: PreflightFacts) -> Iterator[PreflightFinding]:
    manifest = found.manifest
    if isinstance(manifest, RegistryProblem):
        what, remedy = REGISTRY_PROBLEM_TEXTS.get(
            manifest.reason, REGISTRY_PROBLEM_TEXTS[PreflightReason.REGISTRY_FAILED]
        )
        registry = found.image.partition("/")[0]
        about = what.format(registry=registry, image=found.image)
        yield PreflightFinding(
            manifest.reason, f"{about}: {manifest.text}", remedy.format(registry=registry)
        )
    elif isinstance(manifest, ImageManifest):
        if not manifest.is_bootable:
            yield PreflightFinding(
                PreflightReason.IMAGE_NOT_BOOTABLE,
                f"{found.image} is no operating system: it has no label {' or '.join(BOOTABLE_LABELS)}",
                "ask for an image that is one, and not for one of extensions or of a program",
            )
        built_for = manifest.architecture
        if "" not in (built_for, found.architecture) and built_for != found.architecture:
            yield PreflightFinding(
                PreflightReason.WRONG_ARCHITECTURE,
                f"{found.image} is built for {built_for}, and this machine is {found.architecture}",
                "ask for an image of this architecture, or for one that has several",
            )


def make_preflight_error(found: tuple[PreflightFinding, ...]) -> PreflightError | None:
    """The error that says all that blocks, each with its remedy; None when nothing does."""
    blocking = [each for each in found if each.is_blocking]
    if not blocking:
        return None
    return PreflightError(
        "the update can't begin: " + "; ".join(str(each) for each in blocking),
        reasons=tuple(str(each.reason) for each in blocking),
        remedy="; ".join(dict.fromkeys(each.remedy for each in blocking)),
    )
