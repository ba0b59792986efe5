"""The context that travels through the daemon's functions in place of its parts."""

from dataclasses import dataclass

from treenail.clocks import Clock
from treenail.daemon.checks.health import HealthChecker
from treenail.daemon.checks.preflight import PreflightChecker
from treenail.daemon.cluster.controller_config import ControllerConfigSync
from treenail.daemon.cluster.node_client import NodeClient
from treenail.daemon.cluster.pull_secrets import BootstrapRegistryFiles, PullSecrets
from treenail.daemon.configuration import drift_repair, machine
from treenail.daemon.configuration.config_cache import ConfigCache
from treenail.daemon.configuration.image_content import DeploymentImages
from treenail.daemon.configuration.mcd_state import MCDState
from treenail.daemon.configuration.trust_store import TrustStore
from treenail.daemon.local.requests import RequestFile
from treenail.host.ostree.admin import OstreePins, OstreeSoftReboot
from treenail.host.ostree.deployments import OSBackend
from treenail.host.system import state_file
from treenail.host.system.kernel import HostKernel
from treenail.host.systemd.logind import Logind
from treenail.update.state.ledger_record import Moment


@dataclass(frozen=True, slots=True)
class NodeInterfaces:
    """Everything that the daemon reads and changes."""

    os: OSBackend
    images: DeploymentImages
    power: Logind
    soft_reboots: OstreeSoftReboot
    pins: OstreePins
    kernel: HostKernel
    ledger: state_file.Ledger
    crash_record: state_file.CrashRecordFile
    cluster: NodeClient
    pull_secrets: PullSecrets
    bootstrap_registry: BootstrapRegistryFiles
    certificates: ControllerConfigSync
    trust_store: TrustStore
    requests: RequestFile
    mcd_state: MCDState
    configuration: machine.NodeConfiguration
    config_cache: ConfigCache
    drift: drift_repair.DriftMonitor
    preflight: PreflightChecker
    health: HealthChecker
    clock: Clock

    def read_moment(self) -> Moment:
        """Read both clocks and the boot ID. Raises `HostError`."""
        return Moment(self.clock.now(), self.kernel.read_boot_id(), self.clock.monotonic())
