"""The container runtime's CRI socket, which the kubelet connects to."""

import os
import shutil
import socket
from pathlib import Path

from treenail.errors import CommandError
from treenail.host.filesystem.root import Root
from treenail.process import ProgramRunner

RUNTIME_SOCKETS = {
    "crio.service": "/run/crio/crio.sock",
    "containerd.service": "/run/containerd/containerd.sock",
}
"""The unit of each supported runtime, and the socket that it listens on."""


class ContainerRuntime:
    """Checks whether the container runtime answers."""

    def __init__(self, root: Root, programs: ProgramRunner, *, timeout_s: float) -> None:
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
        argv = ["crictl", "--runtime-endpoint", address, "--image-endpoint", address, "version"]
        try:
            self._programs.run_command(argv, timeout_s=self._timeout_s)
        except CommandError as error:
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
