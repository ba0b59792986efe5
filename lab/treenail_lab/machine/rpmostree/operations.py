"""The work of each rpm-ostree transaction, for `EmulatedTransaction`.

Kernel arguments are edited as libostree does: ordered keys, each with one or more values.
"""

from collections.abc import Callable, Generator
from configparser import ConfigParser
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from treenail_lab.machine.bus.objects import read_option
from treenail_lab.machine.container import pull
from treenail_lab.machine.ostree.steps import (
    EmitSignal,
    OperationError,
    PauseWork,
    TransactionWork,
    emit_message,
    emit_progress_end,
    emit_task_begin,
    emit_task_end,
)
from treenail_lab.machine.ostree.sysroot import (
    SysrootDeployment,
    build_boot_options,
    layer_packages,
)
from treenail_lab.machine.settings import MachineSettings

BOOT_KEY = "ostree"


class KernelCommandLine:
    """A kernel command line; quotes are kept, and blanks inside them do not separate."""

    def __init__(self, text: str) -> None:
        self._arguments = [a for a in _split_words(text) if _parse_key(a) != BOOT_KEY]

    def list_arguments(self) -> tuple[str, ...]:
        """Return the arguments without ``ostree=``, which names the deployment."""
        return tuple(self._arguments)

    def append(self, argument: str) -> None:
        """Add the argument, also when its key exists."""
        self._arguments.append(argument)

    def append_if_missing(self, argument: str) -> bool:
        """Add the argument unless the same argument exists; return whether it was added."""
        if argument in self._arguments:
            return False
        self.append(argument)
        return True

    def delete(self, argument: str) -> None:
        """Remove ``key=value``, or ``key`` when it has one value."""
        self._arguments.pop(self._find_position(argument))

    def delete_if_present(self, argument: str) -> bool:
        """Remove the argument if it exists; return whether it did."""
        present = argument in self._arguments or (
            "=" not in argument and any(_parse_key(a) == argument for a in self._arguments)
        )
        if present:
            self.delete(argument)
        return present

    def replace(self, argument: str) -> None:
        """Replace a key's only value by ``key=new``, or one of several by ``key=old=new``."""
        key, equals, rest = argument.partition("=")
        old, more, new = rest.partition("=")
        if more and f"{key}={old}" in self._arguments:
            self._arguments[self._find_position(f"{key}={old}")] = f"{key}={new}"
        else:
            self._arguments[self._find_position(key)] = f"{key}{equals}{rest}"

    def _find_position(self, argument: str) -> int:
        key, equals, _ = argument.partition("=")
        positions = [i for i, a in enumerate(self._arguments) if _parse_key(a) == key]
        if not positions:
            raise OperationError(f"No key '{key}' found")
        if equals:
            positions = [i for i in positions if self._arguments[i] == argument]
            if not positions:
                raise OperationError(f"No karg '{argument}' found")
        elif len(positions) > 1:
            raise OperationError(f"Multiple values for key '{key}' found")
        return positions[0]


def _parse_key(argument: str) -> str:
    return argument.partition("=")[0]


def _split_words(text: str) -> list[str]:
    words: list[str] = []
    quoted = fresh = False
    for character in text:
        if character.isspace() and not quoted:
            fresh = False
            continue
        quoted ^= character == '"'
        if fresh:
            words[-1] += character
        else:
            words.append(character)
            fresh = True
    return words


class SysrootInterface(Protocol):
    """The sysroot as the operations use it: `Sysroot` here, libostree in the VM tests."""

    def read_staged(self) -> SysrootDeployment | None: ...
    def read_written(self) -> tuple[SysrootDeployment, ...]: ...
    def find_booted(self) -> SysrootDeployment | None: ...
    def list_deployments(self) -> tuple[SysrootDeployment, ...]: ...
    def find_base(self) -> SysrootDeployment | None: ...
    def is_staged_locked(self) -> bool: ...
    def compute_next_serial(self, checksum: str) -> int: ...
    def stage_in_steps(self, deployment: SysrootDeployment, *, locked: bool) -> TransactionWork: ...
    def unlock_staged(self) -> bool: ...
    def drop_staged(self) -> bool: ...
    def write_deployments(self, deployments: tuple[SysrootDeployment, ...]) -> None: ...
    def prune_layers(self) -> int: ...


PullFunction = Callable[
    [str, str, tuple[str, ...]], Generator[EmitSignal | PauseWork, None, pull.PullResult]
]
"""Pulls one refspec, for a deployment with another refspec and these kernel arguments."""


