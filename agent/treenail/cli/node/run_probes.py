"""Construction of the pre-flight checks and the health checks."""

from treenail.daemon.agent_settings import HealthSettings, PreflightSettings
from treenail.daemon.checks.health import HealthChecker, HealthProbes
from treenail.daemon.checks.preflight import PreflightChecker
from treenail.daemon.interfaces import ClusterAccess, OSBackend
from treenail.host.container.registry import SkopeoClient
from treenail.host.machine import Machine
from treenail.host.ostree.backends import BackendSetting
from treenail.host.system.health_probes import (
    ContainerRuntime,
    HealthCheckDirectory,
    HostNetwork,
    KubeletFiles,
)

HEALTH_CHECK_DIRECTORY = "/etc/treenail/health.d"


def create_preflight(
    machine: Machine,
    os: OSBackend,
    settings: PreflightSettings,
    backend: BackendSetting,
) -> PreflightChecker:
    """Create the pre-flight checks of this machine; ``os`` reads its deployments."""
    return PreflightChecker(
        machine,
        os,
        SkopeoClient(machine.programs, machine.clock, timeout_s=settings.registry_s),
        only_warn=settings.only_warn,
        # bootc deploys from the storage of podman, which needs space for the image too.
        has_image_store=backend is BackendSetting.BOOTC,
    )


def create_health_checks(
    machine: Machine, cluster: ClusterAccess, settings: HealthSettings
) -> HealthChecker:
    """Create the health checks of a boot trial."""
    probes = HealthProbes(
        machine.systemd,
        ContainerRuntime(machine.root, machine.programs, timeout_s=settings.check_s),
        HealthCheckDirectory(machine.root, machine.programs, HEALTH_CHECK_DIRECTORY),
        cluster,
        HostNetwork(machine.root),
        KubeletFiles(machine.root),
    )
    return HealthChecker(probes, settings, machine.clock, send_heartbeat=machine.heartbeat)
