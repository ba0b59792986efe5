"""Hosts that the agent has nothing to do with, or can do nothing for."""

import json
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.services import Services
from treenail.cli.node.main import main

pytestmark = pytest.mark.process

COMPOSEFS = {
    "apiVersion": "org.containers.bootc/v1",
    "status": {"booted": {"ostree": None, "composefs": {"verity": "ab" * 32}}},
}
UNMANAGED = (
    "bootc uses its composefs back end, which has no OSTree deployments to stage, pin and roll "
    "back to\n"
)
NOTHING = {"apiVersion": "org.containers.bootc/v1", "status": {"booted": None}}


@pytest.fixture
def notify_socket(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Socket that receives the notifications for systemd."""
    with tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as directory:
        path = f"{directory}/notify"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
            listener.bind(path)
            listener.settimeout(10.0)
            monkeypatch.setenv("NOTIFY_SOCKET", path)
            yield listener


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Iterator[Services]:
    """Those of the host, which run what the agent's sandbox is too tight for."""
    monkeypatch.delenv("INVOCATION_ID", raising=False)
    with Services() as services:
        monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", services.address)
        yield services


def install(root: Path, name: str, script: str) -> None:
    program = root / "usr/bin" / name
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def bootc(root: Path, script: str) -> None:
    """Install one that works in a unit of its own, and not in the agent's."""
    sandboxed = 'echo "error: creating a mount namespace: not permitted" >&2; exit 1'
    install(root, "bootc", f'[ "$INVOCATION_ID" ] || {{ {sandboxed}; }}\n{script}')
    install(root, "journalctl", "exit 0")


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        (
            f"echo '{json.dumps(COMPOSEFS)}'",
            5,
            UNMANAGED,
        ),
        (f"echo '{json.dumps(NOTHING)}'", 0, "is not booted from OSTree; nothing to do"),
        ("exit 1", 0, "is not booted from OSTree; nothing to do"),
        ("", 0, "is not booted from OSTree; nothing to do"),
    ],
)
def test_run_on_host_without_ostree_logs_one_line_and_succeeds(
    script: str,
    code: int,
    said: str,
    services: Services,
    notify_socket: socket.socket,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if script:
        bootc(services.root, script)
    assert main(["run", "--root", str(services.root)]) == code
    assert notify_socket.recv(100) == b"READY=1"
    assert said in capsys.readouterr().err


def test_run_on_host_without_systemd_reports_bootc_error(
    services: Services, notify_socket: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    bootc(services.root, f"echo '{json.dumps(COMPOSEFS)}'")
    services.vanish()
    assert main(["run", "--root", str(services.root)]) == 0
    assert notify_socket.recv(100) == b"READY=1"
    said = capsys.readouterr().err
    assert "bootc status failed" in said
    assert "is not booted from OSTree; nothing to do" in said
