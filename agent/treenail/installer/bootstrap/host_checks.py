"""Checks of a host that is going to be the bootstrap host: space, programs, ports and clock."""

import errno
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from treenail.builder.buildah.disk_space import read_disk_space
from treenail.clocks import Clock, format_rfc3339
from treenail.controllers.handover.image_mode import ImageMode, RegistryType
from treenail.errors import TreenailError
from treenail.installer.bootstrap.registry_process import (
    DEFAULT_LIMIT,
    check_storage,
    find_registry_program,
)
from treenail.installer.directory.install_files import InstallDirectory
from treenail.installer.images.pool_image import get_host_architecture
from treenail.installer.install_plan import InstallImageSource, PoolInstallPlan

CONFIG_PORT, REGISTRY_PORT = 22623, 22625
"""Default ports of the config server and of the bootstrap registry."""
_UNPACKED = 4
"""Bytes on the disk for each compressed byte of a base image during a build."""
_SKEW_S = 3600.0


@dataclass(frozen=True, slots=True)
class HostChecker:
    """Checks this host; changes nothing."""

    clock: Clock
    find_program: Callable[[str], str | None] = shutil.which
    architecture: str = field(default_factory=get_host_architecture)
    ports: Sequence[int] = (CONFIG_PORT, REGISTRY_PORT)

    def find_problems(
        self,
        directory: InstallDirectory,
        settings: ImageMode,
        plans: Sequence[PoolInstallPlan],
        base_size: int,
    ) -> list[str]:
        """Return why this host cannot install; ``plans`` are those of its pools.

        ``base_size`` are the compressed bytes of the largest base image; 0 if unknown.
        """
        has_registry = settings.registry is RegistryType.BOOTSTRAP
        found = [*self._check_programs(plans, has_registry=has_registry)]
        place = _find_existing(directory.registry)
        if has_registry:
            try:
                check_storage(place, DEFAULT_LIMIT)
            except TreenailError as error:
                found.append(f"{error}; {error.remedy}")
        if any(each.source is InstallImageSource.BUILD for each in plans):
            found += self._check_build_space(place, base_size)
        ports = self.ports if has_registry else self.ports[:1]
        found += [text for port in ports if (text := _check_port(port))]
        return [*found, *self._check_clock(directory)]

    def _check_programs(self, plans: Sequence[PoolInstallPlan], *, has_registry: bool) -> list[str]:
        found = []
        needs_build = any(each.source is InstallImageSource.BUILD for each in plans)
        if needs_build and self.find_program("buildah") is None:
            found.append(
                "cannot build: buildah is not installed; run: apt-get install buildah, or: dnf "
                "install buildah"
            )
        if has_registry:
            try:
                find_registry_program(self.find_program)
            except TreenailError as error:
                found.append(f"{error}; {error.remedy}")
        return found

    def check_architectures(self, wanted: dict[str, str]) -> list[str]:
        """Return why this host cannot build for the architectures of pools."""
        return [
            f"cannot build the image of pool {pool} for {architecture} on this host, which is "
            f"{self.architecture}; use a bootstrap host of the same architecture, or a pre-built "
            "image"
            for pool, architecture in sorted(wanted.items())
            if architecture != self.architecture
        ]

    def _check_build_space(self, place: Path, base_size: int) -> list[str]:
        needed = max(base_size, 1_000_000_000) * _UNPACKED
        found = read_disk_space(place)
        if found is None:
            return [f"cannot read the free space of {place}; check it: df -h '{place}'"]
        free = found.free_bytes
        if free >= needed:
            return []
        text = (
            f"cannot build: the file system of {place} has {free / 1e9:.1f} GB free, and the build "
            f"needs about {needed / 1e9:.1f} GB; free space: df -h '{place}'"
        )
        return [text]

    def _check_clock(self, directory: InstallDirectory) -> list[str]:
        """Compare the clock with the manifests: they were written before now."""
        now = self.clock.now()
        try:
            times = [each.stat().st_mtime for each in directory.manifests.iterdir()]
        except OSError:
            return []
        newest = max(times, default=0.0)
        if newest <= now + _SKEW_S:
            return []
        text = (
            f"the clock of this host is wrong: it is {format_rfc3339(now)}, and a manifest is from "
            f"{format_rfc3339(newest)}; machines would refuse the certificates; set the clock: "
            "timedatectl set-ntp true, or chronyc makestep"
        )
        return [text]


def _find_existing(path: Path) -> Path:
    """Return the path, or the nearest directory above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _check_port(port: int) -> str:
    # As the servers listen; a kernel may have no IPv6.
    has_both = socket.has_dualstack_ipv6()
    family, host = (socket.AF_INET6, "::") if has_both else (socket.AF_INET, "")
    try:
        socket.create_server((host, port), family=family, dualstack_ipv6=has_both).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return (
                f"port {port} is in use; find the program: ss -ltnp 'sport = :{port}', and stop it "
                "or choose another port"
            )
    return ""
