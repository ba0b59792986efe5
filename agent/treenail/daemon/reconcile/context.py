"""The context that travels through the daemon's functions in place of its parts."""

from dataclasses import dataclass

from treenail.clocks import Clock
from treenail.daemon.checks.health import HealthChecker
from treenail.daemon.checks.preflight import PreflightChecker
from treenail.daemon.cluster import controller_config, node_client
from treenail.daemon.cluster.pull_secrets import BootstrapRegistryFiles, PullSecrets
from treenail.daemon.configuration import drift_repair, image_content, node_configuration
from treenail.daemon.configuration.config_cache import ConfigCache
from treenail.daemon.configuration.mcd_state import MCDState
from treenail.daemon.configuration.trust_store import TrustStore
from treenail.daemon.local.requests import RequestFile
from treenail.host.ostree import admin, deployments
from treenail.host.system import state_file
from treenail.host.system.kernel import HostKernel
from treenail.host.systemd.logind import Logind
from treenail.update.state.ledger_record import Moment


@dataclass(frozen=True, slots=True)
class NodeInterfaces:
    """Everything that the daemon reads and changes."""

    os: deployments.OSBackend
    images: image_content.DeploymentImages
    power: Logind
    soft_reboots: admin.OstreeSoftReboot
    pins: admin.OstreePins
    kernel: HostKernel
    ledger: state_file.Ledger
    crash_record: state_file.CrashRecordFile
    cluster: node_client.NodeClient
    pull_secrets: PullSecrets
    bootstrap_registry: BootstrapRegistryFiles
    certificates: controller_config.ControllerConfigSync
    trust_store: TrustStore
    requests: RequestFile
    mcd_state: MCDState
    configuration: node_configuration.NodeConfiguration
    config_cache: ConfigCache
    drift: drift_repair.DriftMonitor
    preflight: PreflightChecker
    health: HealthChecker
    clock: Clock
    is_hosted: bool = False

    def read_moment(self) -> Moment:
        """Read both clocks and the boot ID. Raises `HostError`."""
        return Moment(self.clock.now(), self.kernel.read_boot_id(), self.clock.monotonic())
