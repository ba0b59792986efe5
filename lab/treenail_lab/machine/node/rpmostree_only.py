"""The smallest machine: a bus with rpm-ostreed."""

import shlex
from pathlib import Path

from treenail_lab import images
from treenail_lab.images import Image, ImageCatalogue
from treenail_lab.machine import rootfs, settings
from treenail_lab.machine.bus.daemon import PrivateBus
from treenail_lab.machine.node.daemons import (
    RPM_OSTREE_NAME,
    build_environment,
    build_rpmostreed_command,
    check_socket_length,
)
from treenail_lab.machine.ostree.sysroot import Sysroot
from treenail_lab.machine.settings import MachineSettings


class RpmOstreeHost:
    """A root booted from ``booted``, and a bus at ``address`` that activates rpm-ostreed."""

    def __init__(
        self,
        directory: Path,
        *,
        booted: Image,
        images: tuple[Image, ...] = (),
        settings: MachineSettings | None = None,
    ) -> None:
        self.root = directory / "root"
        self._catalogue = directory / "images.json"
        self._settings = directory / "settings.json"
        self._images = ImageCatalogue((booted, *images))
        self._first_settings = settings or MachineSettings()
        self._booted = booted
        command = build_rpmostreed_command(
            self.root, self._catalogue, self._settings, directory / "rpm-ostreed.pid"
        )
        self._bus = PrivateBus(
            directory,
            services={RPM_OSTREE_NAME: shlex.join(command)},
            environment=build_environment(directory),
            log=directory / "daemons.log",
        )
        self.address = self._bus.address

    @property
    def sysroot(self) -> Sysroot:
        """Return the deployments, read from the disk."""
        return Sysroot(self.root)

    def change_settings(self, new: MachineSettings) -> None:
        """Replace the settings."""
        settings.save_settings(new, self._settings)

    def reboot(self) -> None:
        """Finalize and boot as a clean reboot does, and start the bus again."""
        self._bus.stop()
        self.sysroot.finalize_staged()
        rootfs.boot_root(self.root)
        self._bus.start()

    def __enter__(self) -> "RpmOstreeHost":
        check_socket_length(self.root)
        images.save_catalogue(self._images, self._catalogue)
        self.change_settings(self._first_settings)
        rootfs.install_root(self.root, self._booted)
        rootfs.boot_root(self.root)
        self._bus.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bus.stop()
