"""What looks at the machine before an update and after its reboot, wired."""

import os
from collections.abc import Callable

from treenail.clock import SystemClock
from treenail.daemon.checks.health import Cluster, Health
from treenail.daemon.checks.health import Probes as HealthProbes
from treenail.daemon.checks.preflight import OperatingSystem, Preflight
from treenail.daemon.checks.preflight import Probes as PreflightProbes
from treenail.daemon.settings.settings import Backend, Trial
from treenail.daemon.settings.settings import Preflight as PreflightSettings
from treenail.host.container.cri import Runtime
from treenail.host.container.registry import Registry
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.root import Root
from treenail.host.system.health_checks import Checks
from treenail.host.system.kernel import Kernel
from treenail.host.system.process import Programs
from treenail.host.system.state_file import Ledger
from treenail.host.systemd.bus import SystemBus
from treenail.host.systemd.logind import Logind
from treenail.host.systemd.systemd import Systemd
from treenail.host.systemd.timedate import Timedate

CHECKS = "/etc/treenail/health.d"


def preflight(
    root: Root,
    bus: SystemBus,
    systemd: Systemd,
    os_: OperatingSystem,
    wanted: PreflightSettings,
    backend: Backend,
) -> Preflight:
    """The pre-flight of this machine, whose deployments ``os_`` knows."""
    clock = SystemClock()
    registry = Registry(Programs(clock, os.environ), limit_s=wanted.registry_s)
    probes = PreflightProbes(
        registry, systemd, Logind(bus), Timedate(bus), Kernel(root), os_, Ledger(root)
    )
    stores = backend is Backend.BOOTC
    return Preflight(root, Files(root), probes, clock, only_warn=wanted.only_warn, stores=stores)


def health(
    root: Root, systemd: Systemd, cluster: Cluster, limits: Trial, *, alive: Callable[[], None]
) -> Health:
    """The checks of a boot on trial; ``alive`` is called between them."""
    clock = SystemClock()
    programs = Programs(clock, os.environ)
    runtime = Runtime(root, programs, limit_s=limits.check_s)
    probes = HealthProbes(systemd, runtime, Checks(root, programs, CHECKS), cluster)
    return Health(probes, limits, clock, alive=alive)
