"""The packages that a config layers on the image of the operating system."""

from collections.abc import Collection

from treenail.api import machineconfig
from treenail.config.wanted_state import WantedOS

LATER_PACKAGES = frozenset({"openvswitch3.5-ipsec"})
"""Packages that earlier releases of an extension did not have."""


def list_packages(os: WantedOS) -> frozenset[str]:
    """Return the packages that a config layers on the image."""
    extensions = (package for name in os.extensions for package in machineconfig.EXTENSIONS[name])
    return frozenset(extensions) | machineconfig.KERNEL_PACKAGES.get(os.kernel_type, frozenset())


def list_unsupported_packages(layered: Collection[str]) -> tuple[str, ...]:
    """Return the layered packages that belong to no extension and no kernel type."""
    known = frozenset(
        package for packages in machineconfig.EXTENSIONS.values() for package in packages
    )
    return tuple(sorted(frozenset(layered) - known.union(*machineconfig.KERNEL_PACKAGES.values())))


def list_required_packages(os: WantedOS) -> frozenset[str]:
    """Return the packages that the extensions of a config need in every release."""
    return list_packages(os) - LATER_PACKAGES