@dataclass(frozen=True, slots=True)
class OperationContext:
    """The host of the operations; ``blockers`` lists block inhibitors, ``reboot`` requests one.

    ``packages`` lists the packages in the machine's own repositories. Other packages exist too,
    except the missing ones of the settings.
    """

    sysroot: SysrootInterface
    fetch: PullFunction
    settings: Callable[[], MachineSettings]
    packages: Callable[[], frozenset[str]]
    blockers: Callable[[], list[tuple[str, str]]]
    reboot: Callable[[], None]


@dataclass(frozen=True, slots=True)
class PackageChange:
    """A change of layered packages and of packages removed from the image."""

    install: tuple[str, ...] = ()
    uninstall: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    reset: tuple[str, ...] = ()

    @classmethod
    def from_variant(cls, modifiers: Any) -> "PackageChange":
        return cls(
            install=tuple(read_option(modifiers, "install-packages", "as") or ()),
            uninstall=tuple(read_option(modifiers, "uninstall-packages", "as") or ()),
            remove=tuple(read_option(modifiers, "override-remove-packages", "as") or ()),
            reset=tuple(read_option(modifiers, "override-reset-packages", "as") or ()),
        )

    def apply_to(
        self, base: SysrootDeployment, deployment: SysrootDeployment, *, idempotent: bool
    ) -> SysrootDeployment:
        """Return ``deployment`` with the changed packages of ``base``."""
        return layer_packages(
            deployment,
            _change_names(base.packages, self.install, self.uninstall, idempotent=idempotent),
            _change_names(base.removals, self.remove, self.reset, idempotent=idempotent),
        )


@dataclass(frozen=True, slots=True)
class TransactionOptions:
    """The options that several methods share, read like a GVariantDict."""

    should_reboot: bool
    should_lock: bool
    command_line: str
    revision: str
    is_idempotent: bool
    should_skip_base_pull: bool
    should_skip_purge: bool
    custom_origin: tuple[str, str] | None

    @classmethod
    def from_variant(cls, dictionary: Any) -> "TransactionOptions":
        """Read the options; rpm-ostree ignores unknown keys and values of a wrong type."""
        return cls(
            should_reboot=bool(read_option(dictionary, "reboot", "b")),
            should_lock=bool(read_option(dictionary, "lock-finalization", "b")),
            command_line=read_option(dictionary, "initiating-command-line", "s") or "",
            revision=read_option(dictionary, "revision", "s") or "",
            is_idempotent=bool(read_option(dictionary, "idempotent-layering", "b")),
            should_skip_base_pull=bool(read_option(dictionary, "no-pull-base", "b")),
            should_skip_purge=bool(read_option(dictionary, "skip-purge", "b")),
            custom_origin=read_option(dictionary, "custom-origin", "(ss)"),
        )


def rebase_deployment(
    host: OperationContext,
    refspec: str,
    options: TransactionOptions,
    packages: PackageChange = PackageChange(),
) -> TransactionWork:
    """Pull the image and stage it."""
    if options.should_skip_base_pull:
        raise OperationError("Can't specify no-pull-base if setting a new refspec or revision")
    wanted = pull.canonicalize_refspec(refspec)
    base = _find_base(host)
    if wanted == base.refspec:
        raise OperationError(f"Old and new refs are equal: {wanted}")
    yield from _deploy_image(host, base, wanted, options, packages)


def upgrade_deployment(host: OperationContext, options: TransactionOptions) -> TransactionWork:
    """Pull a newer image of the same name; a digest never has one."""
    _check_purge(options)
    base = _find_base(host)
    image = pull.parse_pull_spec(base.refspec)
    yield emit_message(f"Pulling manifest: {base.refspec}")
    if "@" not in image:
        raise OperationError(f"reading manifest latest in {image}: manifest unknown")
    yield emit_message("No upgrade available.")
    _reboot_if_requested(
        host, wanted=options.should_reboot and host.sysroot.read_staged() is not None
    )


def deploy_revision(
    host: OperationContext, revision: str, options: TransactionOptions
) -> TransactionWork:
    """Pull another digest of the booted repository."""
    _check_purge(options)
    base = _find_base(host)
    if not revision.startswith("sha256:"):
        raise OperationError(f"Invalid container image digest: {revision}")
    yield from _deploy_image(host, base, _replace_digest(base.refspec, revision), options)


def change_packages(
    host: OperationContext, packages: PackageChange, options: TransactionOptions
) -> TransactionWork:
    """Stage the base deployment again with other packages."""
    _check_purge(options)
    base = _find_base(host)
    wanted = packages.apply_to(base, base, idempotent=options.is_idempotent)
    if wanted == base:
        yield emit_message("No change.")
        return
    _check_packages(host, wanted)
    yield emit_message("Resolving dependencies...done")
    yield from _stage_deployment(host, replace(wanted, pinned=False), options)


