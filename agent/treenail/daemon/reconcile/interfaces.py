"""What the daemon needs of the world, in its own words; adapters satisfy these unknowingly."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from treenail.api.disruptionpolicy import ClusterPolicy
from treenail.api.machineconfig import MachineConfig
from treenail.api.node import Node
from treenail.clock import Clock
from treenail.config.drift import Drift
from treenail.daemon.configuration.config_cache import Configs
from treenail.daemon.configuration.drift import Booted
from treenail.daemon.configuration.machine import Configuration
from treenail.daemon.configuration.mcd_state import Predecessor
from treenail.host.ostree.deployments import Change, Deployments, Progress, Verdict
from treenail.update.checks.health import Trial
from treenail.update.decision.request import Request
from treenail.update.drift.drift_policy import Drifted
from treenail.update.state.boot_trial import Probation
from treenail.update.state.record import Target
from treenail.update.status import Event, Report

Json = dict[str, object]
Watch = Callable[[Progress], Verdict]


class OperatingSystem(Protocol):
    """The deployments of this machine; each call has a time limit of its own, and is repeatable."""

    @property
    def name(self) -> str:
        """What drives them: ``rpm-ostree`` or ``bootc``."""

    def look(self) -> Deployments:
        """The deployments as they are now."""

    def stage(self, change: Change, *, watch: Watch) -> None:
        """Return once all of it is staged and locked; a no-op when it already is.

        ``watch`` is asked at least once a second whether to go on.
        """

    def wait_for_other(self, *, watch: Watch) -> bool:
        """Return once somebody else's transaction has ended; False when none is to be seen."""

    def drop(self, staged_id: str) -> None:
        """Drop the staged deployment of this id, and end our transaction that would make one.

        Leaves alone what others staged.
        """

    def finalize(self, staged_id: str, *, softly: bool = False) -> None:
        """Unlock the staged deployment of this id; the next boot is into it.

        The machine may reboot by that alone, unless ``softly``; the caller asks for it in any case.
        """

    def roll_back(self) -> None:
        """Make the previous deployment the default; the caller asks for the reboot."""

    def release(self) -> None:
        """Let the OS daemon go: nothing is asked of it for now."""


class Power(Protocol):
    """Rebooting."""

    def reboot(self, *, soft: bool = False) -> None:
        """Return once the reboot is under way; ``soft``: of user space alone."""

    def shutting_down(self) -> bool:
        """Whether the machine is on its way down."""


class SoftReboots(Protocol):
    """What makes a soft reboot lead into another deployment."""

    def prepare(self) -> bool:
        """Have one lead into the staged deployment; returns whether it can."""

    def clear(self) -> None:
        """Have none lead anywhere; harmless when none was prepared."""


class Pins(Protocol):
    """What keeps deployments from being dropped; both may be repeated."""

    def pin(self, deployment_id: str) -> None:
        """Return once nobody drops the deployment of this id."""

    def unpin(self, deployment_id: str) -> None:
        """Let it be dropped; harmless when there is none."""


class LedgerFile(Protocol):
    """One JSON document that survives a power cut."""

    def read(self) -> Json | None:
        """The document; None when there is none yet."""

    def write(self, document: Json) -> None:
        """Return once the document is on disk for good."""


class Kernel(Protocol):
    """What the running kernel says."""

    def boot_id(self) -> str:
        """A new one for every boot, soft ones too; see `treenail.update.state.boot_id`."""

    def soft_reboots(self) -> int | None:
        """How many there were since the kernel was started; None when nobody counts them."""

    def command_line(self) -> tuple[str, ...]:
        """The arguments that the kernel was booted with."""

    def fips_enabled(self) -> bool:
        """Whether the kernel runs in FIPS mode."""


class Cluster(Protocol):
    """The API server as this node sees it."""

    def node(self) -> Node | None:
        """Our Node as last seen; None until the first sight."""

    def refresh(self) -> None:
        """Look at our Node now; raises `ClusterError`."""

    def machine_config(self, name: str) -> MachineConfig:
        """The MachineConfig of this name; raises `ClusterError`, `ConfigError`."""

    def policy(self) -> ClusterPolicy:
        """What changes cost; the defaults where the cluster says nothing. `ClusterError`."""

    def report(self, report: Report) -> None:
        """Tell what differs from what was told before; raises `ClusterError`."""

    def tell(self, event: Event) -> None:
        """Record an Event about our Node, as soon as that is possible."""


class Credentials(Protocol):
    """The pull secrets on disk."""

    def refresh(self) -> tuple[str, ...]:
        """Put the pull secrets in place; returns what is wrong with them."""

    def refused(self, image: str) -> bool:
        """The image's registry refused the login; whether there is now another to try."""

    def proven(self, image: str) -> None:
        """The image was pulled with the login that is in place."""


class Trust(Protocol):
    """What the ControllerConfig hands to nodes."""

    def refresh(self) -> tuple[str, ...]:
        """Have it in place; returns what is wrong with it."""


class Requests(Protocol):
    """What people on this machine ask for."""

    def read(self) -> Request | None:
        """The one request; None when there is none."""

    def drop(self) -> None:
        """Have none: it is answered."""


class Upkeep(Protocol):
    """The machine between updates; raises `HostError` and `ConfigError`."""

    def look(self, current: Target, booted: Booted) -> Drifted:
        """What drifted from the current config, as of now."""

    def heal(self, current: Target, drifts: Collection[Drift]) -> None:
        """Have these as the config says, all or none."""

    def forced(self) -> bool:
        """Whether the config is to be applied whatever the machine is like."""

    def obeyed(self) -> None:
        """Return once that is asked no more."""


class Preflight(Protocol):
    """What would make an update fail."""

    def clear(self, image: str) -> None:
        """Return when nothing is in the way of this image, or else raise `PreflightError`."""

    def still_clear(self, image: str) -> None:
        """The same right before the drain, of all that is not settled by having the image."""


class Health(Protocol):
    """Whether this boot is healthy."""

    @property
    def again_s(self) -> float:
        """How long to wait between two looks."""

    def look(self, probation: Probation, boot_id: str) -> Trial:
        """Every check, made now."""

    def mark(self, name: str, problem: str) -> None:
        """Count it as a check that failed from now on; without a problem, no longer."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Everything the daemon acts on and asks."""

    os: OperatingSystem
    power: Power
    soft_reboots: SoftReboots
    pins: Pins
    kernel: Kernel
    ledger: LedgerFile
    cluster: Cluster
    credentials: Credentials
    trust: Trust
    requests: Requests
    predecessor: Predecessor
    configuration: Configuration
    configs: Configs
    upkeep: Upkeep
    preflight: Preflight
    health: Health
    clock: Clock
