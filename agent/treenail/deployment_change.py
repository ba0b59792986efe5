"""The change of the operating system that one deployment brings."""

from dataclasses import dataclass
from typing import Annotated

from treenail.encoding import codec


@dataclass(frozen=True, slots=True)
class DeploymentChange:
    """A change of image, kernel arguments and packages, to deploy together.

    Empty fields change nothing. The ledger has it, so its keys never change.
    """

    image: str = ""
    """The pull spec of the image to boot, by digest."""
    append_kargs: Annotated[tuple[str, ...], codec.Key("append")] = ()
    """Kernel arguments to append, in order, after removing ``delete_kargs``."""
    delete_kargs: Annotated[tuple[str, ...], codec.Key("delete")] = ()
    install_packages: Annotated[tuple[str, ...], codec.Key("install")] = ()
    """Packages to layer on the image."""
    uninstall_packages: Annotated[tuple[str, ...], codec.Key("uninstall")] = ()
    override_remove: Annotated[tuple[str, ...], codec.Key("remove")] = ()
    """Packages of the image to leave out."""
    override_reset: Annotated[tuple[str, ...], codec.Key("reset")] = ()
    """Packages of the image to include again."""
    extensions_image: Annotated[str, codec.Key("packagesFrom")] = ""
    """The pull spec, by digest, of an image with further packages; never set alone."""

    @property
    def digest(self) -> str:
        """The manifest digest of the image; empty without one."""
        return self.image.partition("@")[2]

    @property
    def packages(self) -> frozenset[str]:
        """All packages that change."""
        return frozenset(
            (
                *self.install_packages,
                *self.uninstall_packages,
                *self.override_remove,
                *self.override_reset,
            )
        )

    @property
    def is_empty(self) -> bool:
        """Nothing changes."""
        return self == NO_CHANGE

    def __str__(self) -> str:
        named = (
            (self.image, self.image),
            (self.packages, "packages"),
            (self.append_kargs or self.delete_kargs, "kernel arguments"),
        )
        return " and ".join(name for value, name in named if value) or "nothing"


NO_CHANGE = DeploymentChange()
