"""Readings of this machine for health checks.

The socket of the container runtime, files of the kubelet, the routing tables, and the checks of the
administrator: programs in a directory, which pass with exit code 0.
"""

import os
import shutil
import socket
import stat
from pathlib import Path

from treenail import errors, process
from treenail.host.filesystem import atomic_files, root_directory

RUNTIME_SOCKETS = {
    "crio.service": "/run/crio/crio.sock",
    "containerd.service": "/run/containerd/containerd.sock",
}
"""The unit of each supported runtime, and the socket that it listens on."""


class ContainerRuntime:
    """Checks whether the container runtime answers."""

    def __init__(
        self, root: root_directory.Root, programs: process.ProgramRunner, *, timeout_s: float
    ) -> None:
        self._root = root
        self._programs = programs
        self._timeout_s = timeout_s

    def find_problem(self, unit: str) -> str:
        """Return why the runtime of this unit does not answer; empty when it does."""
        path = self._root.resolve_path(RUNTIME_SOCKETS[unit])
        problem = self._check_socket(path)
        if problem or shutil.which("crictl") is None:
            return problem
        # Connecting is not enough: the kernel accepts connections to a runtime that hangs.
        address = f"unix://{path}"
        # Without the options crictl tries the sockets of several runtimes in turn.
        argv = ["crictl", "--runtime-endpoint", address, "--image-endpoint", address, "version"]
        try:
            self._programs.run_command(argv, timeout_s=self._timeout_s)
        except errors.CommandError as error:
            return str(error)
        return ""

    def _check_socket(self, path: Path) -> str:
        try:
            directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            return f"cannot connect to {path}: {error.strerror}"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as end:
                end.settimeout(self._timeout_s)
                # unix(7) limits the address to 107 bytes; the root may be a longer path.
                end.connect(f"/proc/self/fd/{directory}/{path.name}")
        except OSError as error:
            return f"cannot connect to {path}: {error.strerror or error}"
        finally:
            os.close(directory)
        return ""


MAX_CHECKS = 64
"""Maximum number of checks in a directory."""


class HealthCheckDirectory:
    """Health checks in a directory below the root."""

    def __init__(
        self, root: root_directory.Root, programs: process.ProgramRunner, directory: str
    ) -> None:
        self._root = root
        self._programs = programs
        self._directory = directory

    def list_checks(self) -> tuple[str, ...]:
        """Return the sorted names of the executable files, without hidden ones.

        Raises `FileError` when the directory is unreadable or contains more than `MAX_CHECKS`.
        """
        directory = self._root.resolve_path(self._directory)
        try:
            names = sorted(path.name for path in directory.iterdir())
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise errors.FileError(f"cannot read {directory}: {error.strerror}") from error
        checks = tuple(name for name in names if self._is_executable(name))
        if len(checks) > MAX_CHECKS:
            raise errors.FileError(
                f"cannot run the checks in {directory}: {len(checks)} exceed "
                f"the limit of {MAX_CHECKS}",
                remedy="combine several checks into one program",
            )
        return checks

    def run_check(self, name: str, *, timeout_s: float) -> str:
        """Run a check; return its error, empty when it passes."""
        path = self._root.resolve_path(f"{self._directory}/{name}")
        try:
            self._programs.run_command([str(path)], timeout_s=timeout_s)
        except errors.CommandError as error:
            return str(error).replace(str(path), name)
        return ""

    def _is_executable(self, name: str) -> bool:
        try:
            mode = self._root.resolve_path(f"{self._directory}/{name}").stat().st_mode
        except (OSError, errors.FileError):
            return False
        return stat.S_ISREG(mode) and bool(mode & 0o111) and not name.startswith(".")


# The kubelet keeps its new key here until its certificate is issued (tmpPrivateKeyFile in
# pkg/kubelet/certificate/bootstrap of Kubernetes), and removes it then.
_PENDING_KEY = "/var/lib/kubelet/pki/kubelet-client.key.tmp"


class KubeletFiles:
    """Reads files of the kubelet below a root."""

    def __init__(self, root: root_directory.Root) -> None:
        self._files = atomic_files.HostFiles(root)

    def is_waiting_for_certificate(self) -> bool:
        """Return whether the kubelet requested a client certificate that is not yet issued.

        Raises `FileError`.
        """
        return self._files.has_entry(_PENDING_KEY)


_IPV4_ROUTES = "/proc/net/route"
_IPV6_ROUTES = "/proc/net/ipv6_route"
# linux/route.h
_RTF_UP = 0x1
_RTF_REJECT = 0x200


class HostNetwork:
    """Reads the routing tables of the kernel below a root; every call reads again."""

    def __init__(self, root: root_directory.Root) -> None:
        self._files = atomic_files.HostFiles(root)

    def has_default_route(self) -> bool | None:
        """Return whether a default route is up, of IPv4 or IPv6; None if that is unknown."""
        tables = (self._read_rows(_IPV4_ROUTES), self._read_rows(_IPV6_ROUTES))
        if tables == (None, None):
            return None
        ipv4, ipv6 = tables
        return any(_is_ipv4_default(row) for row in ipv4 or ()) or any(
            _is_ipv6_default(row) for row in ipv6 or ()
        )

    def _read_rows(self, path: str) -> tuple[list[str], ...] | None:
        try:
            content = self._files.read_file(path)
        except errors.FileError:
            return None
        if content is None:
            return None
        return tuple(line.split() for line in content.decode("ascii", "replace").splitlines())


def _is_ipv4_default(row: list[str]) -> bool:
    # Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT (net/ipv4/fib_trie.c)
    return len(row) > 7 and row[1] == row[7] == "0" * 8 and _is_usable(row[3])


def _is_ipv6_default(row: list[str]) -> bool:
    # Destination, prefix length, source, prefix length, next hop, metric, reference count, use
    # count, flags, device (net/ipv6/route.c). The kernel adds a rejecting default route on lo.
    if len(row) < 10 or row[9] == "lo":
        return False
    return row[0] == "0" * 32 and row[1] == "00" and _is_usable(row[8])


def _is_usable(flags: str) -> bool:
    try:
        value = int(flags, 16)
    except ValueError:
        return False
    return bool(value & _RTF_UP) and not value & _RTF_REJECT
