"""Construction of the pre-flight checks and the health checks."""

from treenail.daemon import agent_settings
from treenail.daemon.checks import health, preflight
from treenail.daemon.cluster.node_client import NodeClient
from treenail.host.container.registry import SkopeoClient
from treenail.host.machine import Machine
from treenail.host.ostree import backend_settings, deployments
from treenail.host.system import health_probes

HEALTH_CHECK_DIRECTORY = "/etc/treenail/health.d"


def create_preflight(
    machine: Machine,
    os: deployments.OSBackend,
    settings: agent_settings.PreflightSettings,
    backend: backend_settings.BackendSetting,
) -> preflight.PreflightChecker:
    """Create the pre-flight checks of this machine; ``os`` reads its deployments."""
    return preflight.PreflightChecker(
        machine,
        os,
        SkopeoClient(machine.programs, machine.clock, timeout_s=settings.registry_s),
        only_warn=settings.only_warn,
        # bootc deploys from the storage of podman, which needs space for the image too.
        has_image_store=backend is backend_settings.BackendSetting.BOOTC,
    )


def create_health_checks(
    machine: Machine, cluster: NodeClient, settings: agent_settings.HealthSettings
) -> health.HealthChecker:
    """Create the health checks of a boot trial."""
    probes = health.HealthProbes(
        machine.systemd,
        health_probes.ContainerRuntime(machine.root, machine.programs, timeout_s=settings.check_s),
        health_probes.HealthCheckDirectory(machine.root, machine.programs, HEALTH_CHECK_DIRECTORY),
        cluster,
        health_probes.HostNetwork(machine.root),
        health_probes.KubeletFiles(machine.root),
    )
    return health.HealthChecker(probes, settings, machine.clock, send_heartbeat=machine.heartbeat)
