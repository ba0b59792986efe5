"""A bus with rpm-ostreed on it and nothing else: the smallest machine."""

import shlex
from pathlib import Path

from treenail_lab import images
from treenail_lab.images import Catalogue, Image
from treenail_lab.machine import rootfs, settings
from treenail_lab.machine.bus.daemon import PrivateBus
from treenail_lab.machine.node.daemons import (
    RPM_OSTREE,
    check_length,
    environment,
    rpmostreed_command,
)
from treenail_lab.machine.ostree.sysroot import Sysroot
from treenail_lab.machine.settings import Settings


class OstreeHost:
    """A root booted from ``booted``, and a bus at ``address`` that starts rpm-ostreed on demand."""

    def __init__(
        self,
        directory: Path,
        *,
        booted: Image,
        images: tuple[Image, ...] = (),
        settings: Settings | None = None,
    ) -> None:
        self.root = directory / "root"
        self._catalogue = directory / "images.json"
        self._settings = directory / "settings.json"
        self._images = Catalogue((booted, *images))
        self._first_settings = settings or Settings()
        self._booted = booted
        command = rpmostreed_command(
            self.root, self._catalogue, self._settings, directory / "rpm-ostreed.pid"
        )
        self._bus = PrivateBus(
            directory,
            services={RPM_OSTREE: shlex.join(command)},
            environment=environment(directory),
            log=directory / "daemons.log",
        )
        self.address = self._bus.address

    @property
    def sysroot(self) -> Sysroot:
        """The deployments, read from the disk."""
        return Sysroot(self.root)

    def change(self, new: Settings) -> None:
        """Put other settings in force."""
        settings.save(new, self._settings)

    def reboot(self) -> None:
        """What a clean reboot does to the deployments; the services are started again."""
        self._bus.stop()
        self.sysroot.finalize()
        rootfs.boot(self.root)
        self._bus.start()

    def __enter__(self) -> "OstreeHost":
        check_length(self.root)
        images.save(self._images, self._catalogue)
        self.change(self._first_settings)
        rootfs.install(self.root, self._booted)
        rootfs.boot(self.root)
        self._bus.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bus.stop()
