"""Sandboxes and containers of pods as processes of this host.

The memory of containers is limited by cgroups, where this process may create them. A pod reaches a
port of the host's loopback, which is the registry's, through a Unix socket (`PortForward`).
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treenail.errors import HostError
from treenail_lab.kubelet.pod_spec import CAPABILITIES, Container
from treenail_lab.kubelet.processes import container_process, sandbox_process
from treenail_lab.lifetime.fork_server import LabProcess
from treenail_lab.lifetime.interpreter import PYTHON_MODULE, build_python_path
from treenail_lab.lifetime.owner import owner

_MOUNT = Path("/sys/fs/cgroup")
_PREFIX = "treenail-lab-"


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A cgroup with a memory limit."""

    path: Path
    is_unified: bool

    def is_out_of_memory(self) -> bool:
        """Return whether the kernel killed a process of the group for its limit."""
        name = "memory.events" if self.is_unified else "memory.oom_control"
        with contextlib.suppress(OSError):
            for line in (self.path / name).read_text("ascii").splitlines():
                key, _, count = line.partition(" ")
                if key == "oom_kill" and count != "0":
                    return True
        return False

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.rmdir()


def create_memory_group(name: str, limit: int) -> MemoryGroup | None:
    """Create a group with a limit in bytes; None where this process may not."""
    for parent, is_unified in _list_parents():
        path = parent / f"{_PREFIX}{name}"
        file = path / ("memory.max" if is_unified else "memory.limit_in_bytes")
        try:
            path.mkdir()
            file.write_text(str(limit), "ascii")
        except OSError:
            with contextlib.suppress(OSError):
                path.rmdir()
            continue
        return MemoryGroup(path, is_unified)
    return None


def remove_leftovers() -> None:
    """Remove the groups of labs that were killed; the kernel keeps those with processes."""
    for parent, _ in _list_parents():
        for path in parent.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                path.rmdir()


def _list_parents() -> list[tuple[Path, bool]]:
    """Return the groups that may get a child: this process's, in version 2 the root."""
    parents = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text("ascii").splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                parents.append((_MOUNT / "memory" / path.lstrip("/"), False))
            elif not controllers and (_MOUNT / "cgroup.controllers").exists():
                # A group with processes cannot give its children a controller (cgroups(7)).
                parents.append((_MOUNT, True))
    return parents


_CHUNK = 1 << 16
_CONNECT_TIMEOUT_S = 10.0


