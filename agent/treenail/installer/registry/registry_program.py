"""The program of the bootstrap registry: where it is, its configuration and its command. Pure.

docker-registry of Debian, docker-distribution of Fedora, or the registry image under podman.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from treenail.api.decode import Json
from treenail.errors import HostError

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
    raise HostError(
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
            "relativeurls": True,
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
