"""Facts about the running kernel and the booted system."""

import os
import re
from collections.abc import Callable

from treenail import deployment_change
from treenail.errors import FileError
from treenail.host.filesystem import atomic_files, root_directory

FIRST_COMMAND_LINE = "/var/lib/treenail/first-command-line"
"""The kernel command line of the machine's first boot, before treenail changed it."""
_LIMIT = 64 * 1024
_STAT_LIMIT = 1024 * 1024
_BOOT_TIME = re.compile(rb"^btime (\d+)$", re.MULTILINE)
# The OCI image specification uses the values of Go's GOARCH.
_OCI_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_ASSIGNMENT = re.compile(r"""\s*([A-Z0-9_]+)=(["']?)(.*)\2\s*""")
_ESCAPED = re.compile(r"""\\([$"'\\`])""")


class HostKernel:
    """Reads /proc, /run and os-release below a root; every call reads again."""

    def __init__(
        self,
        root: root_directory.Root,
        *,
        count_soft_reboots: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Use ``count_soft_reboots`` to ask systemd for its soft reboots on this kernel."""
        self._root = root
        self._files = atomic_files.HostFiles(root)
        self._read_soft_reboots = count_soft_reboots
        self._soft_reboots: tuple[int | None, ...] = ()

    def read_boot_id(self) -> str:
        """Return the kernel's boot ID, a UUID, with "+N" after N soft reboots.

        A soft reboot keeps the kernel and its boot ID. Raises `HostError`.
        """
        kernel, soft = self._read_text("/proc/sys/kernel/random/boot_id"), self.count_soft_reboots()
        return f"{kernel}+{soft}" if soft else kernel

    def read_host_name(self) -> str:
        """Return the host name of the kernel; empty if unknown. Raises `FileError`."""
        content = self._files.read_file("/proc/sys/kernel/hostname", limit=_LIMIT)
        return (content or b"").decode("utf-8", "replace").strip()

    def count_soft_reboots(self) -> int | None:
        """Return the soft reboots since the kernel started; None if systemd does not count them.

        Raises `BusError`.
        """
        # Ask once: a soft reboot ends every process, so the count is fixed for this one.
        if not self._soft_reboots:
            self._soft_reboots = (self._read_soft_reboots(),)
        return self._soft_reboots[0]

    def read_command_line(self) -> tuple[str, ...]:
        """Return the arguments of the running kernel, in order; raises `FileError`."""
        return deployment_change.split_arguments(self._read_text("/proc/cmdline"))

    def read_first_command_line(self) -> tuple[str, ...]:
        """Return the arguments of the first boot; empty if `treenail firstboot` recorded none."""
        content = self._files.read_file(FIRST_COMMAND_LINE, limit=_LIMIT)
        return deployment_change.split_arguments((content or b"").decode("utf-8", "replace"))

    def read_boot_time(self) -> float | None:
        """Return the boot time in seconds since the epoch; None if unknown."""
        content = self._files.read_file("/proc/stat", limit=_STAT_LIMIT)
        match = _BOOT_TIME.search(content or b"")
        return float(match[1]) if match else None

    def is_fips_enabled(self) -> bool:
        """Whether the kernel runs in FIPS mode; a kernel without FIPS support does not."""
        content = self._files.read_file("/proc/sys/crypto/fips_enabled", limit=_LIMIT)
        return (content or b"").strip() == b"1"

    def find_architecture(self) -> str:
        """Return the architecture by its OCI name, such as ``amd64``."""
        machine = os.uname().machine
        return _OCI_ARCHITECTURES.get(machine, machine)

    def read_os_release(self) -> dict[str, str]:
        """Return the fields of os-release; empty without the file.

        Lines that are not assignments are skipped, as os-release(5) requires.
        """
        content = self._files.read_file("/etc/os-release", limit=_LIMIT)
        if content is None:
            content = self._files.read_file("/usr/lib/os-release", limit=_LIMIT) or b""
        lines = map(_ASSIGNMENT.fullmatch, content.decode("utf-8", "replace").splitlines())
        return {line[1]: _ESCAPED.sub(r"\1", line[3]) for line in lines if line}

    def is_ostree_booted(self) -> bool:
        """Whether the system was booted from an OSTree deployment."""
        # ostree creates it early in each boot of a deployment.
        return self._root.resolve_path("/run/ostree-booted").exists()

    def _read_text(self, path: str) -> str:
        content = self._files.read_file(path, limit=_LIMIT)
        if content is None:
            raise FileError(
                f"cannot read {self._root.resolve_path(path)}: it does not exist",
                remedy=f"mount /proc below {self._root.prefix}",
            )
        return content.decode("utf-8", "replace").strip()
