"""The change of the operating system that a config requires, and whether it is booted."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from treenail import codec, errors
from treenail.api import machineconfig, pullspec
from treenail.config import diff, wanted_state
from treenail.update.impact import os_packages

KERNEL_KEEPING_ASPECTS = frozenset({diff.OSAspect.IMAGE, diff.OSAspect.EXTENSIONS})
"""The aspects that can change without another kernel."""


@dataclass(frozen=True, slots=True)
class OSChange:
    """The changes to deploy together; empty fields change nothing."""

    image: str = ""
    """The pull spec of the image to boot, by digest."""
    append: tuple[str, ...] = ()
    """Kernel arguments to append, in order, after ``delete`` is applied."""
    delete: tuple[str, ...] = ()
    install: tuple[str, ...] = ()
    """Packages to layer on the image."""
    uninstall: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    """Packages of the image to remove by an override."""
    reset: tuple[str, ...] = ()
    """Packages of the image whose override to reset."""
    packages_from: str = field(default="", metadata=codec.key("packagesFrom"))
    """The pull spec of the image with the packages, by digest; never set alone."""

    @property
    def digest(self) -> str:
        """The manifest digest of the image; empty without one."""
        return self.image.partition("@")[2]

    @property
    def packages(self) -> frozenset[str]:
        """All packages that change."""
        return frozenset((*self.install, *self.uninstall, *self.remove, *self.reset))

    @property
    def is_empty(self) -> bool:
        """Nothing changes."""
        return self == NO_OS_CHANGE

    @property
    def can_keep_kernel(self) -> bool:
        """The change may keep the running kernel; only the deployment shows whether it does."""
        return set(self.aspects) <= KERNEL_KEEPING_ASPECTS and not self.is_empty

    @property
    def aspects(self) -> tuple[diff.OSAspect, ...]:
        """The fields of a MachineConfig that require the change."""
        kernels = frozenset[str]().union(*machineconfig.KERNEL_PACKAGES.values())
        packages = {*self.install, *self.uninstall}
        changes = (
            (diff.OSAspect.IMAGE, self.image),
            (diff.OSAspect.KERNEL_ARGUMENTS, self.append or self.delete),
            (diff.OSAspect.KERNEL_TYPE, self.remove or self.reset or packages & kernels),
            (diff.OSAspect.EXTENSIONS, packages - kernels),
        )
        return tuple(aspect for aspect, change in changes if change)


NO_OS_CHANGE = OSChange()


@dataclass(frozen=True, slots=True)
class RunningOS:
    """The booted operating system."""

    digest: str
    """The manifest digest of the image; empty if it has none."""
    kernel_arguments: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    """The packages that are layered on the image."""
    removed_packages: tuple[str, ...] = ()
    """The packages of the image that are removed by an override."""
    list_digest: str = ""
    """The digest of the manifest list that named the image; empty without one."""

    def has_image(self, digest: str) -> bool:
        """Return whether the image has this digest of a manifest or manifest list."""
        return digest != "" and digest in {self.digest, self.list_digest}


def compute_os_change(
    old: wanted_state.WantedOS, new: wanted_state.WantedOS, running: RunningOS, *, image: str
) -> OSChange:
    """Return the change from the old to the new OS; empty if the new one is booted.

    ``image`` is requested beside the config and contains its packages and its kernel. Raises
    `ConfigError` when the config does not name its image by digest.
    """
    append, delete = _compute_arguments(
        old.kernel_arguments, new.kernel_arguments, running.kernel_arguments
    )
    before, after = (
        os_packages.list_packages(old),
        frozenset[str]() if image else os_packages.list_packages(new),
    )
    removed = frozenset[str]() if image else _list_removed_packages(new)
    new_image = _select_image(image or new.image, running)
    install = after - set(running.packages)
    if not new_image:
        # An earlier release layered the extension without them: they come with the next image.
        install -= before & os_packages.LATER_PACKAGES
    change = OSChange(
        image=new_image,
        append=append,
        delete=delete,
        install=_sort_names(install),
        uninstall=_sort_names((before - after) & set(running.packages)),
        remove=_sort_names(removed - set(running.removed_packages)),
        reset=_sort_names((_list_removed_packages(old) - removed) & set(running.removed_packages)),
    )
    if not after or not new.extensions_image or not (change.image or change.packages):
        return change
    # rpm-ostree resolves all layered packages again in each transaction, and needs their source.
    pullspec.parse_pull_spec(new.extensions_image, where="baseOSExtensionsContainerImage")
    return replace(change, packages_from=new.extensions_image)


def check_kernel_type(os: wanted_state.WantedOS, architecture: str) -> None:
    """Raise `UnreconcilableError` for a kernel type that the architecture, by OCI name, lacks."""
    allowed = machineconfig.KERNEL_ARCHITECTURES.get(os.kernel_type, architecture)
    if architecture != allowed:
        raise errors.UnreconcilableError(
            f"cannot use kernelType {os.kernel_type}: it exists for {allowed} only, and this "
            f"machine is {architecture}",
            remedy="use kernelType default in the MachineConfigs of this pool, or move the node to "
            "a pool without it",
        )


def is_in_effect(change: OSChange, running: RunningOS) -> bool:
    """Return whether the change is booted."""
    return (
        (not change.image or running.has_image(change.digest))
        and _has_arguments(change.append, change.delete, running.kernel_arguments)
        and set(change.install) <= set(running.packages)
        and not set(change.uninstall) & set(running.packages)
        and set(change.remove) <= set(running.removed_packages)
        and not set(change.reset) & set(running.removed_packages)
    )


def _select_image(image: str, running: RunningOS) -> str:
    if not image or running.has_image(image.partition("@")[2]):
        return ""
    pullspec.parse_pull_spec(image, where="osImageURL")
    return image


def _compute_arguments(
    old: Sequence[str], new: Sequence[str], booted: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the arguments to append, and those to delete first; order and repetition matter."""
    if _has_arguments(new, old, booted):
        return (), ()
    rest = tuple(new[len(old) :])
    is_longer = tuple(new[: len(old)]) == tuple(old) and _has_arguments(old, (), booted)
    if is_longer and not set(rest) & set(booted):
        return rest, ()
    # rpm-ostree appends kernel arguments only at the end: another order or number of them needs
    # them deleted and appended again. The last console= is the primary one, for example.
    delete = dict.fromkeys(argument for argument in (*old, *new) if argument in booted)
    return tuple(new), tuple(delete)


def _has_arguments(append: Sequence[str], delete: Sequence[str], booted: Sequence[str]) -> bool:
    if any(argument in booted for argument in delete if argument not in append):
        return False
    appended = [argument for argument in booted if argument in append]
    return not append or appended[-len(append) :] == list(append)


def _list_removed_packages(os: wanted_state.WantedOS) -> frozenset[str]:
    return (
        frozenset()
        if os.kernel_type == machineconfig.DEFAULT_KERNEL
        else machineconfig.STOCK_KERNEL_PACKAGES
    )


def _sort_names(names: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(names))