def change_kernel_arguments(
    host: OperationContext, arguments: KernelCommandLine, options: TransactionOptions
) -> TransactionWork:
    """Stage the base deployment again with other kernel arguments."""
    base = _find_base(host)
    changed = replace(base, kernel_arguments=arguments.list_arguments(), pinned=False)
    yield from _stage_deployment(host, changed, options)


def roll_back_deployment(host: OperationContext, options: TransactionOptions) -> TransactionWork:
    """Make the previous deployment the default, or the booted one if another is pending."""
    sysroot = host.sysroot
    if sysroot.read_staged() is not None:
        raise OperationError("Staged deployment (remove with cleanup -p)")
    written = sysroot.read_written()
    booted = sysroot.find_booted()
    after = written[written.index(booted) + 1 :] if booted in written else ()
    target = next(iter(after), booted)
    if target is None or len(written) == 1:
        raise OperationError("No rollback deployment found")
    yield emit_message(f"Moving '{target.checksum}.{target.serial}' to be first deployment")
    sysroot.write_deployments(
        (target, *(deployment for deployment in written if deployment != target))
    )
    _reboot_if_requested(host, wanted=options.should_reboot)


CLEANUP_ELEMENTS = ("base", "pending-deploy", "repomd", "rollback-deploy")


def clean_up_deployments(host: OperationContext, elements: list[str]) -> TransactionWork:
    """Drop pending and rollback deployments that are not pinned, and unused layers."""
    sysroot = host.sysroot
    drops_pending, drops_rollback = "pending-deploy" in elements, "rollback-deploy" in elements
    changed = drops_pending and sysroot.drop_staged()
    old = sysroot.read_written()
    booted = sysroot.find_booted()
    start = old.index(booted) if booted in old else len(old)
    kept = tuple(
        deployment
        for index, deployment in enumerate(old)
        if deployment == booted
        or deployment.pinned
        or not (drops_pending if index < start else drops_rollback)
    )
    if kept != old:
        sysroot.write_deployments(kept)
        changed = True
    if (drops_pending or drops_rollback) and not changed:
        yield emit_message("Deployments unchanged.")
    if changed or "base" in elements:
        yield from _prune(host)


def refresh_metadata(host: OperationContext) -> TransactionWork:
    """Download package metadata, which takes time and changes no deployment."""
    yield emit_task_begin("Updating metadata for 'lab'")
    spent_s = 0.0
    # In slices, so that a changed setting applies to the running transaction.
    while (left_s := host.settings().refresh_md_s - spent_s) > 0:
        slice_s = min(left_s, 0.05)
        yield PauseWork(slice_s)
        spent_s += slice_s
    yield emit_task_end()


def finalize_deployment(host: OperationContext, dictionary: Any) -> TransactionWork:
    """Unlock the staged deployment and reboot into it."""
    checksum = read_option(dictionary, "checksum", "s")
    staged = host.sysroot.read_staged()
    if staged is None:
        raise OperationError("No pending staged deployment found")
    if checksum is None and not read_option(dictionary, "allow-missing-checksum", "b"):
        raise OperationError("Missing expected checksum")
    # For a container deployment rpm-ostree compares the manifest digest, which the caller knows.
    commit = staged.base or staged.checksum
    expected = commit if host.settings().finalizes_by_commit else staged.digest
    if checksum is not None and checksum != expected:
        raise OperationError(f"Expected staged base checksum {checksum}, but found {expected}")
    check_inhibitors(host)
    if not host.sysroot.unlock_staged() and not read_option(dictionary, "allow-unlocked", "b"):
        raise OperationError("Staged deployment already unlocked")
    host.reboot()
    # The daemon reports the reboot in the journal only.
    yield from ()


def check_inhibitors(host: OperationContext) -> None:
    """Raise `OperationError` if a block inhibitor for shutdown is held."""
    blockers = host.blockers()
    if not blockers:
        return
    holder, reason = blockers[0]
    text = (
        "Reboot blocked by a systemd inhibitor lock in `block` mode\n"
        f"Held by: {holder}\nReason: {reason}"
    )
    if len(blockers) > 1:
        text += f"\nand {len(blockers) - 1} other blocking inhibitor lock(s)"
    raise OperationError(text)


