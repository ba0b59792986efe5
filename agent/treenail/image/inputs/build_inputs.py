"""Inputs of the system part of an image build: everything that its content depends on."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from treenail.api import annotations as key
from treenail.api.ignition import parse_ignition
from treenail.api.machineconfig import DEFAULT_KERNEL, MachineConfig
from treenail.api.machineosconfig import ContainerfileArch, MachineOSConfig
from treenail.image.containerfile import parse_containerfile

BUILDER_CONTRACT = 1
"""Number of the composed text and of the builder's options. A change builds every image again."""

ARCHITECTURES: dict[str, ContainerfileArch] = {
    "amd64": ContainerfileArch.AMD64,
    "arm64": ContainerfileArch.ARM64,
    "ppc64le": ContainerfileArch.PPC64LE,
    "s390x": ContainerfileArch.S390X,
}
"""Architectures of nodes and images, and their names in a MachineOSConfig."""


DEFAULT_DRIVER = "overlay"
"""Storage driver of buildah in Jobs."""


def list_builder_options(
    *, driver: str = DEFAULT_DRIVER, has_cache: bool = False
) -> tuple[str, ...]:
    """Return the options of a builder that change the image; empty for the usual ones.

    With a cache each instruction is a layer. Storage drivers find other changes of a directory
    that an instruction replaced.
    """
    found = ["layers"] if has_cache else []
    return (*found, *([f"driver={driver}"] if driver != DEFAULT_DRIVER else []))


_READ_BY_PROGRAMS = ("/etc/yum.repos.d/", "/etc/pki/", "/etc/containers/")
_MAX_NAMED = 3


def find_build_paths(rendered: MachineConfig) -> tuple[str, ...]:
    """Return the files of a config that package managers and registry clients read.

    A Containerfile that installs packages often needs them. Raises `ConfigError`.
    """
    files = parse_ignition(rendered.config, location=f"config of {rendered.name}").files
    return tuple(sorted(each.path for each in files if each.path.startswith(_READ_BY_PROGRAMS)))


def describe_hidden_files(config: MachineOSConfig, paths: Sequence[str]) -> str:
    """Return a remedy for an instruction that failed without these files of the config.

    Empty if the Containerfile sees the config, or if there are none.
    """
    if config.sees_config or not paths:
        return ""
    named = ", ".join(path[:100] for path in paths[:_MAX_NAMED])
    more = f" and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else ""
    return (
        f"if it needs {named}{more} of the config, run: kubectl annotate machineosconfig "
        f"{config.name} {key.BUILD_SEES_CONFIG}=true"
    )


@dataclass(frozen=True, slots=True)
class BuildInputs:
    """Inputs of the system part for one architecture."""

    base_image: str
    """Pull spec by digest."""
    architecture: str = "amd64"
    """As in the label ``kubernetes.io/arch`` of nodes."""
    containerfile: str = field(default="", repr=False)
    """The user's text for the architecture; empty for none."""
    extensions: tuple[str, ...] = ()
    extensions_image: str = ""
    """Pull spec of the image with the packages of extensions and kernels."""
    kernel_type: str = DEFAULT_KERNEL
    trust_bundle: str = field(default="", repr=False)
    """Additional CAs in PEM."""
    config_digest: str = ""
    """Digest of the config's layer if the user's text sees the config; empty otherwise."""
    context_digest: str = ""
    """Digest of the files for COPY; empty without any."""
    mounts: tuple[str, ...] = ()
    """Directories that are mounted while the user's text runs: each leaves its mount point."""

    options: tuple[str, ...] = ()
    """Options of the builder that change the image, from `list_builder_options`."""

    @classmethod
    def from_objects(
        cls, config: MachineOSConfig, rendered: MachineConfig, architecture: str = "amd64"
    ) -> "BuildInputs":
        """Return the inputs that both objects determine, without trust bundle, files and mounts.

        An entry of the Containerfile without the architecture counts as none; see
        `treenail.image.inputs.check_config.find_architecture_findings`.
        """
        name = ARCHITECTURES.get(architecture)
        entry = config.find_containerfile(name) if name else None
        return cls(
            base_image=config.base_image or rendered.os_image_url,
            architecture=architecture,
            containerfile=entry.content if entry else "",
            extensions=rendered.extensions,
            extensions_image=rendered.extensions_image,
            kernel_type=rendered.kernel_type or DEFAULT_KERNEL,
        )

    @property
    def user_text(self) -> str:
        """The user's text; empty when it has no instruction."""
        return self.containerfile if parse_containerfile(self.containerfile).instructions else ""

    @property
    def needs_packages(self) -> bool:
        """True when packages of the extensions image are installed."""
        return bool(self.extensions) or self.kernel_type not in ("", DEFAULT_KERNEL)

    @property
    def needs_job(self) -> bool:
        """True unless the system part is the base image itself."""
        return self.needs_packages or bool(self.user_text)
