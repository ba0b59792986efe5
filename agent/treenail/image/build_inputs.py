"""Inputs of the system part of an image build: everything that its content depends on.

`compute_build_name` names a MachineOSBuild as the Machine Config Operator does.
`compute_content_key` returns equal keys for equal inputs, in any pool. `compose_containerfile`
composes the text: the system with its packages as the stage ``configs``, then the user's. Our own
text has no continued line and no here-document: it means the same with either escape character and
with every buildah.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from treenail.api import annotations as key
from treenail.api import decode, machineconfig, machineconfigpool, machineosconfig, node
from treenail.api.documents import BYTE_ORDER_MARK
from treenail.api.ignition.parser import parse_ignition
from treenail.config import node_paths, rendered_name
from treenail.errors import ConfigError
from treenail.image.containerfile import (
    CONFIGS_STAGE,
    OWN_PREFIX,
    Containerfile,
    parse_containerfile,
)


def compute_build_name(
    config: machineosconfig.MachineOSConfig,
    pool: machineconfigpool.MachineConfigPool,
    rendered: machineconfig.MachineConfig,
    *,
    context_digest: str = "",
) -> str:
    """Return ``<MachineOSConfig>-<hash>`` for the pool's rendered config.

    The hash covers the pool's configuration with its sources, the spec of the MachineOSConfig, the
    images of the rendered config and the release. A base image in an annotation of the
    MachineOSConfig, by digest, replaces the one of the rendered config. Files for COPY and the
    annotation that shows the config to the Containerfile are covered if they exist. Raises
    `ConfigError` for objects that do not belong together.
    """
    if pool.name != config.pool:
        raise ConfigError(
            f"cannot name a build of MachineOSConfig {config.name}: expected pool {config.pool}, "
            f"found {pool.name}"
        )
    images: decode.Json = {
        "BaseOSContainerImage": config.base_image or rendered.os_image_url,
        "BaseOSExtensionsContainerImage": rendered.extensions_image,
        "OSImageURL": "",
        "ReleaseVersion": rendered.metadata.annotations.get(key.RELEASE_VERSION, ""),
    }
    if config.sees_config:
        images["BuildSeesConfig"] = "true"
    if context_digest:
        images["ContextDigest"] = context_digest
    digest = rendered_name.digest(pool.configuration.document, complete_spec(config), images)
    return f"{config.name}-{digest}"


def complete_spec(config: machineosconfig.MachineOSConfig) -> decode.Json:
    """Return the spec as Go encodes the object of the API server, also of an object of a file."""
    # Go encodes a list that is not set as null, and the API server drops the null.
    files = config.spec.get("containerFile")
    if isinstance(files, list):
        # The default of the CRD: an object of a file has the name that it gets in a cluster.
        default: decode.Json = {
            "containerfileArch": machineosconfig.ContainerfileArch.NO_ARCH.value
        }
        files = [default | entry if isinstance(entry, dict) else entry for entry in files]
    return {**config.spec, "containerFile": files}


BUILDER_CONTRACT = 1
"""Number of the composed text and of the builder's options. A change builds every image again."""

ARCHITECTURES: dict[str, machineosconfig.ContainerfileArch] = {
    "amd64": machineosconfig.ContainerfileArch.AMD64,
    "arm64": machineosconfig.ContainerfileArch.ARM64,
    "ppc64le": machineosconfig.ContainerfileArch.PPC64LE,
    "s390x": machineosconfig.ContainerfileArch.S390X,
}
"""Architectures of nodes and images, and their names in a MachineOSConfig."""


DEFAULT_DRIVER = "overlay"
"""Storage driver of buildah in Jobs."""


LAYERS = "layers"
"""Option of a builder that makes one layer of each instruction, for a cache."""


def list_builder_options(
    *, driver: str = DEFAULT_DRIVER, has_cache: bool = False
) -> tuple[str, ...]:
    """Return the options of a builder that change the image; empty for the usual ones.

    With a cache each instruction is a layer. Storage drivers find other changes of a directory
    that an instruction replaced.
    """
    options = [LAYERS] if has_cache else []
    return (*options, *([f"driver={driver}"] if driver != DEFAULT_DRIVER else []))