def _change_names(
    names: tuple[str, ...],
    more: tuple[str, ...],
    fewer: tuple[str, ...],
    *,
    idempotent: bool,
) -> tuple[str, ...]:
    for name in () if idempotent else more:
        if name in names:
            raise OperationError(f"Package/capability '{name}' is already requested")
    for name in () if idempotent else fewer:
        if name not in names:
            raise OperationError(f"Package/capability '{name}' is not currently requested")
    kept = tuple(name for name in names if name not in fewer)
    return kept + tuple(name for name in more if name not in kept)


def _deploy_image(
    host: OperationContext,
    base: SysrootDeployment,
    refspec: str,
    options: TransactionOptions,
    packages: PackageChange = PackageChange(),
) -> Generator[EmitSignal | PauseWork, None, None]:
    if options.should_reboot:
        check_inhibitors(host)
    pulled = _replace_digest(refspec, options.revision) if options.revision else refspec
    fetched = yield from host.fetch(pulled, refspec, base.kernel_arguments)
    yield emit_progress_end()
    deployment = packages.apply_to(base, fetched.deployment, idempotent=options.is_idempotent)
    _check_packages(host, deployment)
    if "@sha256:" in refspec:
        deployment = replace(deployment, custom_origin=options.custom_origin)
    yield from _stage_deployment(
        host, deployment, options, fault=fetched.fault, sanity_fault=fetched.sanity_fault
    )


def _check_packages(host: OperationContext, deployment: SysrootDeployment) -> None:
    """Raise `OperationError` for a layered package that is in no repository."""
    missing = [name for name in deployment.packages if name in host.settings().missing_packages]
    if missing := [name for name in missing if name not in host.packages()]:
        raise OperationError(f"Packages not found: {', '.join(missing)}")


def _stage_deployment(
    host: OperationContext,
    deployment: SysrootDeployment,
    options: TransactionOptions,
    *,
    fault: str = "",
    sanity_fault: str = "",
) -> Generator[EmitSignal | PauseWork, None, None]:
    short = deployment.checksum[:7]
    yield emit_task_begin(f"Checking out tree {short}")
    yield emit_task_end()
    yield emit_task_begin("Staging deployment")
    settings = host.settings()
    yield PauseWork(settings.staging_s)
    failure = settings.staging_error or fault
    if failure:
        raise OperationError(failure)
    serial = host.sysroot.compute_next_serial(deployment.checksum)
    yield from host.sysroot.stage_in_steps(
        replace(deployment, serial=serial), locked=options.should_lock
    )
    yield emit_task_end()
    # rpm-ostreed runs /usr/bin/true of the tree only now: after a failure it stays staged.
    if failure := settings.sanity_error or sanity_fault:
        raise OperationError(f"Sanity-checking final rootfs: {failure}")
    yield from _prune(host)
    _reboot_if_requested(host, wanted=options.should_reboot)


def _prune(host: OperationContext) -> TransactionWork:
    freed = host.sysroot.prune_layers()
    if freed:
        yield emit_message(f"Pruned images: 1 (layers: {freed})")


def _reboot_if_requested(host: OperationContext, *, wanted: bool) -> None:
    if wanted:
        host.reboot()


def _check_purge(options: TransactionOptions) -> None:
    if options.should_skip_purge:
        raise OperationError("Can't specify skip-purge if not setting a new refspec")


def _find_base(host: OperationContext) -> SysrootDeployment:
    base = host.sysroot.find_base()
    if base is None:
        raise OperationError("No deployments found")
    return base


def _replace_digest(refspec: str, digest: str) -> str:
    name = refspec.partition("@")[0]
    slash = name.rfind("/")
    colon = name.find(":", slash)
    return f"{name if colon < 0 else name[:colon]}@{digest}"


def build_boot_config(deployment: SysrootDeployment) -> dict[str, str]:
    """Return the boot loader entry of a deployment."""
    kernel = f"/ostree/{deployment.osname}-{deployment.checksum}"
    return {
        "title": f"Lab OS {deployment.version} (ostree:0)",
        "version": "1",
        "options": build_boot_options(deployment),
        "linux": f"{kernel}/vmlinuz",
        "initrd": f"{kernel}/initramfs.img",
    }


_SCHEME = "file://"


def list_packages(root: Path) -> frozenset[str]:
    """Return the packages in the machine's repositories with a ``file://`` URL."""
    packages: set[str] = set()
    for file in sorted((root / "etc/yum.repos.d").glob("*.repo")):
        repositories = ConfigParser(interpolation=None)
        repositories.read(file, encoding="utf-8")
        for name in repositories.sections():
            place = repositories[name].get("baseurl", "")
            if place.startswith(_SCHEME):
                packages |= {path.stem for path in Path(place.removeprefix(_SCHEME)).glob("*.rpm")}
    return frozenset(packages)
