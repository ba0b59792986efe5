"""The container runtime, as the kubelet reaches it: its CRI socket."""

import os
import shutil
import socket
from pathlib import Path

from treenail.errors import CommandError
from treenail.host.filesystem.root import Root
from treenail.host.system.command import CommandRunner

RUNTIME_SOCKETS = {
    "crio.service": "/run/crio/crio.sock",
    "containerd.service": "/run/containerd/containerd.sock",
}
"""The units of the runtimes there are, and where each listens."""


class ContainerRuntime:
    """Asks whether the container runtime answers."""

    def __init__(self, root: Root, programs: CommandRunner, *, timeout_s: float) -> None:
        self._root = root
        self._programs = programs
        self._timeout_s = timeout_s

    def find_problem(self, unit: str) -> str:
        """Why the runtime of this unit does not answer; empty when it does."""
        path = self._root.resolve_path(RUNTIME_SOCKETS[unit])
        problem = self._check_socket(path)
        if problem or shutil.which("crictl") is None:
            return problem
        # A runtime that hangs still has its connections taken, by the kernel.
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
            return f"there is no {path}: {error.strerror}"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as end:
                end.settimeout(self._timeout_s)
                # The address may be 107 bytes long, and a root be anywhere.
                end.connect(f"/proc/self/fd/{directory}/{path.name}")
        except OSError as error:
            return f"{path} does not answer: {error.strerror or error}"
        finally:
            os.close(directory)
        return ""
