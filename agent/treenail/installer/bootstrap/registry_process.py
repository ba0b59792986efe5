"""Processes of the bootstrap registry: their program, their command, and the space they need.

The program is docker-registry of Debian, docker-distribution of Fedora, or the registry image under
podman. The processes end with this process, even if it is killed.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from treenail import clocks, errors, memory
from treenail.api.decode import Json
from treenail.builder.disk_space import read_disk_space
from treenail.process import stop_process

PROGRAMS = ("docker-registry", "registry")
"""Names of the program in Debian and in Fedora."""
DEFAULT_IMAGE = "docker.io/library/registry:2"

FindProgram = Callable[[str], str | None]
"""Returns the path of a program, as `shutil.which`."""


@dataclass(frozen=True, slots=True)
class RegistryProgram:
    """How the registry runs on this host."""

    path: str
    image: str = ""
    """Run this image with podman; empty for a program of this host."""


@dataclass(frozen=True, slots=True)
class RegistryProcessConfig:
    """One of the processes on the storage directory."""

    name: str
    """``pull`` or ``push``."""
    host: str
    """Address that it listens on; empty for all."""
    port: int
    storage: Path
    htpasswd: Path
    certificate: Path
    key: Path
    upload_key: str = field(repr=False)
    is_readonly: bool = True


def find_registry_program(find: FindProgram, image: str = DEFAULT_IMAGE) -> RegistryProgram:
    """Return the program of this host, or podman with the image; raise `HostError`."""
    for name in PROGRAMS:
        if path := find(name):
            return RegistryProgram(path)
    if path := find("podman"):
        return RegistryProgram(path, image)
    raise errors.HostError(
        "cannot start the bootstrap registry: this host has neither docker-registry nor podman",
        remedy="run: apt-get install docker-registry, or: dnf install docker-distribution; or set "
        "registry.type to External",
    )


def format_config(config: RegistryProcessConfig) -> str:
    """Return the configuration of docker-registry. JSON is YAML. It contains the upload key."""
    maintenance: Json = {"readonly": {"enabled": config.is_readonly}}
    if not config.is_readonly:
        # Interrupted uploads; two processes must not purge at the same time.
        maintenance["uploadpurging"] = {
            "enabled": True, "age": "24h", "interval": "24h", "dryrun": False,
        }  # fmt: skip
    else:
        maintenance["uploadpurging"] = {"enabled": False}
    host = f"[{config.host}]" if ":" in config.host else config.host
    document: Json = {
        "version": "0.1",
        # The access log has address and time of each request.
        "log": {"level": "warn", "formatter": "text", "accesslog": {"disabled": False}},
        "storage": {
            "filesystem": {"rootdirectory": str(config.storage)},
            "maintenance": maintenance,
        },
        "auth": {"htpasswd": {"realm": "treenail", "path": str(config.htpasswd)}},
        "http": {
            "addr": f"{host}:{config.port}",
            # A Location of an upload without a host: this host has several addresses.
            "relativeurls": True,
            # Signs the state of uploads. docker-registry would make another one at each start
            # (distribution, configuration.md, http).
            "secret": config.upload_key,
            "tls": {
                "certificate": str(config.certificate),
                "key": str(config.key),
                "minimumtls": "tls1.2",
            },
        },
    }
    return json.dumps(document, indent=1) + "\n"


def make_command(
    program: RegistryProgram, config_file: Path, *, directory: Path, name: str
) -> list[str]:
    """Return the command of a process; it contains no secret.

    ``directory`` has all files of the registry; ``name`` is that of the container.
    """
    if not program.image:
        return [program.path, "serve", str(config_file)]
    # With SELinux a container may read only files that :z or :Z relabels (podman-run(1)); the other
    # programs of this host need their own label on these files.
    return [
        program.path, "run", "--rm", "--replace", f"--name={name}", "--network=host",
        "--security-opt=label=disable", "--ulimit=host", "--log-driver=none",
        f"--volume={directory}:{directory}",
        "--entrypoint=registry", program.image, "serve", str(config_file),
    ]  # fmt: skip


def make_cleanup(program: RegistryProgram, name: str) -> list[str]:
    """Return the command that ends a container of an earlier run; empty without podman.

    A container outlives a killed podman.
    """
    return [program.path, "rm", "--force", "--ignore", name] if program.image else []


def is_own_command(words: Sequence[str], config_file: Path) -> bool:
    """Return whether a process serves this configuration: one that outlived its parent."""
    return bool(words) and words[-1] == str(config_file) and "serve" in words


_STOP_LIMIT_S = 5.0
_ABANDONED_LIMIT_S = 10.0
_CLEANUP_LIMIT_S = 30.0
_LOG_LIMIT = 20 * memory.MIB
_TAIL = 2000
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class RegistryProcess:
    """One process, with its standard output and error in a log file.

    The thread that starts it must live as long as it should: the kernel sends the death signal of
    PR_SET_PDEATHSIG when that thread ends (prctl(2)).
    """

    def __init__(
        self, command: list[str], config_file: Path, log: Path, cleanup: list[str]
    ) -> None:
        """``cleanup`` ends what outlives the command; empty for nothing."""
        self._command = command
        self._cleanup = cleanup
        self._config_file = config_file
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process ID; None while it does not run."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the program; raise `HostError` or `FileError`."""
        self._rotate_log()
        wrapper = ["setpriv", "--pdeathsig=KILL", "--"] if shutil.which("setpriv") else []
        try:
            descriptor = os.open(
                self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise errors.FileError(f"cannot write {self._log}: {error.strerror}") from error
        try:
            self._process = subprocess.Popen(
                [*wrapper, *self._command],
                # REGISTRY_… in the environment would override the configuration.
                env=_make_environment(),
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
            )
        except OSError as error:
            raise errors.HostError(f"cannot run {self._command[0]}: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def stop(self) -> None:
        """End the process and wait for it."""
        process, self._process = self._process, None
        if process is None:
            return
        stop_process(process, _STOP_LIMIT_S)

    def end_abandoned(self, clock: clocks.Clock) -> None:
        """End the process of an earlier run that was killed, where the kernel did not."""
        if self._cleanup:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    self._cleanup,
                    env=_make_environment(),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    check=False,
                    timeout=_CLEANUP_LIMIT_S,
                )
        end = clock.monotonic() + _ABANDONED_LIMIT_S
        # Not from a record: a kill may come between the start of the process and the write.
        for pid in [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]:
            while is_own_command(_read_command(pid), self._config_file):
                if clock.monotonic() > end:
                    raise errors.HostError(
                        f"cannot start the bootstrap registry: process {pid} of an earlier run "
                        "does not end",
                        remedy=f"run: kill -9 {pid}",
                    )
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                clock.sleep(0.05)

    def read_last_lines(self) -> str:
        """Return the end of the log."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(self._log.stat().st_size - _TAIL, 0))
                return file.read().decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def _rotate_log(self) -> None:
        with suppress(OSError):
            if self._log.stat().st_size > _LOG_LIMIT:
                self._log.replace(self._log.with_suffix(".log.1"))


def _make_environment() -> dict[str, str]:
    return {"PATH": _PATH, "HOME": os.environ.get("HOME", "/root")}


def _read_command(pid: int) -> list[str]:
    try:
        content = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return content.decode("utf-8", "replace").rstrip("\0").split("\0")


DEFAULT_LIMIT = 10 * memory.GIB
STATE_SPACE = 64 * memory.MIB
"""Free bytes for the state, the rendered configs and the logs."""
_RESERVE = 256 * memory.MIB
"""Free bytes that the file system keeps for logs and for the state of the installation."""


@dataclass(frozen=True, slots=True)
class StorageUse:
    """Bytes of the storage directory, and of its file system."""

    path: Path
    used: int
    free: int
    limit: int

    @property
    def needed(self) -> int:
        """Free bytes that the registry may still need."""
        return max(self.limit - self.used, 0) + _RESERVE

    def describe_problem(self) -> str:
        """Return why nothing more may be pushed; empty if there is space."""
        if self.used > self.limit:
            used, limit = (
                memory.format_bytes(self.used),
                memory.format_bytes(self.limit),
            )
            return f"{self.path} has {used}, above its limit of {limit}"
        if self.free < _RESERVE:
            return f"the file system of {self.path} has {memory.format_bytes(self.free)} free"
        return ""


def check_space(directory: Path, needed: int) -> None:
    """Raise `HostError` unless the file system of the directory has so many free bytes."""
    space = read_disk_space(directory)
    if space is None:
        raise errors.FileError(
            f"cannot read the free space of {directory}", remedy=f"check it: df -h '{directory}'"
        )
    free = space.free_bytes
    if free < needed:
        raise errors.HostError(
            f"cannot install from {directory}: its file system has {free // memory.MIB} MiB "
            f"free, and the installation needs {needed // memory.MIB} MiB",
            remedy=f"free some space: du -xsh {directory}/.treenail; or move the directory to "
            "another file system",
        )


def measure_storage(path: Path, limit: int) -> StorageUse:
    """Measure the storage directory; raise `FileError`. Files that vanish meanwhile count 0."""
    space = read_disk_space(path)
    if space is None:
        raise errors.FileError(
            f"cannot read the free space of {path}", remedy=f"check it: df -h '{path}'"
        )
    return StorageUse(path, _count_bytes(path), space.free_bytes, limit)


def check_storage(path: Path, limit: int) -> StorageUse:
    """Raise `HostError` unless the file system can hold what the limit allows."""
    use = measure_storage(path, limit)
    if use.free < use.needed:
        raise errors.HostError(
            f"cannot start the bootstrap registry: the file system of {path} has "
            f"{memory.format_bytes(use.free)} free, and the storage limit of "
            f"{memory.format_bytes(limit)} needs {memory.format_bytes(use.needed)}",
            remedy=f"free space below {path}, or set a lower limit with --registry-storage-limit",
        )
    return use


def check_room(limit: int, image_bytes: int) -> None:
    """Raise `HostError` unless the limit permits an image of this size."""
    if image_bytes > limit:
        raise errors.HostError(
            f"the base image has {memory.format_bytes(image_bytes)}, and the bootstrap "
            f"registry may have {memory.format_bytes(limit)}",
            remedy="set a higher limit with --registry-storage-limit",
        )


def _count_bytes(path: Path) -> int:
    count = 0
    for directory, _, names in os.walk(path):
        for name in names:
            try:
                count += os.lstat(os.path.join(directory, name)).st_size  # noqa: PTH118 - for speed
            except OSError:
                continue
    return count