class PortForward:
    """Accepts connections on a Unix socket between `start` and `stop`."""

    def __init__(self, path: Path, port: int) -> None:
        self.path = path
        self.port = port
        self._listener: socket.socket | None = None

    def start(self) -> None:
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        before = os.umask(0o077)
        try:
            listener.bind(str(self.path))
        finally:
            os.umask(before)
        listener.listen(64)
        self._listener = listener
        threading.Thread(
            target=self._accept, args=(listener,), name="lab-forward", daemon=True
        ).start()

    def stop(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            # close() alone leaves the thread in accept(); shutdown() makes it return.
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            self.path.unlink(missing_ok=True)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        with client:
            try:
                server = socket.create_connection(("127.0.0.1", self.port), _CONNECT_TIMEOUT_S)
            except OSError:
                return
            with server:
                server.settimeout(None)
                back = threading.Thread(target=_copy, args=(server, client), daemon=True)
                back.start()
                _copy(client, server)
                back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(_CHUNK):
            target.sendall(chunk)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


IMAGE = "lab.treenail.example/host"
"""The image that every container of the lab has: the tree of this host, with this Python."""
_START_TIMEOUT_S = 10.0
# What the lab's host has there is no part of an image.
_HIDDEN = ("/tmp", "/var/tmp", "/run", "/root", "/home", "/mnt", "/media", "/srv")  # noqa: S108
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MESSAGE_LIMIT = 4096
_LOG_MESSAGE_LIMIT = 2048


def find_refusal() -> str:
    """Return why this host cannot run containers; empty if it can."""
    if os.geteuid() != 0:
        return "only root can create the namespaces of containers"
    command = ["unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "true"]
    if shutil.which("unshare") is None:
        return "unshare of util-linux is not installed"
    done = subprocess.run(command, capture_output=True, check=False, timeout=_START_TIMEOUT_S)
    if done.returncode != 0:
        return f"this host refuses namespaces: {done.stderr.decode(errors='replace').strip()}"
    return ""


@dataclass(frozen=True, slots=True)
class ContainerEnd:
    """How a container ended."""

    code: int
    reason: str
    message: str


class Sandbox:
    """The namespaces that the containers of a pod share, between `start` and `stop`."""

    def __init__(self, hostname: str, forwards: Sequence[PortForward] = ()) -> None:
        self._hostname = hostname[:63]
        self._forwards = tuple(forwards)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise HostError("cannot start a container: its sandbox has ended")
        return self._process.pid

    def start(self) -> None:
        words = [
            word for forward in self._forwards for word in (str(forward.port), str(forward.path))
        ]
        process: LabProcess[bytes] = LabProcess(
            [*PYTHON_MODULE, sandbox_process.__name__, self._hostname, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_build_environment(),
            start_new_session=True,
        )
        self._process = process
        timer = threading.Timer(_START_TIMEOUT_S, process.kill)
        timer.start()
        ready = process.stdout.readline() if process.stdout is not None else b""
        timer.cancel()
        if ready.strip() != b"ready":
            process.kill()
            _, errors = process.communicate()
            last = errors.decode(errors="replace").strip().splitlines()[-1:]
            raise HostError(f"cannot create the sandbox of a pod: {' '.join(last)}")

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


@dataclass(frozen=True, slots=True)
class ContainerPlace:
    """Directories and files of one container on the host."""

    directory: Path
    log: Path

    @property
    def message(self) -> Path:
        return self.directory / "message"

    @property
    def failure(self) -> Path:
        return self.directory / "failure"

    @property
    def scratch(self) -> Path:
        return self.directory / "scratch"


class ContainerProcess:
    """One container, from its start to its end."""

    def __init__(
        self,
        container: Container,
        place: ContainerPlace,
        *,
        environment: Mapping[str, str],
        volumes: Mapping[str, Path],
        hidden: Sequence[Path],
        files: Mapping[str, str],
        name: str,
    ) -> None:
        self._container = container
        self._place = place
        self._environment = environment
        self._volumes = volumes
        self._hidden = hidden
        self._files = files
        self._name = name
        self._group: MemoryGroup | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, sandbox: Sandbox) -> None:
        """Start the container; its output goes into the log."""
        place = self._place
        place.scratch.mkdir(parents=True)
        place.message.touch(mode=0o666)
        place.message.chmod(0o666)
        place.log.parent.mkdir(parents=True, exist_ok=True)
        if self._container.memory_limit:
            self._group = create_memory_group(self._name, self._container.memory_limit)
        document = json.dumps(self._build_start_document(sandbox)).encode()
        with place.log.open("ab") as log:
            process: LabProcess[bytes] = LabProcess(
                [*PYTHON_MODULE, container_process.__name__],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=_build_environment(),
                start_new_session=True,
            )
        self._process = process
        with contextlib.suppress(BrokenPipeError):
            if process.stdin is not None:
                process.stdin.write(document)
                process.stdin.close()

    def find_end(self) -> ContainerEnd | None:
        """Return how the container ended; None while it runs."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return None
        code = code if code >= 0 else 128 - code
        failure = self._read_failure()
        if failure:
            return ContainerEnd(container_process.EXIT_NOT_STARTED, "StartError", failure)
        reason = "Completed" if code == 0 else "Error"
        if self._group is not None and code != 0 and self._group.is_out_of_memory():
            reason = "OOMKilled"
        return ContainerEnd(code, reason, self._read_message(code))

    def send_signal(self, number: signal.Signals) -> None:
        """Send SIGTERM to the container, or kill it."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def close(self) -> None:
        """Kill the container if it runs, and remove what only it used."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._group is not None:
            self._group.remove()
        shutil.rmtree(self._place.directory, ignore_errors=True)

    def _build_start_document(self, sandbox: Sandbox) -> dict[str, object]:
        """Return what `container_process` reads."""
        security = self._container.security
        kept = security.capabilities
        mounts = [
            {
                "source": str(self._volumes[mount.volume] / mount.sub_path),
                "target": mount.target,
                "is_read_only": mount.is_read_only,
            }
            for mount in self._container.mounts
        ]
        message = {
            "source": str(self._place.message),
            "target": self._container.termination_path,
            "is_read_only": False,
        }
        return {
            "sandbox": sandbox.pid,
            "failure": str(self._place.failure),
            "scratch": str(self._place.scratch),
            "cgroup": str(self._group.path) if self._group else "",
            "hidden": [*_HIDDEN, *map(str, self._hidden)],
            "shared": list_shared_directories(),
            "files": dict(self._files),
            # A mount below another one comes after it.
            "mounts": sorted([*mounts, message], key=lambda mount: str(mount["target"])),
            "command": list(self._container.command),
            "environment": dict(self._environment),
            "directory": self._container.directory,
            "user": security.user,
            "group": security.group,
            "groups": list(security.groups),
            "capabilities": None
            if kept is None
            else [number for number, name in enumerate(CAPABILITIES) if name in kept],
            "has_no_new_privileges": security.has_no_new_privileges,
            "is_read_only": security.is_read_only,
            "is_unmasked": security.is_unmasked,
        }

    def _read_failure(self) -> str:
        with contextlib.suppress(OSError):
            return self._place.failure.read_text("utf-8", "replace")[:_MESSAGE_LIMIT]
        return ""

    def _read_message(self, code: int) -> str:
        """Return the termination message: the first 4096 bytes of its file, or the log's end."""
        with contextlib.suppress(OSError), self._place.message.open("rb") as file:
            content = file.read(_MESSAGE_LIMIT)
            if content or not self._container.has_log_as_message or code == 0:
                return content.decode("utf-8", "replace")
        with contextlib.suppress(OSError):
            return self._place.log.read_bytes()[-_LOG_MESSAGE_LIMIT:].decode("utf-8", "replace")
        return ""


def _build_environment() -> dict[str, str]:
    """Return the variables of this module's processes; a container gets none of them."""
    return {"PATH": _PATH, "PYTHONPATH": build_python_path(), **owner.mark_environment()}


def build_image_environment(hostname: str) -> dict[str, str]:
    """Return the variables that the image and the kubelet set."""
    programs = Path(sys.executable).parent
    return {"PATH": f"{programs}:{_PATH}", "HOME": "/root", "HOSTNAME": hostname}


def list_shared_directories() -> list[str]:
    """Return the directories of this Python that the image shares with the host."""
    directories = [sys.prefix, sys.base_prefix, *build_python_path().split(os.pathsep)]
    paths = {
        str(Path(directory).resolve()) for directory in directories if Path(directory).is_dir()
    }
    # The overlay has what is below /usr; the others may be in a hidden directory.
    needed = sorted(path for path in paths if not f"{path}/".startswith("/usr/"))
    kept: list[str] = []
    for path in needed:
        if not any(path.startswith(f"{parent}/") for parent in kept) and path != "/":
            kept.append(path)
    return kept
