"""Checks of the future bootstrap host: space, programs, ports and clock."""

import errno
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from treenail import clocks, errors
from treenail.builder.disk_space import read_disk_space
from treenail.controllers.handover import image_mode
from treenail.installer import install_plan
from treenail.installer.bootstrap import registry_process
from treenail.installer.directory.install_files import InstallDirectory
from treenail.installer.images.pool_image import get_host_architecture

CONFIG_PORT, REGISTRY_PORT = 22623, 22625
"""Default ports of the config server and of the bootstrap registry."""
_UNPACKED = 4
"""Bytes on the disk for each compressed byte of a base image during a build."""
_SKEW_S = 3600.0


@dataclass(frozen=True, slots=True)
class HostChecker:
    """Checks this host; changes nothing."""

    clock: clocks.Clock
    find_program: Callable[[str], str | None] = shutil.which
    architecture: str = field(default_factory=get_host_architecture)
    ports: Sequence[int] = (CONFIG_PORT, REGISTRY_PORT)

    def find_problems(
        self,
        directory: InstallDirectory,
        settings: image_mode.ImageMode,
        plans: Sequence[install_plan.PoolInstallPlan],
        base_size: int,
    ) -> list[str]:
        """Return why this host cannot install; ``plans`` are those of its pools.

        ``base_size`` are the compressed bytes of the largest base image; 0 if unknown.
        """
        has_registry = settings.registry is image_mode.RegistryType.BOOTSTRAP
        problems = [*self._check_programs(plans, has_registry=has_registry)]
        place = _find_existing(directory.registry)
        if has_registry:
            try:
                registry_process.check_storage(place, registry_process.DEFAULT_LIMIT)
            except errors.TreenailError as error:
                problems.append(f"{error}; {error.remedy}")
        if any(plan.source is install_plan.InstallImageSource.BUILD for plan in plans):
            problems += self._check_build_space(place, base_size)
        ports = self.ports if has_registry else self.ports[:1]
        problems += [text for port in ports if (text := _check_port(port))]
        return [*problems, *self._check_clock(directory)]

    def _check_programs(
        self, plans: Sequence[install_plan.PoolInstallPlan], *, has_registry: bool
    ) -> list[str]:
        problems = []
        needs_build = any(plan.source is install_plan.InstallImageSource.BUILD for plan in plans)
        if needs_build and self.find_program("buildah") is None:
            problems.append(
                "cannot build: buildah is not installed; run: apt-get install buildah, or: dnf "
                "install buildah"
            )
        if has_registry:
            try:
                registry_process.find_registry_program(self.find_program)
            except errors.TreenailError as error:
                problems.append(f"{error}; {error.remedy}")
        return problems

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
        space = read_disk_space(place)
        if space is None:
            return [f"cannot read the free space of {place}; check it: df -h '{place}'"]
        free = space.free_bytes
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
            times = [path.stat().st_mtime for path in directory.manifests.iterdir()]
        except OSError:
            return []
        newest = max(times, default=0.0)
        if newest <= now + _SKEW_S:
            return []
        text = (
            f"the clock of this host is wrong: it is {clocks.format_rfc3339(now)}, and a manifest "
            f"is from {clocks.format_rfc3339(newest)}; machines would refuse the certificates; "
            "set the clock: timedatectl set-ntp true, or chronyc makestep"
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