_READ_BY_PROGRAMS = ("/etc/yum.repos.d/", "/etc/pki/", "/etc/containers/")
_MAX_NAMED = 3


def find_build_paths(rendered: machineconfig.MachineConfig) -> tuple[str, ...]:
    """Return the files of a config that package managers and registry clients read.

    A Containerfile that installs packages often needs them. Raises `ConfigError`.
    """
    files = parse_ignition(rendered.config, location=f"config of {rendered.name}").files
    return tuple(sorted(file.path for file in files if file.path.startswith(_READ_BY_PROGRAMS)))


def describe_hidden_files(config: machineosconfig.MachineOSConfig, paths: Sequence[str]) -> str:
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
    architecture: str = node.DEFAULT_ARCHITECTURE
    """As in the label ``kubernetes.io/arch`` of nodes."""
    containerfile: str = field(default="", repr=False)
    """The user's text for the architecture; empty for none."""
    extensions: tuple[str, ...] = ()
    extensions_image: str = ""
    """Pull spec of the image with the packages of extensions and kernels."""
    kernel_type: str = machineconfig.DEFAULT_KERNEL
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
        cls,
        config: machineosconfig.MachineOSConfig,
        rendered: machineconfig.MachineConfig,
        architecture: str = node.DEFAULT_ARCHITECTURE,
    ) -> "BuildInputs":
        """Return the inputs that both objects determine, without trust bundle, files and mounts.

        An entry of the Containerfile without the architecture counts as none; see
        `treenail.image.input_checks.find_architecture_findings`.
        """
        name = ARCHITECTURES.get(architecture)
        entry = config.find_containerfile(name) if name else None
        return cls(
            base_image=config.base_image or rendered.os_image_url,
            architecture=architecture,
            containerfile=entry.content if entry else "",
            extensions=rendered.extensions,
            extensions_image=rendered.extensions_image,
            kernel_type=rendered.kernel_type or machineconfig.DEFAULT_KERNEL,
        )

    @property
    def user_text(self) -> str:
        """The user's text; empty when it has no instruction."""
        return self.containerfile if parse_containerfile(self.containerfile).instructions else ""

    @property
    def needs_packages(self) -> bool:
        """True when packages of the extensions image are installed."""
        return bool(self.extensions) or self.kernel_type not in ("", machineconfig.DEFAULT_KERNEL)

    @property
    def needs_job(self) -> bool:
        """True unless the system part is the base image itself."""
        return self.needs_packages or bool(self.user_text)


CONFIG_FILE = OWN_PREFIX + "config.tar.gz"
"""The layer of the config, for a user's text that sees the config."""
TRUST_FILE = OWN_PREFIX + "trust-bundle.crt"

_PACKAGES_SOURCE = "/usr/share/rpm-ostree/extensions"
_PACKAGES_TARGET = "/run/treenail-packages"
_REPOSITORY_FILE = "/etc/yum.repos.d/treenail-packages.repo"


@dataclass(frozen=True, slots=True)
class ComposedContainerfile:
    """The text that is built."""

    text: str
    user_line: int = 0
    """First line of the user's text, from 1; 0 without one."""
    files: tuple[str, ...] = ()
    """Names of our own files that the context must contain."""

    def convert_line(self, line: int) -> int:
        """Return the line of the user's text; 0 for a line of our own."""
        if not self.user_line or line < self.user_line:
            return 0
        return line - self.user_line + 1


def compose_containerfile(inputs: BuildInputs) -> ComposedContainerfile:
    """Compose the text of the system part; the user's text is at its end, unchanged."""
    # buildah skips a byte order mark at the begin of a file only.
    user = inputs.user_text.removeprefix(BYTE_ORDER_MARK)
    parsed = parse_containerfile(user)
    files = (*((CONFIG_FILE,) if inputs.config_digest else ()),
             *((TRUST_FILE,) if inputs.trust_bundle else ()))  # fmt: skip
    lines = [*parsed.directives, *_compose_system(inputs, parsed)]
    if not user:
        return ComposedContainerfile("\n".join(lines) + "\n", 0, files)
    own = "\n".join([*lines, "# The Containerfile of the MachineOSConfig:"]) + "\n"
    text = own + user + ("" if user.endswith("\n") else "\n")
    return ComposedContainerfile(text, own.count("\n") + 1, files)


