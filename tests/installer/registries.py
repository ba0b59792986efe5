"""A bootstrap registry on loopback, and programs that pull from it and push to it."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from treenail.clocks import SystemClock
from treenail.installer.bootstrap.bootstrap_registry import (
    BootstrapRegistry,
    BootstrapRegistrySettings,
)
from treenail.installer.directory.install_files import InstallDirectory, InstallFiles
from treenail.memory import MIB
from treenail.registry.authorization import Login
from treenail.registry.client import RegistryClient
from treenail.registry.transport import TlsSettings

CLOCK = SystemClock()
LOOPBACK = "127.0.0.1"
LIMIT = 64 * MIB
needs_skopeo = pytest.mark.skipif(
    shutil.which("skopeo") is None, reason="skopeo is not installed: install the package skopeo"
)


def make_registry(
    root: Path, *, files: InstallFiles | None = None, **settings: object
) -> BootstrapRegistry:
    values: dict[str, object] = {
        "host": LOOPBACK, "listen": f"{LOOPBACK}:0", "storage_limit": LIMIT, **settings,
    }  # fmt: skip
    return BootstrapRegistry(
        InstallDirectory(root),
        BootstrapRegistrySettings(**values),  # type: ignore[arg-type]
        CLOCK,
        files=files,
    )


@contextmanager
def open_client(registry: BootstrapRegistry, *, is_push: bool) -> Iterator[RegistryClient]:
    """Open a client of the process for pushes, or of that for pulls, with its login."""
    client = RegistryClient(
        registry.push_address if is_push else registry.address,
        CLOCK,
        login=registry.push_login if is_push else registry.pull_login,
        tls=TlsSettings(ca_pem=registry.ca_pem),
    )
    try:
        yield client
    finally:
        client.close()


def write_auth_file(path: Path, address: str, login: Login) -> Path:
    auth = login.basic.removeprefix("Basic ")
    path.write_text(json.dumps({"auths": {address: {"auth": auth}}}))
    return path


def write_certificates(path: Path, registry: BootstrapRegistry) -> Path:
    """Write the CA as a directory for ``--cert-dir``."""
    path.mkdir(exist_ok=True)
    (path / "ca.crt").write_text(registry.ca_pem)
    return path


def run_skopeo(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["skopeo", *arguments], capture_output=True, text=True, check=False, timeout=60
    )
