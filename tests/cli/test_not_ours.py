"""Hosts that the agent has nothing to do with, or can do nothing for."""

import json
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from treenail.cli.main import main

COMPOSEFS = {
    "apiVersion": "org.containers.bootc/v1",
    "status": {"booted": {"ostree": None, "composefs": {"verity": "ab" * 32}}},
}
NOTHING = {"apiVersion": "org.containers.bootc/v1", "status": {"booted": None}}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What systemd is told."""
    with tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as directory:
        path = f"{directory}/notify"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
            listener.bind(path)
            listener.settimeout(10.0)
            monkeypatch.setenv("NOTIFY_SOCKET", path)
            yield listener


def bootc(root: Path, script: str) -> None:
    program = root / "usr/bin/bootc"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        (
            f"echo '{json.dumps(COMPOSEFS)}'",
            5,
            "with its composefs back end; treenail needs OSTree deployments",
        ),
        (f"echo '{json.dumps(NOTHING)}'", 0, "is not booted from OSTree; there is nothing to do"),
        ("exit 1", 0, "is not booted from OSTree; there is nothing to do"),
        ("", 0, "is not booted from OSTree; there is nothing to do"),
    ],
)
def test_a_host_without_ostree_is_told_in_one_sentence_and_no_failure_of_the_service(
    script: str,
    code: int,
    said: str,
    tmp_path: Path,
    told: socket.socket,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if script:
        bootc(tmp_path, script)
    assert main(["run", "--root", str(tmp_path)]) == code
    assert told.recv(100) == b"READY=1"
    assert said in capsys.readouterr().err