def _compose_system(inputs: BuildInputs, user: Containerfile) -> Iterator[str]:
    # ARG instructions of the user's text apply to FROM only before the first stage of all.
    for argument in user.global_arguments:
        yield f"ARG {argument.arguments}"
    yield f"FROM {inputs.base_image} AS {CONFIGS_STAGE}"
    if inputs.config_digest:
        yield f"ADD {CONFIG_FILE} /"
    if inputs.trust_bundle:
        yield f"COPY {TRUST_FILE} {node_paths.USER_CA_BUNDLE}"
        yield "RUN if command -v update-ca-trust >/dev/null; then update-ca-trust extract; fi"
    if inputs.needs_packages:
        yield _compose_packages(inputs)


def _compose_packages(inputs: BuildInputs) -> str:
    """Return the instruction that installs extensions and a kernel from the extensions image."""
    install = sorted(
        {
            name
            for extension in inputs.extensions
            for name in machineconfig.EXTENSIONS.get(extension, ())
        }
    )
    repository = (
        f"[treenail-packages]\\nname=treenail-packages\\nbaseurl=file://{_PACKAGES_TARGET}\\n"
        "enabled=1\\ngpgcheck=0\\n"
    )
    steps = ["set -e", f"printf '{repository}' > {_REPOSITORY_FILE}"]
    if inputs.kernel_type not in ("", machineconfig.DEFAULT_KERNEL):
        kernel = sorted(machineconfig.KERNEL_PACKAGES.get(inputs.kernel_type, ()))
        present = (
            f"$(rpm -qa --qf '%{{NAME}} ' {' '.join(sorted(machineconfig.STOCK_KERNEL_PACKAGES))})"
        )
        options = " ".join(f"--install={name}" for name in kernel)
        steps.append(f"rpm-ostree override remove {present} {options}")
    if install:
        steps.append(f"rpm-ostree install --assumeyes {' '.join(install)}")
    steps += [f"rm {_REPOSITORY_FILE}", "ostree container commit"]
    return (
        f"RUN --mount=type=bind,from={inputs.extensions_image},source={_PACKAGES_SOURCE},"
        f"target={_PACKAGES_TARGET} {'; '.join(steps)}"
    )


KEY_LENGTH = 16


def compute_content_key(*inputs: BuildInputs) -> str:
    """Return 16 hex digits over the inputs of one build, one for each architecture, in any order.

    Files of the rendered config change the key only if the user's text sees them. Registry and
    repository of an image do not: its digest says what it contains.
    """
    documents = sorted(
        (_list_inputs(build) for build in inputs), key=lambda build: str(build["architecture"])
    )
    document: decode.Json = {"contract": BUILDER_CONTRACT, "inputs": documents}
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]


def _list_inputs(inputs: BuildInputs) -> decode.Json:
    # Without options, keys are those of builders that had none.
    options: decode.Json = {"options": sorted(inputs.options)} if inputs.options else {}
    return {
        **options,
        "architecture": inputs.architecture,
        "base": _get_digest(inputs.base_image),
        "containerfile": inputs.user_text,
        "extensions": sorted(set(inputs.extensions)),
        "packages": _get_digest(inputs.extensions_image) if inputs.needs_packages else "",
        "kernelType": inputs.kernel_type or machineconfig.DEFAULT_KERNEL,
        "trustBundle": hashlib.sha256(inputs.trust_bundle.encode()).hexdigest(),
        "config": inputs.config_digest,
        "context": inputs.context_digest,
        "mounts": sorted(set(inputs.mounts)),
    }


def _get_digest(image: str) -> str:
    """Return the digest of a pull spec, or the whole text of one without a digest."""
    return image.partition("@")[2] or image
