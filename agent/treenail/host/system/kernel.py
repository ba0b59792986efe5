"""What the running kernel and the booted system say about themselves."""

import os
import re
from collections.abc import Callable

from treenail.errors import FileError
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.root import Root
from treenail.host.system.kernel_arguments import split_arguments

_LIMIT = 64 * 1024
_STAT_LIMIT = 1024 * 1024
_BOOT_TIME = re.compile(rb"^btime (\d+)$", re.MULTILINE)
_OCI_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_ASSIGNMENT = re.compile(r"""\s*([A-Z0-9_]+)=(["']?)(.*)\2\s*""")
_ESCAPED = re.compile(r"""\\([$"'\\`])""")


class HostKernel:
    """Answers from /proc, /run and os-release below a root; each is read when asked for."""

    def __init__(
        self, root: Root, *, count_soft_reboots: Callable[[], int | None] = lambda: None
    ) -> None:
        """``count_soft_reboots`` asks systemd how often user space was started on this kernel."""
        self._root = root
        self._files = HostFiles(root)
        self._read_soft_reboots = count_soft_reboots
        self._soft_reboots: tuple[int | None, ...] = ()

    def read_boot_id(self) -> str:
        """The kernel's UUID, which is another one after every boot.

        After a soft reboot, which keeps it, with a plus and how many there were. Raises `HostError`
        when it can't be told.
        """
        kernel, soft = self._read_text("/proc/sys/kernel/random/boot_id"), self.count_soft_reboots()
        return f"{kernel}+{soft}" if soft else kernel

    def count_soft_reboots(self) -> int | None:
        """How many there were since the kernel was started; None if systemd does not count them.

        Raises `BusError`. Asked once, for no process outlives a soft reboot.
        """
        if not self._soft_reboots:
            self._soft_reboots = (self._read_soft_reboots(),)
        return self._soft_reboots[0]

    def read_command_line(self) -> tuple[str, ...]:
        """The arguments the kernel was booted with, in order; raises `FileError`."""
        return split_arguments(self._read_text("/proc/cmdline"))

    def read_boot_time(self) -> float | None:
        """When the machine was booted, in seconds since the epoch; None if it can't be told."""
        content = self._files.read_file("/proc/stat", limit=_STAT_LIMIT)
        found = _BOOT_TIME.search(content or b"")
        return float(found[1]) if found else None

    def is_fips_enabled(self) -> bool:
        """Whether the kernel runs in FIPS mode; a kernel that does not know of it does not."""
        content = self._files.read_file("/proc/sys/crypto/fips_enabled", limit=_LIMIT)
        return (content or b"").strip() == b"1"

    def find_architecture(self) -> str:
        """The machine's, as OCI names it, such as ``amd64``."""
        machine = os.uname().machine
        return _OCI_ARCHITECTURES.get(machine, machine)

    def read_os_release(self) -> dict[str, str]:
        """The booted system's os-release fields; none where there is no such file.

        Lines that are no assignment are passed over, as os-release(5) asks for.
        """
        content = self._files.read_file("/etc/os-release", limit=_LIMIT)
        if content is None:
            content = self._files.read_file("/usr/lib/os-release", limit=_LIMIT) or b""
        lines = map(_ASSIGNMENT.fullmatch, content.decode("utf-8", "replace").splitlines())
        return {line[1]: _ESCAPED.sub(r"\1", line[3]) for line in lines if line}

    def is_ostree_booted(self) -> bool:
        """Whether the system was booted from an OSTree deployment."""
        return self._root.resolve_path("/run/ostree-booted").exists()

    def _read_text(self, path: str) -> str:
        content = self._files.read_file(path, limit=_LIMIT)
        if content is None:
            raise FileError(
                f"there is no {self._root.resolve_path(path)}",
                remedy=f"have /proc mounted below {self._root.prefix}",
            )
        return content.decode("utf-8", "replace").strip()
