"""The context that travels through the daemon's functions in place of its parts."""

from dataclasses import dataclass

from treenail.clocks import Clock
from treenail.daemon.checks.health import HealthChecker
from treenail.daemon.checks.preflight import PreflightChecker
from treenail.daemon.cluster.controller_config import ControllerConfigSync
from treenail.daemon.cluster.pull_secrets import BootstrapRegistryFiles, PullSecrets
from treenail.daemon.configuration.config_cache import ConfigCache
from treenail.daemon.configuration.drift_repair import DriftRepairer
from treenail.daemon.configuration.machine import NodeConfiguration
from treenail.daemon.configuration.mcd_state import MCDState
from treenail.daemon.configuration.trust_store import TrustStore
from treenail.daemon.interfaces import (
    ClusterAccess,
    DeploymentPins,
    ImageContents,
    OSBackend,
    Power,
    SoftRebootControl,
)
from treenail.daemon.local.requests import RequestFile
from treenail.host.system.kernel import HostKernel
from treenail.host.system.state_file import CrashRecordFile, Ledger
from treenail.update.state.ledger_record import Moment


@dataclass(frozen=True, slots=True)
class NodeInterfaces:
    """Everything that the daemon reads and changes."""

    os: OSBackend
    images: ImageContents
    power: Power
    soft_reboots: SoftRebootControl
    pins: DeploymentPins
    kernel: HostKernel
    ledger: Ledger
    crash_record: CrashRecordFile
    cluster: ClusterAccess
    pull_secrets: PullSecrets
    bootstrap_registry: BootstrapRegistryFiles
    certificates: ControllerConfigSync
    trust_store: TrustStore
    requests: RequestFile
    mcd_state: MCDState
    configuration: NodeConfiguration
    config_cache: ConfigCache
    drift: DriftRepairer
    preflight: PreflightChecker
    health: HealthChecker
    clock: Clock

    def read_moment(self) -> Moment:
        """Read both clocks and the boot ID. Raises `HostError`."""
        return Moment(self.clock.now(), self.kernel.read_boot_id(), self.clock.monotonic())
