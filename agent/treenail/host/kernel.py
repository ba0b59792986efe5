"""What the running kernel and the booted system say about themselves."""

import os
import re

from treenail.errors import FileError
from treenail.host.arguments import split_arguments
from treenail.host.files import Files
from treenail.host.root import Root

_LIMIT = 64 * 1024
_STAT_LIMIT = 1024 * 1024
_BOOTED = re.compile(rb"^btime (\d+)$", re.MULTILINE)
_OCI = {"x86_64": "amd64", "aarch64": "arm64"}
_ASSIGNMENT = re.compile(r"""\s*([A-Z0-9_]+)=(["']?)(.*)\2\s*""")
_ESCAPED = re.compile(r"""\\([$"'\\`])""")


class Kernel:
    """Answers from /proc, /run and os-release below a root; each is read when asked for."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._files = Files(root)

    def boot_id(self) -> str:
        """A UUID that is another one after every boot; raises `FileError` when there is none."""
        return self._text("/proc/sys/kernel/random/boot_id")

    def command_line(self) -> tuple[str, ...]:
        """The arguments the kernel was booted with, in order; raises `FileError`."""
        return split_arguments(self._text("/proc/cmdline"))

    def booted_at(self) -> float | None:
        """When the machine was booted, in seconds since the epoch; None if it can't be told."""
        content = self._files.read("/proc/stat", limit=_STAT_LIMIT)
        found = _BOOTED.search(content or b"")
        return float(found[1]) if found else None

    def fips_enabled(self) -> bool:
        """Whether the kernel runs in FIPS mode; a kernel that does not know of it does not."""
        content = self._files.read("/proc/sys/crypto/fips_enabled", limit=_LIMIT)
        return (content or b"").strip() == b"1"

    def architecture(self) -> str:
        """The machine's, as OCI names it, such as ``amd64``."""
        machine = os.uname().machine
        return _OCI.get(machine, machine)

    def os_release(self) -> dict[str, str]:
        """The booted system's os-release fields; none where there is no such file.

        Lines that are no assignment are passed over, as os-release(5) asks for.
        """
        content = self._files.read("/etc/os-release", limit=_LIMIT)
        if content is None:
            content = self._files.read("/usr/lib/os-release", limit=_LIMIT) or b""
        lines = map(_ASSIGNMENT.fullmatch, content.decode("utf-8", "replace").splitlines())
        return {line[1]: _ESCAPED.sub(r"\1", line[3]) for line in lines if line}

    def is_ostree(self) -> bool:
        """Whether the system was booted from an OSTree deployment."""
        return self._root.path("/run/ostree-booted").exists()

    def _text(self, path: str) -> str:
        content = self._files.read(path, limit=_LIMIT)
        if content is None:
            raise FileError(
                f"there is no {self._root.path(path)}",
                remedy=f"have /proc mounted below {self._root.prefix}",
            )
        return content.decode("utf-8", "replace").strip()
