"""MachineConfig. Its Ignition config keeps the original JSON."""

from dataclasses import dataclass, field

from treenail.api import decode, object_meta
from treenail.errors import ConfigError

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
class MachineConfig:
    """One MachineConfig, written by a user or rendered from several.

    ``config`` is the original Ignition config or None; `ignition.parse_ignition` reads it. Unknown
    fields are kept and written back.
    """

    metadata: object_meta.ObjectMeta = field(default_factory=object_meta.ObjectMeta)
    config: decode.Json | None = field(default=None, repr=False)
    os_image_url: str = ""
    extensions_image: str = ""
    kernel_arguments: tuple[str, ...] = ()
    kernel_type: str = ""
    extensions: tuple[str, ...] = ()
    fips: bool = False
    others: decode.Json = field(default_factory=dict, repr=False)
    spec_others: decode.Json = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return self.metadata.name

    @classmethod
    def from_json(cls, document: object) -> "MachineConfig":
        """Read an API object or a file; raise `ConfigError`."""
        fields = decode.Fields.from_json(document, "")
        kind = fields.get_text("kind")
        if kind not in ("", KIND):
            raise ConfigError(f"kind: expected {KIND}, found {kind!r:.60}")
        spec = fields.get_object("spec")
        return cls(
            metadata=object_meta.ObjectMeta.from_fields(fields.get_object("metadata")),
            config=None if spec.values.get("config") is None else spec.get_object("config").values,
            os_image_url=spec.get_text("osImageURL"),
            extensions_image=spec.get_text("baseOSExtensionsContainerImage"),
            kernel_arguments=spec.get_text_list("kernelArguments"),
            kernel_type=spec.get_text("kernelType"),
            extensions=spec.get_text_list("extensions"),
            fips=spec.get_bool("fips"),
            others=fields.get_other_fields("apiVersion", "kind", "metadata", "spec"),
            spec_others=spec.get_other_fields(
                "config", "osImageURL", "baseOSExtensionsContainerImage", "kernelArguments",
                "kernelType", "extensions", "fips",
            ),
        )  # fmt: skip

    def to_json(self) -> decode.Json:
        """Convert to an API object with all fields of the spec, as Go does."""
        config: decode.Json = {} if self.config is None else {"config": self.config}
        return {
            **self.others,
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": self.metadata.to_json(),
            "spec": {
                **self.spec_others,
                **config,
                "osImageURL": self.os_image_url,
                "baseOSExtensionsContainerImage": self.extensions_image,
                "kernelArguments": list(self.kernel_arguments),
                "kernelType": self.kernel_type,
                "extensions": list(self.extensions),
                "fips": self.fips,
            },
        }
