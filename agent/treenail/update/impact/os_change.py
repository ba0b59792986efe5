"""What a config asks of the operating system, and whether what is booted already has it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from treenail.api import pullspec
from treenail.api.machineconfig import DEFAULT_KERNEL, EXTENSIONS
from treenail.codec import key
from treenail.config.diff import OSAspect
from treenail.config.wanted import WantedOS

_STOCK_KERNEL = frozenset(
    {"kernel", "kernel-core", "kernel-modules", "kernel-modules-core", "kernel-modules-extra"}
)
_KERNEL_PACKAGES: dict[str, frozenset[str]] = {
    "realtime": frozenset({"kernel-rt-core", "kernel-rt-modules", "kernel-rt-modules-extra"}),
    "64k-pages": frozenset(
        {
            "kernel-64k-core",
            "kernel-64k-modules",
            "kernel-64k-modules-core",
            "kernel-64k-modules-extra",
        }
    ),
}
"""The packages that take the stock kernel's place, by kernelType."""
_LATER_PACKAGES = frozenset({"openvswitch3.5-ipsec"})
"""Those that an extension had none of in earlier releases."""


KERNEL_KEEPING_ASPECTS = frozenset({OSAspect.IMAGE, OSAspect.EXTENSIONS})
"""What can change while the kernel stays."""


@dataclass(frozen=True, slots=True)
class OSChange:
    """What is asked of the operating system in one go; empty fields keep what is there."""

    image: str = ""
    """The pull spec of the image to boot, by digest."""
    append: tuple[str, ...] = ()
    """Kernel arguments, in order, once ``delete`` is gone."""
    delete: tuple[str, ...] = ()
    install: tuple[str, ...] = ()
    """Packages to layer on the image."""
    uninstall: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    """Packages of the image to leave out."""
    reset: tuple[str, ...] = ()
    """Packages of the image to leave out no longer."""
    packages_from: str = field(default="", metadata=key("packagesFrom"))
    """The pull spec of an image with packages, by digest; asked for beside something else only."""

    @property
    def digest(self) -> str:
        """The manifest digest of the image; empty without one."""
        return self.image.partition("@")[2]

    @property
    def packages(self) -> frozenset[str]:
        """Those that are concerned."""
        return frozenset((*self.install, *self.uninstall, *self.remove, *self.reset))

    @property
    def is_empty(self) -> bool:
        """Nothing is asked."""
        return self == NO_OS_CHANGE

    @property
    def can_keep_kernel(self) -> bool:
        """Whether it asks for nothing that a kernel which runs can't be given.

        An image may well have another kernel; whether it has, only its deployment shows.
        """
        return set(self.aspects) <= KERNEL_KEEPING_ASPECTS and not self.is_empty

    @property
    def aspects(self) -> tuple[OSAspect, ...]:
        """What of a config asks for it."""
        kernels = frozenset[str]().union(*_KERNEL_PACKAGES.values())
        packages = {*self.install, *self.uninstall}
        asked = (
            (OSAspect.IMAGE, self.image),
            (OSAspect.KERNEL_ARGUMENTS, self.append or self.delete),
            (OSAspect.KERNEL_TYPE, self.remove or self.reset or packages & kernels),
            (OSAspect.EXTENSIONS, packages - kernels),
        )
        return tuple(aspect for aspect, found in asked if found)


NO_OS_CHANGE = OSChange()


@dataclass(frozen=True, slots=True)
class RunningOS:
    """The operating system that is booted."""

    digest: str
    """Of the image's manifest; empty when it has none."""
    kernel_arguments: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    """Those that were asked for beside the image."""
    removed_packages: tuple[str, ...] = ()
    """Those of the image that were asked to be left out."""


def compute_os_change(old: WantedOS, new: WantedOS, running: RunningOS, *, image: str) -> OSChange:
    """What brings the machine from the one to the other; empty when all of it is booted.

    ``image`` is the one asked for beside the config: it has its packages in it, and its kernel.
    Raises `ConfigError` when the config names an image other than by its digest.
    """
    append, delete = _compute_arguments(
        old.kernel_arguments, new.kernel_arguments, running.kernel_arguments
    )
    before, after = list_packages(old), frozenset[str]() if image else list_packages(new)
    left_out = frozenset[str]() if image else _list_removed_packages(new)
    booting = _select_image(image or new.image, running)
    install = after - set(running.packages)
    if not booting:
        # An extension that was layered without them is complete until the next image.
        install -= before & _LATER_PACKAGES
    change = OSChange(
        image=booting,
        append=append,
        delete=delete,
        install=_sort_names(install),
        uninstall=_sort_names((before - after) & set(running.packages)),
        remove=_sort_names(left_out - set(running.removed_packages)),
        reset=_sort_names((_list_removed_packages(old) - left_out) & set(running.removed_packages)),
    )
    if not after or not new.extensions_image or not (change.image or change.packages):
        return change
    # Those that are layered already are looked for again, as newer ones may go with the rest.
    pullspec.parse_pull_spec(new.extensions_image, where="baseOSExtensionsContainerImage")
    return replace(change, packages_from=new.extensions_image)


def is_in_effect(change: OSChange, running: RunningOS) -> bool:
    """Whether what was asked for is booted."""
    return (
        (not change.image or change.digest == running.digest)
        and _has_arguments(change.append, change.delete, running.kernel_arguments)
        and set(change.install) <= set(running.packages)
        and not set(change.uninstall) & set(running.packages)
        and set(change.remove) <= set(running.removed_packages)
        and not set(change.reset) & set(running.removed_packages)
    )


def _select_image(image: str, running: RunningOS) -> str:
    if not image or image.partition("@")[2] == running.digest != "":
        return ""
    pullspec.parse_pull_spec(image, where="osImageURL")
    return image


def _compute_arguments(
    old: Sequence[str], new: Sequence[str], booted: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What to append and what to delete first; order and repetitions mean something."""
    delete: tuple[str, ...] = ()
    if tuple(new[: len(old)]) == tuple(old):
        missing = list(new)
        for argument in booted:
            if argument in missing:
                missing.remove(argument)
        append = tuple(missing)
    else:
        append = tuple(new)
        delete = tuple(dict.fromkeys(argument for argument in old if argument in booted))
    return ((), ()) if _has_arguments(append, delete, booted) else (append, delete)


def _has_arguments(append: Sequence[str], delete: Sequence[str], booted: Sequence[str]) -> bool:
    if any(argument in booted for argument in delete if argument not in append):
        return False
    concerned = [argument for argument in booted if argument in append]
    return not append or concerned[-len(append) :] == list(append)


def list_packages(os: WantedOS) -> frozenset[str]:
    """Those that a config has layered on the image."""
    extensions = (package for name in os.extensions for package in EXTENSIONS[name])
    return frozenset(extensions) | _KERNEL_PACKAGES.get(os.kernel_type, frozenset())


def list_required_packages(os: WantedOS) -> frozenset[str]:
    """Those of `list_packages` without which a config's extensions are not there."""
    return list_packages(os) - _LATER_PACKAGES


def _list_removed_packages(os: WantedOS) -> frozenset[str]:
    return frozenset() if os.kernel_type == DEFAULT_KERNEL else _STOCK_KERNEL


def _sort_names(names: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(names))
