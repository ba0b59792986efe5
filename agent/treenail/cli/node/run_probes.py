"""Construction of the pre-flight checks and the health checks."""

import os
from collections.abc import Callable

from treenail.clock import SystemClock
from treenail.daemon.checks.health import HealthChecker, HealthProbes, NodeSource
from treenail.daemon.checks.preflight import DeploymentSource, PreflightChecker, PreflightProbes
from treenail.daemon.settings.settings import BackendSetting, HealthSettings, PreflightSettings
from treenail.host.container.cri import ContainerRuntime
from treenail.host.container.registry import SkopeoClient
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.root import Root
from treenail.host.system.health_checks import HealthCheckDirectory
from treenail.host.system.kernel import HostKernel
from treenail.host.system.process import ProgramRunner
from treenail.host.system.state_file import Ledger
from treenail.host.systemd.bus import SystemBus
from treenail.host.systemd.logind import Logind
from treenail.host.systemd.systemd import Systemd
from treenail.host.systemd.timedate import Timedate

HEALTH_CHECK_DIRECTORY = "/etc/treenail/health.d"


def create_preflight(
    root: Root,
    bus: SystemBus,
    systemd: Systemd,
    os_: DeploymentSource,
    settings: PreflightSettings,
    backend: BackendSetting,
) -> PreflightChecker:
    """Create the pre-flight checks of this machine; ``os_`` reads its deployments."""
    clock = SystemClock()
    registry = SkopeoClient(ProgramRunner(clock, os.environ), timeout_s=settings.registry_s)
    probes = PreflightProbes(
        registry, systemd, Logind(bus), Timedate(bus), HostKernel(root), os_, Ledger(root)
    )
    stores = backend is BackendSetting.BOOTC
    return PreflightChecker(
        root, HostFiles(root), probes, clock, only_warn=settings.only_warn, has_image_store=stores
    )


def create_health_checks(
    root: Root,
    systemd: Systemd,
    cluster: NodeSource,
    settings: HealthSettings,
    *,
    alive: Callable[[], None],
) -> HealthChecker:
    """Create the health checks of a boot trial; ``alive`` is called between them."""
    clock = SystemClock()
    programs = ProgramRunner(clock, os.environ)
    runtime = ContainerRuntime(root, programs, timeout_s=settings.check_s)
    probes = HealthProbes(
        systemd, runtime, HealthCheckDirectory(root, programs, HEALTH_CHECK_DIRECTORY), cluster
    )
    return HealthChecker(probes, settings, clock, send_heartbeat=alive)
