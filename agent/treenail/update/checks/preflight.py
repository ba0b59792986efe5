"""What would make an update fail, found before anything is cordoned: facts to findings.

A fact of None could not be established. That never holds an update up: what it would have shown
is found by rpm-ostree or bootc a little later, which is still before the drain.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from treenail.errors import PreflightError
from treenail.update.checks.registry_errors import TROUBLES
from treenail.update.checks.signature_policy import POLICY, Rule, Trust


class Reason(StrEnum):
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
class Finding:
    """One thing that is wrong; what does not block is said, and the update goes on."""

    reason: Reason
    sentence: str
    remedy: str
    blocks: bool = True

    def __str__(self) -> str:
        return f"{self.reason}: {self.sentence}"


@dataclass(frozen=True, slots=True)
class Layer:
    """One blob of an image, as it travels."""

    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the registry says of the image."""

    architecture: str = ""
    """As OCI names it, such as ``amd64``; empty when unknown, as all here."""
    created: float | None = None
    """Seconds since the epoch."""
    layers: tuple[Layer, ...] = ()
    bootable: bool = True
    """It says of itself that it is an operating system."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """The registry did not give the image's manifest away."""

    reason: Reason
    text: str


@dataclass(frozen=True, slots=True)
class Space:
    """The file system below a path; of its files, 0 in all means that it has no fixed number."""

    path: str
    device: int
    free_bytes: int
    size_bytes: int
    free_files: int
    files: int
    read_only: bool = False
    """The file system itself, not just this mount of it."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The file system below a path answers with an error."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Conditions:
    """Everything that a pre-flight looks at."""

    now: float
    """Seconds since the epoch."""
    image: str = ""
    """The pull spec; empty when no other image is asked for."""
    manifest: Manifest | Trouble | None = None
    rule: Rule | str | None = None
    """What the signature policy says, or why it can't be read; None where there is none."""
    missing_keys: tuple[str, ...] = ()
    """The keys that the policy names and that are not there."""
    architecture: str = ""
    """The machine's, as OCI names it."""
    spaces: tuple[Space | Unreadable, ...] = ()
    held_layers: frozenset[str] = frozenset()
    """The digests of the layers that need no fetching."""
    stores: bool = False
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
    synchronized: bool | None = None
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
BOOTABLE = ("ostree.bootable", "containers.bootc")
"""The labels that ostree looks for before it deploys an image; one of them is enough."""
_MIB = 1024 * 1024


def findings(found: Conditions, *, only_warn: frozenset[str] = frozenset()) -> tuple[Finding, ...]:
    """All that is wrong, what blocks first; the reasons in ``only_warn`` never block."""
    everything = [
        *_of_ledger(found),
        *_of_file_systems(found),
        *_of_space(found),
        *_of_others(found),
        *_of_clock(found),
        *_of_policy(found),
        *_of_registry(found),
    ]
    judged = [
        replace(each, blocks=False) if each.reason in only_warn else each for each in everything
    ]
    return tuple(sorted(judged, key=lambda each: not each.blocks))


def _of_ledger(found: Conditions) -> Iterator[Finding]:
    if found.ledger_problem:
        yield Finding(
            Reason.LEDGER_NOT_WRITABLE,
            f"the ledger can't be written: {found.ledger_problem}",
            "see that /var/lib/treenail can be written to by root",
        )


def _of_file_systems(found: Conditions) -> Iterator[Finding]:
    for space in found.spaces:
        if isinstance(space, Unreadable):
            yield Finding(
                Reason.FILE_SYSTEM_FAILING,
                f"the file system at {space.path} answers with an error: {space.text}",
                "see 'journalctl -k -p err'; check or replace the disk",
            )
        elif space.read_only and space.path != "/boot":
            # /boot is mounted read-only on purpose on some systems; ostree remounts it.
            yield Finding(
                Reason.READ_ONLY_FILE_SYSTEM,
                f"the file system at {space.path} is read-only, as it becomes after errors",
                "see 'journalctl -k -p err'; check the file system, then mount it read-write",
            )


_ON = {
    "/boot": (Reason.NO_SPACE_ON_BOOT, Reason.NO_INODES_ON_BOOT),
    "/sysroot": (Reason.NO_SPACE_ON_SYSROOT, Reason.NO_INODES_ON_SYSROOT),
    "/var": (Reason.NO_SPACE_ON_VAR, Reason.NO_INODES_ON_VAR),
}
_MAKE_ROOM = {
    "/boot": "remove old deployments with 'rpm-ostree cleanup --rollback', pinned ones after "
    "'ostree admin pin --unpin', or files of others",
    "/sysroot": "remove old deployments with 'rpm-ostree cleanup --rollback', or unused container "
    "images with 'crictl rmi --prune'",
    "/var": "remove unused container images with 'crictl rmi --prune', or old logs with "
    "'journalctl --vacuum-size=500M'",
}


def _of_space(found: Conditions) -> Iterator[Finding]:
    """Each file system must have room for all that goes there: paths may share one."""
    taken_bytes: dict[int, int] = {}
    taken_files: dict[int, int] = {}
    for space in found.spaces:
        if isinstance(space, Unreadable) or space.path not in _ON:
            continue
        bytes_needed, files_needed = _needs(found, space)
        taken_bytes[space.device] = taken_bytes.get(space.device, 0) + bytes_needed
        taken_files[space.device] = taken_files.get(space.device, 0) + files_needed
        of_bytes, of_files = _ON[space.path]
        if bytes_needed and space.free_bytes < taken_bytes[space.device]:
            yield Finding(
                of_bytes,
                f"{space.path} has {space.free_bytes // _MIB} MiB free, and the update needs "
                f"{-(-taken_bytes[space.device] // _MIB)} MiB there",
                _MAKE_ROOM[space.path],
            )
        if files_needed and space.files and space.free_files < taken_files[space.device]:
            yield Finding(
                of_files,
                f"{space.path} has {space.free_files} inodes left, and the update needs "
                f"{taken_files[space.device]} there",
                _MAKE_ROOM[space.path],
            )


