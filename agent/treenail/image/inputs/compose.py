"""Composed Containerfile: the system with its packages as the stage ``configs``, then the user's.

Our own text has no continued line and no here-document: it means the same with either escape
character and with every buildah.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from treenail.api.machineconfig import (
    DEFAULT_KERNEL,
    EXTENSIONS,
    KERNEL_PACKAGES,
    STOCK_KERNEL_PACKAGES,
)
from treenail.config.node_paths import USER_CA_BUNDLE
from treenail.image.containerfile import Containerfile, parse_containerfile
from treenail.image.inputs.build_inputs import BuildInputs
from treenail.image.inputs.containerfile_problems import CONFIGS_STAGE
from treenail.image.inputs.own_files import OWN_PREFIX

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
    user = inputs.user_text.removeprefix("\ufeff")
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
        yield f"COPY {TRUST_FILE} {USER_CA_BUNDLE}"
        yield "RUN if command -v update-ca-trust >/dev/null; then update-ca-trust extract; fi"
    if inputs.needs_packages:
        yield _compose_packages(inputs)


def _compose_packages(inputs: BuildInputs) -> str:
    """Return the instruction that installs extensions and a kernel from the extensions image."""
    install = sorted(
        {name for extension in inputs.extensions for name in EXTENSIONS.get(extension, ())}
    )
    repository = (
        f"[treenail-packages]\\nname=treenail-packages\\nbaseurl=file://{_PACKAGES_TARGET}\\n"
        "enabled=1\\ngpgcheck=0\\n"
    )
    steps = ["set -e", f"printf '{repository}' > {_REPOSITORY_FILE}"]
    if inputs.kernel_type not in ("", DEFAULT_KERNEL):
        kernel = sorted(KERNEL_PACKAGES.get(inputs.kernel_type, ()))
        present = f"$(rpm -qa --qf '%{{NAME}} ' {' '.join(sorted(STOCK_KERNEL_PACKAGES))})"
        options = " ".join(f"--install={name}" for name in kernel)
        steps.append(f"rpm-ostree override remove {present} {options}")
    if install:
        steps.append(f"rpm-ostree install --assumeyes {' '.join(install)}")
    steps += [f"rm {_REPOSITORY_FILE}", "ostree container commit"]
    return (
        f"RUN --mount=type=bind,from={inputs.extensions_image},source={_PACKAGES_SOURCE},"
        f"target={_PACKAGES_TARGET} {'; '.join(steps)}"
    )
