"""What each transaction of rpm-ostree does to the deployments, as work for a `Transaction`."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from treenail_lab.machine.bus.objects import option
from treenail_lab.machine.container import pull
from treenail_lab.machine.ostree.kernel_arguments import KernelArguments
from treenail_lab.machine.ostree.steps import (
    Emit,
    OperationFailed,
    Pause,
    Work,
    message,
    percent,
    progress_end,
    task_begin,
    task_end,
)
from treenail_lab.machine.ostree.sysroot import Deployment, boot_options, with_packages
from treenail_lab.machine.settings import Settings


class Deployments(Protocol):
    """What the operations need of a sysroot; see `treenail_lab.machine.ostree.sysroot.Sysroot`."""

    def staged(self) -> Deployment | None: ...
    def written(self) -> tuple[Deployment, ...]: ...
    def booted(self) -> Deployment | None: ...
    def everything(self) -> tuple[Deployment, ...]: ...
    def base(self) -> Deployment | None: ...
    def locked(self) -> bool: ...
    def next_serial(self, checksum: str) -> int: ...
    def staging(self, deployment: Deployment, *, locked: bool) -> Work: ...
    def unlock(self) -> bool: ...
    def drop_staged(self) -> bool: ...
    def write(self, deployments: tuple[Deployment, ...]) -> None: ...
    def prune_layers(self) -> int: ...


Pull = Callable[[str, str, tuple[str, ...]], Generator[Emit | Pause, None, pull.Pulled]]
"""Fetches what a refspec names, to be deployed as another refspec with these kernel arguments."""


@dataclass(frozen=True, slots=True)
class Host:
    """What the operations work on; ``blockers`` lists who blocks a shutdown, ``reboot`` asks.

    ``packages`` are those in the machine's own repositories, beside which all others are
    somewhere, but for the missing ones of the settings.
    """

    sysroot: Deployments
    fetch: Pull
    settings: Callable[[], Settings]
    packages: Callable[[], frozenset[str]]
    blockers: Callable[[], list[tuple[str, str]]]
    reboot: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Packages:
    """What is asked to change about packages: those beside the image, and those left out of it."""

    install: tuple[str, ...] = ()
    uninstall: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    reset: tuple[str, ...] = ()

    @classmethod
    def read(cls, modifiers: Any) -> "Packages":
        return cls(
            install=tuple(option(modifiers, "install-packages", "as") or ()),
            uninstall=tuple(option(modifiers, "uninstall-packages", "as") or ()),
            remove=tuple(option(modifiers, "override-remove-packages", "as") or ()),
            reset=tuple(option(modifiers, "override-reset-packages", "as") or ()),
        )

    def on(self, base: Deployment, deployment: Deployment, *, idempotent: bool) -> Deployment:
        """``deployment`` with the packages of ``base``, changed so."""
        return with_packages(
            deployment,
            _changed(base.packages, self.install, self.uninstall, idempotent=idempotent),
            _changed(base.removals, self.remove, self.reset, idempotent=idempotent),
        )


@dataclass(frozen=True, slots=True)
class Options:
    """The options that several methods share, read as GVariantDict reads them."""

    reboot: bool
    lock: bool
    command_line: str
    revision: str
    idempotent: bool
    no_pull_base: bool
    custom_origin: tuple[str, str] | None

    @classmethod
    def read(cls, dictionary: Any) -> "Options":
        """Unknown keys and values of another type count as absent."""
        return cls(
            reboot=bool(option(dictionary, "reboot", "b")),
            lock=bool(option(dictionary, "lock-finalization", "b")),
            command_line=option(dictionary, "initiating-command-line", "s") or "",
            revision=option(dictionary, "revision", "s") or "",
            idempotent=bool(option(dictionary, "idempotent-layering", "b")),
            no_pull_base=bool(option(dictionary, "no-pull-base", "b")),
            custom_origin=option(dictionary, "custom-origin", "(ss)"),
        )


def rebase(host: Host, refspec: str, options: Options, packages: Packages = Packages()) -> Work:
    """Pull the image and stage it."""
    if options.no_pull_base:
        raise OperationFailed("Can't specify no-pull-base if setting a new refspec or revision")
    wanted = pull.canonical(refspec)
    base = _base(host)
    if wanted == base.refspec:
        raise OperationFailed(f"Old and new refs are equal: {wanted}")
    yield from _deploy(host, base, wanted, options, packages)


def upgrade(host: Host, options: Options) -> Work:
    """Look for something newer under the same name; a digest never has anything newer."""
    base = _base(host)
    image = pull.image_of(base.refspec)
    yield message(f"Pulling manifest: {base.refspec}")
    if "@" not in image:
        raise OperationFailed(f"reading manifest latest in {image}: manifest unknown")
    yield message("No upgrade available.")
    _reboot_if(host, wanted=options.reboot and host.sysroot.staged() is not None)


def deploy(host: Host, revision: str, options: Options) -> Work:
    """Pull another digest of the repository that the machine follows."""
    base = _base(host)
    if not revision.startswith("sha256:"):
        raise OperationFailed(f"Invalid container image digest: {revision}")
    yield from _deploy(host, base, _at_digest(base.refspec, revision), options)


def change_packages(host: Host, packages: Packages, options: Options) -> Work:
    """Stage the base deployment again with other packages."""
    base = _base(host)
    wanted = packages.on(base, base, idempotent=options.idempotent)
    if wanted == base:
        yield message("No change.")
        return
    _find(host, wanted)
    yield message("Resolving dependencies...done")
    yield from _stage(host, replace(wanted, pinned=False), options)


def change_kernel_arguments(host: Host, arguments: KernelArguments, options: Options) -> Work:
    """Stage the base deployment again with other kernel arguments."""
    base = _base(host)
    changed = replace(base, kernel_arguments=arguments.values(), pinned=False)
    yield from _stage(host, changed, options)


def rollback(host: Host, options: Options) -> Work:
    """Boot the previous deployment next time; while something is staged, the booted one."""
    sysroot = host.sysroot
    if sysroot.drop_staged():
        yield message("Dropped the staged deployment")
    else:
        first, *others = sysroot.written()
        if not others:
            raise OperationFailed("No rollback deployment found")
        yield message(f"Moving '{others[0].checksum}.{others[0].serial}' to be first deployment")
        sysroot.write((others[0], first, *others[1:]))
    _reboot_if(host, wanted=options.reboot)


def cleanup(host: Host, elements: list[str]) -> Work:
    """Drop pending and rollback deployments, and what nobody needs any more."""
    sysroot = host.sysroot
    changed = False
    booted = sysroot.booted()
    for element in elements:
        if element == "pending-deploy":
            changed |= sysroot.drop_staged()
            kept = sysroot.written()
            while kept and kept[0] != booted and not kept[0].pinned:
                kept, changed = kept[1:], True
            sysroot.write(kept)
        elif element == "rollback-deploy":
            old = sysroot.written()
            kept = tuple(d for i, d in enumerate(old) if i == 0 or d == booted or d.pinned)
            changed |= kept != old
            sysroot.write(kept)
        elif element not in ("base", "repomd"):
            raise OperationFailed(f"Invalid cleanup type: {element}")
    if not changed:
        yield message("Deployments unchanged.")
    freed = sysroot.prune_layers()
    if freed:
        yield message(f"Pruned container image layers: {freed}")


def refresh_metadata(host: Host) -> Work:
    """Fetch package metadata: something that takes its time and changes no deployment."""
    yield task_begin("Updating metadata for 'lab'")
    spent_s = 0.0
    # In slices, so that a change of the time counts for the transaction that runs.
    while (left_s := host.settings().refresh_md_s - spent_s) > 0:
        slice_s = min(left_s, 0.05)
        yield Pause(slice_s)
        spent_s += slice_s
    yield task_end()


def finalize(host: Host, dictionary: Any) -> Work:
    """Unlock the staged deployment and reboot into it."""
    checksum = option(dictionary, "checksum", "s")
    staged = host.sysroot.staged()
    refuse_blocked(host)
    if staged is None:
        raise OperationFailed("No pending staged deployment found")
    if checksum is None and not option(dictionary, "allow-missing-checksum", "b"):
        raise OperationFailed("Missing expected checksum")
    # Of a container deployment only the manifest digest is known to whoever asked for it.
    commit = staged.base or staged.checksum
    known_as = commit if host.settings().finalizes_by_commit else staged.digest
    if checksum is not None and checksum != known_as:
        raise OperationFailed(f"Expected staged base checksum {checksum}, but found {known_as}")
    if not host.sysroot.unlock() and not option(dictionary, "allow-unlocked", "b"):
        raise OperationFailed("Staged deployment already unlocked")
    yield message(f"Finalized deployment; rebooting into {staged.checksum}")
    host.reboot()


def refuse_blocked(host: Host) -> None:
    """Raise if somebody holds a block inhibitor for shutdown."""
    blockers = host.blockers()
    if not blockers:
        return
    who, why = blockers[0]
    text = (
        f"Reboot blocked by a systemd inhibitor lock in `block` mode\nHeld by: {who}\nReason: {why}"
    )
    if len(blockers) > 1:
        text += f"\nand {len(blockers) - 1} other blocking inhibitor lock(s)"
    raise OperationFailed(text)


def _changed(
    names: tuple[str, ...],
    more: tuple[str, ...],
    fewer: tuple[str, ...],
    *,
    idempotent: bool,
) -> tuple[str, ...]:
    for name in () if idempotent else more:
        if name in names:
            raise OperationFailed(f"Package/capability '{name}' is already requested")
    for name in () if idempotent else fewer:
        if name not in names:
            raise OperationFailed(f"Package/capability '{name}' is not currently requested")
    kept = tuple(name for name in names if name not in fewer)
    return kept + tuple(name for name in more if name not in kept)


def _deploy(
    host: Host,
    base: Deployment,
    refspec: str,
    options: Options,
    packages: Packages = Packages(),
) -> Generator[Emit | Pause, None, None]:
    if options.reboot:
        refuse_blocked(host)
    pulled = _at_digest(refspec, options.revision) if options.revision else refspec
    found = yield from host.fetch(pulled, refspec, base.kernel_arguments)
    deployment = packages.on(base, found.deployment, idempotent=options.idempotent)
    _find(host, deployment)
    if "@sha256:" in refspec:
        deployment = replace(deployment, custom_origin=options.custom_origin)
    yield from _stage(host, deployment, options, fault=found.fault)


def _find(host: Host, deployment: Deployment) -> None:
    """Raise unless some repository has each of the packages that are to be layered."""
    missing = [name for name in deployment.packages if name in host.settings().missing_packages]
    if missing := [name for name in missing if name not in host.packages()]:
        raise OperationFailed(f"Packages not found: {', '.join(missing)}")


def _stage(
    host: Host, deployment: Deployment, options: Options, *, fault: str = ""
) -> Generator[Emit | Pause, None, None]:
    short = deployment.checksum[:7]
    yield task_begin(f"Checking out tree {short}")
    yield task_end()
    text = "Staging deployment"
    yield percent(text, 0)
    settings = host.settings()
    yield Pause(settings.staging_s)
    failure = settings.staging_error or fault
    if failure:
        raise OperationFailed(failure)
    serial = host.sysroot.next_serial(deployment.checksum)
    yield from host.sysroot.staging(replace(deployment, serial=serial), locked=options.lock)
    freed = host.sysroot.prune_layers()
    yield percent(text, 100)
    yield progress_end()
    if freed:
        yield message(f"Pruned container image layers: {freed}")
    yield message('Changes queued for next boot. Run "systemctl reboot" to start a reboot')
    _reboot_if(host, wanted=options.reboot)


def _reboot_if(host: Host, *, wanted: bool) -> None:
    if wanted:
        host.reboot()


def _base(host: Host) -> Deployment:
    base = host.sysroot.base()
    if base is None:
        raise OperationFailed("No deployments found")
    return base


def _at_digest(refspec: str, digest: str) -> str:
    name = refspec.partition("@")[0]
    slash = name.rfind("/")
    colon = name.find(":", slash)
    return f"{name if colon < 0 else name[:colon]}@{digest}"


def boot_config(deployment: Deployment) -> dict[str, str]:
    """The boot loader entry of a deployment."""
    kernel = f"/ostree/{deployment.osname}-{deployment.checksum}"
    return {
        "title": f"Lab OS {deployment.version} (ostree:0)",
        "version": "1",
        "options": boot_options(deployment),
        "linux": f"{kernel}/vmlinuz",
        "initrd": f"{kernel}/initramfs.img",
    }
