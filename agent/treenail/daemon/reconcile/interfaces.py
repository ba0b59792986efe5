"""What the daemon needs of the world, in its own words; adapters satisfy these unknowingly."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from treenail.api.disruptionpolicy import ClusterDisruptionPolicy
from treenail.api.machineconfig import MachineConfig
from treenail.api.node import Node
from treenail.clock import Clock
from treenail.config.drift import Drift
from treenail.daemon.configuration.config_cache import ConfigCache
from treenail.daemon.configuration.drift import BootedState
from treenail.daemon.configuration.machine import NodeConfiguration
from treenail.daemon.configuration.mcd_state import MCDState
from treenail.host.ostree.deployments import (
    DeploymentChange,
    DeploymentStatus,
    TransactionProgress,
    WatchVerdict,
)
from treenail.update.checks.health import BootTrialStatus
from treenail.update.decision.request import UserRequest
from treenail.update.drift.drift_policy import DriftAssessment
from treenail.update.state.boot_trial import BootTrial
from treenail.update.state.record import Target
from treenail.update.status import NodeEvent, StatusReport

Json = dict[str, object]
Watch = Callable[[TransactionProgress], WatchVerdict]


class OSBackend(Protocol):
    """The deployments of this machine; each call has a time limit of its own, and is repeatable."""

    @property
    def name(self) -> str:
        """What drives them: ``rpm-ostree`` or ``bootc``."""

    def read_deployments(self) -> DeploymentStatus:
        """The deployments as they are now."""

    def stage_deployment(self, change: DeploymentChange, *, watch: Watch) -> None:
        """Return once all of it is staged and locked; a no-op when it already is.

        ``watch`` is asked at least once a second whether to go on.
        """

    def wait_for_other_transaction(self, *, watch: Watch) -> bool:
        """Return once somebody else's transaction has ended; False when none is to be seen."""

    def drop_staged(self, staged_id: str) -> None:
        """Drop the staged deployment of this id, and end our transaction that would make one.

        Leaves alone what others staged.
        """

    def finalize_staged(self, staged_id: str, *, is_soft: bool = False) -> None:
        """Unlock the staged deployment of this id; the next boot is into it.

        The machine may reboot by that alone, unless ``is_soft``; the caller asks for it in any case.
        """

    def roll_back(self) -> None:
        """Make the previous deployment the default; the caller asks for the reboot."""

    def release_daemon(self) -> None:
        """Let the OS daemon go: nothing is asked of it for now."""


class Power(Protocol):
    """Rebooting."""

    def reboot_machine(self, *, is_soft: bool = False) -> None:
        """Return once the reboot is under way; ``is_soft``: of user space alone."""

    def is_shutting_down(self) -> bool:
        """Whether the machine is on its way down."""


class SoftRebootControl(Protocol):
    """What makes a soft reboot lead into another deployment."""

    def prepare_soft_reboot(self) -> bool:
        """Have one lead into the staged deployment; returns whether it can."""

    def clear_soft_reboot(self) -> None:
        """Have none lead anywhere; harmless when none was prepared."""


class DeploymentPins(Protocol):
    """What keeps deployments from being dropped; both may be repeated."""

    def pin_deployment(self, deployment_id: str) -> None:
        """Return once nobody drops the deployment of this id."""

    def unpin_deployment(self, deployment_id: str) -> None:
        """Let it be dropped; harmless when there is none."""


class LedgerStore(Protocol):
    """One JSON document that survives a power cut."""

    def read_document(self) -> Json | None:
        """The document; None when there is none yet."""

    def write_document(self, document: Json) -> None:
        """Return once the document is on disk for good."""


class KernelInfo(Protocol):
    """What the running kernel says."""

    def read_boot_id(self) -> str:
        """A new one for every boot, soft ones too; see `treenail.update.state.boot_id`."""

    def count_soft_reboots(self) -> int | None:
        """How many there were since the kernel was started; None when nobody counts them."""

    def read_command_line(self) -> tuple[str, ...]:
        """The arguments that the kernel was booted with."""

    def is_fips_enabled(self) -> bool:
        """Whether the kernel runs in FIPS mode."""


class ClusterAccess(Protocol):
    """The API server as this node sees it."""

    def get_cached_node(self) -> Node | None:
        """Our Node as last seen; None until the first sight."""

    def refresh_node(self) -> None:
        """Look at our Node now; raises `ClusterError`."""

    def fetch_machine_config(self, name: str) -> MachineConfig:
        """The MachineConfig of this name; raises `ClusterError`, `ConfigError`."""

    def fetch_disruption_policy(self) -> ClusterDisruptionPolicy:
        """What changes cost; the defaults where the cluster says nothing. `ClusterError`."""

    def write_report(self, report: StatusReport) -> None:
        """Tell what differs from what was told before; raises `ClusterError`."""

    def record_event(self, event: NodeEvent) -> None:
        """Record an Event about our Node, as soon as that is possible."""


class RegistryCredentials(Protocol):
    """The pull secrets on disk."""

    def install_secrets(self) -> tuple[str, ...]:
        """Put the pull secrets in place; returns what is wrong with them."""

    def handle_rejected_login(self, image: str) -> bool:
        """The image's registry refused the login; whether there is now another to try."""

    def confirm_login(self, image: str) -> None:
        """The image was pulled with the login that is in place."""


class CertificateSync(Protocol):
    """What the ControllerConfig hands to nodes."""

    def sync_files(self) -> tuple[str, ...]:
        """Have it in place; returns what is wrong with it."""


class RequestStore(Protocol):
    """What people on this machine ask for."""

    def read_request(self) -> UserRequest | None:
        """The one request; None when there is none."""

    def remove_request(self) -> None:
        """Have none: it is answered."""


class DriftControl(Protocol):
    """The machine between updates; raises `HostError` and `ConfigError`."""

    def find_drift(self, current: Target, booted: BootedState) -> DriftAssessment:
        """What drifted from the current config, as of now."""

    def repair_drift(self, current: Target, drifts: Collection[Drift]) -> None:
        """Have these as the config says, all or none."""

    def is_apply_forced(self) -> bool:
        """Whether the config is to be applied whatever the machine is like."""

    def remove_force_file(self) -> None:
        """Return once that is asked no more."""


class PreflightCheck(Protocol):
    """What would make an update fail."""

    def check_image(self, image: str) -> None:
        """Return when nothing is in the way of this image, or else raise `PreflightError`."""

    def check_machine(self, image: str) -> None:
        """The same right before the drain, of all that is not settled by having the image."""


class BootHealth(Protocol):
    """Whether this boot is healthy."""

    @property
    def interval_s(self) -> float:
        """How long to wait between two looks."""

    def run_checks(self, probation: BootTrial, boot_id: str) -> BootTrialStatus:
        """Every check, made now."""

    def set_check_problem(self, name: str, problem: str) -> None:
        """Count it as a check that failed from now on; without a problem, no longer."""


@dataclass(frozen=True, slots=True)
class NodeInterfaces:
    """Everything the daemon acts on and asks."""

    os: OSBackend
    power: Power
    soft_reboots: SoftRebootControl
    pins: DeploymentPins
    kernel: KernelInfo
    ledger: LedgerStore
    cluster: ClusterAccess
    pull_secrets: RegistryCredentials
    certificates: CertificateSync
    requests: RequestStore
    mcd_state: MCDState
    configuration: NodeConfiguration
    config_cache: ConfigCache
    drift: DriftControl
    preflight: PreflightCheck
    health: BootHealth
    clock: Clock
