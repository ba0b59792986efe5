"""A root directory with bootc's stand-in, and a systemd on a bus that runs it."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tests.contract.os_machines import Images
from treenail.clocks import SystemClock
from treenail.daemon.checks.signature_policy import needs_signature
from treenail.host.bootc.backend import (
    PULL_UNIT,
    ROLLBACK_UNIT,
    SWITCH_UNIT,
    UNDEPLOY_UNIT,
    BootcBackend,
)
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.ostree.backend_settings import TransactionLimits
from treenail.host.systemd.system_bus import SystemBus
from treenail.host.systemd.transient import TransientUnits
from treenail_lab import images
from treenail_lab.images import ARCHITECTURE, ImageCatalogue, make_image, make_manifest_list
from treenail_lab.machine import rootfs, settings
from treenail_lab.machine.ostree.sysroot import Sysroot
from treenail_lab.machine.programs import commands
from treenail_lab.machine.settings import MachineSettings

HERE = make_image("os/node", "1.0", 1_000_000)
THERE = make_image("os/node", "2.0", 1_000_000, labels={"machineconfig": "rendered-worker-2"})
BROKEN = make_image("os/node", "2.1", 1_000_000, faults={"pull": "corrupt layer"})
BAD = make_image("os/node", "2.2", 1_000_000, faults={"stage": "no space left on device"})
BAD_AT_BOOT = make_image("os/node", "2.3", 1_000_000, faults={"boot": "kernel panic"})
UNSIGNED = make_image("os/node", "2.4", 1_000_000, faults={"unsigned": "no signature exists"})
LISTED, FOREIGN = make_manifest_list(
    make_image("os/node", "2.5", 1_000_000, architecture=ARCHITECTURE),
    make_image("os/node", "2.5", 1_000_000, architecture="s390x"),
)
REPOSITORY = HERE.pull_spec.partition("@")[0]
QUICK = MachineSettings(staging_s=0.02)
LIMITS = TransactionLimits()
UNITS = (PULL_UNIT, SWITCH_UNIT, ROLLBACK_UNIT, UNDEPLOY_UNIT)


class BootcMachine:
    """``address`` is of the bus; ``power_cycle`` is what a reboot does to the services."""

    images = Images(
        HERE.pull_spec,
        THERE.pull_spec,
        BROKEN.pull_spec,
        listed=LISTED.list_pull_spec,
        listed_manifest=LISTED.digest,
    )

    def __init__(self, directory: Path, address: str, power_cycle: Callable[[], None]) -> None:
        self.root = directory / "root"
        self.address = address
        self._power_cycle = power_cycle
        self._settings = directory / "settings.json"
        self._opened = ExitStack()
        catalogue = directory / "images.json"
        images.save_catalogue(
            ImageCatalogue((HERE, THERE, BROKEN, BAD, BAD_AT_BOOT, UNSIGNED, LISTED, FOREIGN)),
            catalogue,
        )
        self.change(QUICK)
        rootfs.install_root(self.root, HERE)
        rootfs.boot_root(self.root)
        commands.install_programs(self.root, catalogue, self._settings)

    @property
    def sysroot(self) -> Sysroot:
        return Sysroot(self.root)

    def change(self, new: MachineSettings) -> None:
        settings.save_settings(new, self._settings)

    def os(self, limits: TransactionLimits = LIMITS, *, status_s: float = 30.0) -> BootcBackend:
        machine = Machine(Root(self.root), clock=SystemClock(), bus=self._bus(), limits=limits)
        verified = partial(needs_signature, machine.files)
        return BootcBackend(machine, status_s=status_s, needs_signature=verified)

    def set_policy(self, policy: object) -> None:
        path = self.root / "etc/containers/policy.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(policy))

    def units(self) -> TransientUnits:
        return TransientUnits(self._bus())

    def reboot(self) -> None:
        self._opened.close()
        self._power_cycle()
        self.sysroot.finalize_staged()
        rootfs.boot_root(self.root)

    def slow_down(self) -> None:
        self.change(MachineSettings(pull_bytes_per_s=1000))

    def close(self) -> None:
        self._opened.close()

    def _bus(self) -> SystemBus:
        bus = SystemBus(self.address)
        self._opened.callback(bus.close_connection)
        return bus
