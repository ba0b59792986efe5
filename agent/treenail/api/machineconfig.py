"""MachineConfig. Its Ignition config keeps the original JSON."""

from dataclasses import dataclass, field
from typing import Annotated

from treenail.api import object_meta
from treenail.encoding import codec

API_VERSION = "machineconfiguration.openshift.io/v1"
KIND = "MachineConfig"

DEFAULT_KERNEL = "default"
KERNEL_TYPES = (DEFAULT_KERNEL, "realtime", "64k-pages")

EXTENSIONS: dict[str, tuple[str, ...]] = {
    "ipsec": ("NetworkManager-libreswan", "libreswan", "openvswitch3.5-ipsec"),
    "kerberos": ("krb5-workstation", "libkadm5"),
    "kernel-devel": ("kernel-devel", "kernel-headers"),
    "sandboxed-containers": ("kata-containers",),
    "sysstat": ("sysstat",),
    "two-node-ha": ("pacemaker", "pcs", "fence-agents-all"),
    "usbguard": ("usbguard",),
}
"""Packages of each extension."""

# Another kernel replaces these packages of the base image, as in the Machine Config Daemon.
STOCK_KERNEL_PACKAGES = frozenset(
    {"kernel", "kernel-core", "kernel-modules", "kernel-modules-core", "kernel-modules-extra"}
)
KERNEL_PACKAGES: dict[str, frozenset[str]] = {
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
"""The packages that replace the stock kernel, by kernelType."""
KERNEL_ARCHITECTURES = {"64k-pages": "arm64"}
"""Kernel types that exist for one architecture only, by OCI name."""


@dataclass(frozen=True, slots=True)
class MachineConfig(codec.JsonObject, kind=KIND, api_version=API_VERSION):
    """One MachineConfig, written by a user or rendered from several.

    ``config`` is the original Ignition config or None; `parser.parse_ignition` reads it. Unknown
    fields are kept and written back.
    """

    metadata: object_meta.ObjectMeta = field(default_factory=object_meta.ObjectMeta)
    config: Annotated[codec.Json | None, codec.Key("spec.config")] = field(default=None, repr=False)
    os_image_url: Annotated[str, codec.Key("spec.osImageURL")] = ""
    extensions_image: Annotated[str, codec.Key("spec.baseOSExtensionsContainerImage")] = ""
    kernel_arguments: Annotated[tuple[str, ...], codec.Key("spec.kernelArguments")] = ()
    kernel_type: Annotated[str, codec.Key("spec.kernelType")] = ""
    extensions: Annotated[tuple[str, ...], codec.Key("spec.extensions")] = ()
    fips: Annotated[bool, codec.Key("spec.fips")] = False
    others: Annotated[codec.Json, codec.REST] = field(default_factory=dict, repr=False)
    spec_others: Annotated[codec.Json, codec.Key("spec", part="rest")] = field(
        default_factory=dict, repr=False
    )

    @property
    def name(self) -> str:
        return self.metadata.name
