"""Plan of a build: the wanted build, and the interfaces that compute and read it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from treenail.api.machineconfig import MachineConfig
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosconfig import MachineOSConfig
from treenail.config.image_mirrors import NO_MIRRORS, ImageMirrors
from treenail.config.pullsecret import PullSecret
from treenail.controllers.image_build.facts import BuildProblem, WantedBuild, WantedSystem


@dataclass(frozen=True, slots=True)
class EntitlementMount:
    """A Secret or ConfigMap that only the user's instructions see."""

    name: str
    path: str
    """Where the instructions see its files."""
    is_secret: bool = True


@dataclass(frozen=True, slots=True)
class SystemPlan:
    """The system part for one architecture, and what its Job needs to know."""

    wanted: WantedSystem
    containerfile: str = field(default="", repr=False)
    """The composed Containerfile."""
    user_line: int = 1
    """First line of the user's text in it; 0 without one."""
    own_files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Files of the composed Containerfile beside those of the ConfigMap, by name."""

    @property
    def architecture(self) -> str:
        return self.wanted.architecture


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """A wanted build, and what its Jobs and the registries need to know."""

    wanted: WantedBuild
    systems: tuple[SystemPlan, ...]
    """One for each architecture, as in the wanted build."""
    base_pull_secret: str = ""
    """Secret in the namespace of builds; empty for anonymous access."""
    context: str = ""
    """ConfigMap with files for COPY; empty for none."""
    context_files: tuple[str, ...] = ()
    """Names of these files."""
    entitlements: tuple[EntitlementMount, ...] = ()
    ca_pem: str = field(default="", repr=False)
    """CAs of registries beside those of the system."""
    mirrors: ImageMirrors = NO_MIRRORS
    """Where images are pulled from; no part of any key, because the content is equal."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the complete image."""
    deadline_s: int = 3600
    can_use_control_plane: bool = False
    """Jobs tolerate the taints of control-plane nodes: the cluster has no other nodes."""

    def get_system(self, name: str) -> SystemPlan:
        """Return the system part with this name; raises `KeyError`."""
        return {each.wanted.name: each for each in self.systems}[name]

    def find_containerfiles(self, architectures: Sequence[str]) -> list[str]:
        """Return the composed Containerfiles that Jobs build for these architectures."""
        return [
            each.containerfile
            for each in self.systems
            if each.wanted.needs_job and each.architecture in architectures
        ]


class BuildRefused(Exception):
    """The inputs cannot be built; ``problem`` names field, found and expected value."""

    def __init__(self, problem: BuildProblem) -> None:
        super().__init__(problem.message)
        self.problem = problem


IsEnded = Callable[[str], bool]


def never_ended(_name: str) -> bool:
    """Plan every build as a new one."""
    return False


class BuildPlanner(Protocol):
    """Computes plans. Reads what is not watched: rendered configs, ConfigMaps and Secrets."""

    def plan_build(
        self,
        config: MachineOSConfig,
        pool: MachineConfigPool,
        architectures: frozenset[str],
        is_ended: IsEnded = never_ended,
    ) -> BuildPlan:
        """Raise `BuildRefused` for invalid inputs, and `ClusterError`.

        ``is_ended`` says of a name whether its build has ended. The plan of such a build has no
        entitlements, and its keys are not those of a new build.
        """

    def check_secrets(self, config: MachineOSConfig) -> BuildProblem | None:
        """Return why the present Secrets cannot be used; raise `ClusterError`."""

    def read_push_login(self, config: MachineOSConfig) -> PullSecret:
        """Read the login for pushes; raise `CredentialError` or `ClusterError`."""

    def read_base_login(self, config: MachineOSConfig) -> PullSecret:
        """Read the login for the base image; raise `CredentialError` or `ClusterError`."""

    def compute_base_access_version(self, config: MachineOSConfig) -> str:
        """Return a text that changes with the login for the base image; raise `ClusterError`."""

    def read_ca(self, registry: str) -> str:
        """Return the CAs of a registry beside those of the system, in PEM."""

    def read_rendered(self, name: str) -> MachineConfig:
        """Read a rendered config; raise `ConfigError` or `ClusterError`."""