def _needs(found: Conditions, space: Space) -> tuple[int, int]:
    """Bytes and files that the update needs on the file system."""
    layers = found.manifest.layers if isinstance(found.manifest, Manifest) else ()
    if space.path == "/var":
        stored = sum(each.size_bytes for each in layers) if found.stores else 0
        unpacked, files = int(stored * _UNPACKED), int(stored * _FILES_PER_BYTE)
        return _VAR_BYTES + unpacked, _LEAST_FILES + files
    if space.path == "/boot":
        needed = found.kernel_bytes - found.freeable_boot_bytes
        return (max(needed, 0), _BOOT_FILES) if found.kernel_bytes else (0, 0)
    missing = sum(each.size_bytes for each in layers if each.digest not in found.held_layers)
    if not missing:
        return 0, 0
    reserve = int(space.size_bytes * _RESERVE)
    files = max(int(missing * _FILES_PER_BYTE), _LEAST_FILES)
    return int(missing * _UNPACKED) + reserve, files


def _of_others(found: Conditions) -> Iterator[Finding]:
    if found.staged_by_other:
        yield staged_by_other(found.staged_by_other)
    for driver in found.drivers:
        yield Finding(
            Reason.OTHER_UPDATE_DRIVER,
            f"{driver} is active and updates this machine too",
            f"leave the updates to one of them: 'systemctl disable --now {driver}'",
        )
    for holder in found.inhibitors:
        yield Finding(
            Reason.SHUTDOWN_INHIBITED,
            f"a reboot is blocked by {holder}",
            "wait for it, or end it; see: systemd-inhibit --list",
        )


def staged_by_other(deployment: str) -> Finding:
    """Somebody else staged the deployment of this id; it is not ours to drop."""
    return Finding(
        Reason.STAGED_BY_OTHER,
        f"deployment {deployment} is staged on this machine, and not by treenail",
        "drop it with 'rpm-ostree cleanup --pending', or reboot into it",
    )


def _of_clock(found: Conditions) -> Iterator[Finding]:
    remedy = "set the clock; see 'timedatectl' and 'chronyc tracking'"
    manifest = found.manifest
    if isinstance(manifest, Manifest) and manifest.created is not None:
        behind_s = manifest.created - found.now
        if behind_s > _CLOCK_SLACK_S:
            yield Finding(
                Reason.CLOCK_BEHIND_IMAGE,
                f"this machine's clock is {behind_s / 3600:.1f} h behind the moment when the image "
                "was built",
                remedy,
            )
    if found.synchronized is False:
        yield Finding(
            Reason.CLOCK_NOT_SYNCHRONIZED,
            "this machine's clock follows no time server",
            remedy,
            blocks=False,
        )


def _of_policy(found: Conditions) -> Iterator[Finding]:
    if not found.image:
        return
    if isinstance(found.rule, str):
        yield Finding(
            Reason.SIGNATURE_POLICY_UNUSABLE,
            found.rule,
            f"mend {POLICY}; see containers-policy.json(5)",
        )
    elif isinstance(found.rule, Rule) and found.rule.trust is Trust.REJECTED:
        yield Finding(
            Reason.SIGNATURE_REJECTED,
            f"the signature policy rejects {found.image}, by {found.rule.scope}",
            f"allow it in {POLICY}, or ask for an image that is allowed",
        )
    for key in found.missing_keys:
        yield Finding(
            Reason.SIGNATURE_KEY_MISSING,
            f"the signature policy wants signatures checked with {key}, and there is no such file",
            f"put the key there, or change {POLICY}",
        )


def _of_registry(found: Conditions) -> Iterator[Finding]:
    manifest = found.manifest
    if isinstance(manifest, Trouble):
        what, remedy = TROUBLES.get(manifest.reason, TROUBLES[Reason.REGISTRY_FAILED])
        registry = found.image.partition("/")[0]
        about = what.format(registry=registry, image=found.image)
        yield Finding(
            manifest.reason, f"{about}: {manifest.text}", remedy.format(registry=registry)
        )
    elif isinstance(manifest, Manifest):
        if not manifest.bootable:
            yield Finding(
                Reason.IMAGE_NOT_BOOTABLE,
                f"{found.image} is no operating system: it has no label {' or '.join(BOOTABLE)}",
                "ask for an image that is one, and not for one of extensions or of a program",
            )
        built_for = manifest.architecture
        if "" not in (built_for, found.architecture) and built_for != found.architecture:
            yield Finding(
                Reason.WRONG_ARCHITECTURE,
                f"{found.image} is built for {built_for}, and this machine is {found.architecture}",
                "ask for an image of this architecture, or for one that has several",
            )


def refusal(found: tuple[Finding, ...]) -> PreflightError | None:
    """The error that says all that blocks, each with its remedy; None when nothing does."""
    blocking = [each for each in found if each.blocks]
    if not blocking:
        return None
    return PreflightError(
        "the update can't begin: " + "; ".join(str(each) for each in blocking),
        reasons=tuple(str(each.reason) for each in blocking),
        remedy="; ".join(dict.fromkeys(each.remedy for each in blocking)),
    )
