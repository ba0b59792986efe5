"""The install configuration: the field ``imageMode``, and what else an installation needs. Pure.

Of ``install-config.yaml`` the other fields belong to the OpenShift installer, which checks them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail.api import documents
from treenail.api.decode import Json
from treenail.api.machineconfigpool import ARBITER, MASTER, WORKER
from treenail.api.yaml11 import ValueBudget
from treenail.api.yaml_positions import find_positions
from treenail.image.inputs.build_inputs import ARCHITECTURES
from treenail.installer.inputs.image_mode_field import FIELD, ParsedImageMode, parse_image_mode
from treenail.installer.inputs.install_directory import OWN_INSTALL_CONFIG
from treenail.installer.inputs.install_problem import InstallProblem
from treenail.installer.inputs.machine_count import ARBITER as ARBITER_MACHINES
from treenail.installer.inputs.machine_count import (
    CONTROL_PLANE,
    count_machines,
    find_count_problems,
)

PULL_SECRET_FIELD = "pullSecret"  # noqa: S105  # the name of a field
_MAX_VALUES = 100_000
_OWN_FIELDS = (FIELD, PULL_SECRET_FIELD, CONTROL_PLANE, ARBITER_MACHINES)


@dataclass(frozen=True, slots=True)
class InstallConfig:
    """An install configuration."""

    name: str
    content: bytes = field(repr=False)
    mode: ParsedImageMode = field(default_factory=ParsedImageMode)
    pull_secret: bytes = field(default=b"", repr=False)
    """Logins of registries; empty without any."""
    architectures: Mapping[str, str] = field(default_factory=dict)
    """Architecture of the machines by pool, where the file says it."""
    machines: int | None = None
    """Machines of the control plane; None where the file does not say it."""
    problems: tuple[InstallProblem, ...] = ()

    @property
    def is_own(self) -> bool:
        """True for the file of treenail: no other program reads it."""
        return self.name == OWN_INSTALL_CONFIG


def parse_install_config(content: bytes, name: str) -> InstallConfig:
    """Read the file; raise `ConfigError` if it is not a YAML object."""
    text = documents.decode_text(content, name)
    document = documents.load_document(text, where=name, budget=ValueBudget(_MAX_VALUES))
    mode = parse_image_mode(text, where=name)
    problems = [*mode.problems]
    if name == OWN_INSTALL_CONFIG:
        positions = find_positions(text, where=name)
        problems += [
            InstallProblem(
                name,
                f"unknown field {each:.60}, expected one of {', '.join(_OWN_FIELDS)}",
                "remove it",
                positions.find_line(each),
            )
            for each in document
            if each not in _OWN_FIELDS
        ]
        problems += [
            InstallProblem(
                name,
                text,
                f"write, for example: {each}: {{replicas: 3}}",
                positions.find_line(each),
            )
            for each, text in find_count_problems(document)
        ]
    secret = document.get(PULL_SECRET_FIELD)
    return InstallConfig(
        name,
        content,
        mode,
        secret.encode("utf-8", "surrogatepass") if isinstance(secret, str) else b"",
        _find_architectures(document),
        count_machines(document),
        tuple(problems),
    )


def _find_architectures(document: Json) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, pool in ((CONTROL_PLANE, MASTER), (ARBITER_MACHINES, ARBITER)):
        _add_architecture(found, pool, document.get(name))
    compute = document.get("compute")
    for each in compute if isinstance(compute, list) else []:
        if isinstance(each, dict) and each.get("name", WORKER) == WORKER:
            _add_architecture(found, WORKER, each)
    return found


def _add_architecture(found: dict[str, str], pool: str, machines: object) -> None:
    architecture = machines.get("architecture") if isinstance(machines, dict) else None
    if isinstance(architecture, str) and architecture in ARCHITECTURES:
        found[pool] = architecture
