"""What a config asks of the operating system, and whether what is booted already has it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from treenail.api import pullspec
from treenail.api.machineconfig import DEFAULT_KERNEL, EXTENSIONS
from treenail.config.diff import Aspect
from treenail.config.wanted import WantedOS

_STOCK_KERNEL = frozenset(
    {"kernel", "kernel-core", "kernel-modules", "kernel-modules-core", "kernel-modules-extra"}
)
_KERNELS: dict[str, frozenset[str]] = {
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
_LATER = frozenset({"openvswitch3.5-ipsec"})
"""Those that an extension had none of in earlier releases."""


BESIDE_KERNEL = frozenset({Aspect.IMAGE, Aspect.EXTENSIONS})
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
    packages_from: str = ""
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
    def empty(self) -> bool:
        """Nothing is asked."""
        return self == NO_CHANGE

    @property
    def keeps_kernel(self) -> bool:
        """Whether it asks for nothing that a kernel which runs can't be given.

        An image may well have another kernel; whether it has, only its deployment shows.
        """
        return set(self.aspects) <= BESIDE_KERNEL and not self.empty

    @property
    def aspects(self) -> tuple[Aspect, ...]:
        """What of a config asks for it."""
        kernels = frozenset[str]().union(*_KERNELS.values())
        packages = {*self.install, *self.uninstall}
        asked = (
            (Aspect.IMAGE, self.image),
            (Aspect.KERNEL_ARGUMENTS, self.append or self.delete),
            (Aspect.KERNEL_TYPE, self.remove or self.reset or packages & kernels),
            (Aspect.EXTENSIONS, packages - kernels),
        )
        return tuple(aspect for aspect, found in asked if found)


NO_CHANGE = OSChange()


@dataclass(frozen=True, slots=True)
class Running:
    """The operating system that is booted."""

    digest: str
    """Of the image's manifest; empty when it has none."""
    arguments: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    """Those that were asked for beside the image."""
    removed: tuple[str, ...] = ()
    """Those of the image that were asked to be left out."""


def os_change(old: WantedOS, new: WantedOS, running: Running, *, image: str) -> OSChange:
    """What brings the machine from the one to the other; empty when all of it is booted.

    ``image`` is the one asked for beside the config: it has its packages in it, and its kernel.
    Raises `ConfigError` when the config names an image other than by its digest.
    """
    append, delete = _arguments(old.kernel_arguments, new.kernel_arguments, running.arguments)
    before, after = packages(old), frozenset[str]() if image else packages(new)
    left_out = frozenset[str]() if image else _left_out(new)
    booting = _image(image or new.image, running)
    install = after - set(running.packages)
    if not booting:
        # An extension that was layered without them is complete until the next image.
        install -= before & _LATER
    change = OSChange(
        image=booting,
        append=append,
        delete=delete,
        install=_sorted(install),
        uninstall=_sorted((before - after) & set(running.packages)),
        remove=_sorted(left_out - set(running.removed)),
        reset=_sorted((_left_out(old) - left_out) & set(running.removed)),
    )
    if not after or not new.extensions_image or not (change.image or change.packages):
        return change
    # Those that are layered already are looked for again, as newer ones may go with the rest.
    pullspec.parse(new.extensions_image, where="baseOSExtensionsContainerImage")
    return replace(change, packages_from=new.extensions_image)


def in_effect(change: OSChange, running: Running) -> bool:
    """Whether what was asked for is booted."""
    return (
        (not change.image or change.digest == running.digest)
        and _arguments_stand(change.append, change.delete, running.arguments)
        and set(change.install) <= set(running.packages)
        and not set(change.uninstall) & set(running.packages)
        and set(change.remove) <= set(running.removed)
        and not set(change.reset) & set(running.removed)
    )


def _image(image: str, running: Running) -> str:
    if not image or image.partition("@")[2] == running.digest != "":
        return ""
    pullspec.parse(image, where="osImageURL")
    return image


def _arguments(
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
    return ((), ()) if _arguments_stand(append, delete, booted) else (append, delete)


def _arguments_stand(append: Sequence[str], delete: Sequence[str], booted: Sequence[str]) -> bool:
    if any(argument in booted for argument in delete if argument not in append):
        return False
    concerned = [argument for argument in booted if argument in append]
    return not append or concerned[-len(append) :] == list(append)


def packages(os: WantedOS) -> frozenset[str]:
    """Those that a config has layered on the image."""
    extensions = (package for name in os.extensions for package in EXTENSIONS[name])
    return frozenset(extensions) | _KERNELS.get(os.kernel_type, frozenset())


def required(os: WantedOS) -> frozenset[str]:
    """Those of `packages` without which a config's extensions are not there."""
    return packages(os) - _LATER


def _left_out(os: WantedOS) -> frozenset[str]:
    return frozenset() if os.kernel_type == DEFAULT_KERNEL else _STOCK_KERNEL


def _sorted(names: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(names))
