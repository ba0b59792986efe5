"""``treenail-bootstrap.service`` as it is packaged, under a real systemd."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.installer.processes import make_directory
from tests.system.nspawn import REPOSITORY, Container, missing
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(missing()), reason=f"no container: {missing()}"),
]
UNIT = "treenail-bootstrap.service"
LIMIT_S = 60.0


class Host:
    """A bootstrap host with the unit, its command and an install directory."""

    def __init__(self, container: Container, root: Path) -> None:
        self._container = container
        self.root = root

    def install(self) -> None:
        shutil.copy(REPOSITORY / "systemd" / UNIT, self.root.parent)
        environment = (
            f"TREENAIL_INSTALL_DIRECTORY={self.root}\n"
            "TREENAIL_BOOTSTRAP_ARGUMENTS=--listen=127.0.0.1:0 --host=localhost\n"
        )
        (self.root.parent / "bootstrap.env").write_text(environment)
        command = f"{sys.prefix}/bin/treenail-controller"
        self.run(
            "sh", "-ec",
            f"ln -sf {command} /usr/bin/treenail-controller; mkdir -p /etc/treenail;"
            f"cp {self.root.parent}/bootstrap.env /etc/treenail;"
            f"cp {self.root.parent}/{UNIT} /etc/systemd/system; systemctl daemon-reload",
        )  # fmt: skip

    def run(self, *command: str, code: int = 0) -> str:
        done = subprocess.run(
            self._container.inside(*command),
            check=False, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def show(self, name: str) -> str:
        """Return a property of the unit."""
        return self.run("systemctl", "show", "--value", f"--property={name}", UNIT).strip()

    def read_status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.root / ".treenail/status.json").read_text())
        return found

    def wait_until_serving(self) -> None:
        wait_until(lambda: self.read_status()["is_serving"], limit_s=LIMIT_S)

    def find_processes(self) -> str:
        """Return the processes of the unit's control group."""
        return self.run("sh", "-c", f"cat /sys/fs/cgroup/system.slice/{UNIT}/cgroup.procs || true")


@pytest.fixture
def host(container: Container, request: pytest.FixtureRequest) -> Iterator[Host]:
    root = container.shared / request.node.name / "cluster"
    root.mkdir(parents=True)
    found = Host(container, make_directory(root))
    found.install()
    yield found
    found.run("sh", "-c", f"systemctl stop {UNIT}; systemctl reset-failed {UNIT} || true")


def test_service_is_ready_continues_after_a_kill_and_stops(host: Host) -> None:
    host.run("systemctl", "start", UNIT)
    # With Type=notify the start ends when the config server accepts requests.
    assert (host.show("ActiveState"), host.show("SubState")) == ("active", "running")
    host.wait_until_serving()
    wait_until(lambda: "wait for the API server" in host.show("StatusText"), limit_s=LIMIT_S)
    first, install_id = host.show("MainPID"), host.read_status()["id"]
    host.run("kill", "-9", first)
    wait_until(
        lambda: host.show("ActiveState") == "active" and host.show("MainPID") not in ("0", first),
        limit_s=LIMIT_S,
    )
    assert host.show("NRestarts") == "1"
    host.wait_until_serving()
    assert host.read_status()["id"] == install_id
    log = (host.root / ".treenail/logs/bootstrap.log").read_text()
    assert "kept step render of an earlier start" in log
    host.run("systemctl", "stop", UNIT)
    assert (host.show("ActiveState"), host.show("Result")) == ("inactive", "success")
    assert host.read_status()["phase"] == "stopped"
    assert host.find_processes() == ""


def test_failed_installation_is_not_restarted_and_its_reason_stays(host: Host) -> None:
    manifest = host.root / "manifests/50-mine.yaml"
    manifest.write_text("kind: MachineConfig\nmetadata: {name: 50-mine\n")
    host.run("systemctl", "start", UNIT, code=1)
    assert host.show("ActiveState") == "failed"
    assert (host.show("ExecMainStatus"), host.show("NRestarts")) == ("5", "0")
    reason = host.read_status()["failure"]["reason"]
    assert "manifests/50-mine.yaml" in reason
    # The config server has ended, and with it /status: the file has the reason.
    waited = host.run(
        "treenail-controller", "install", "wait-for", "bootstrap-complete",
        f"--dir={host.root}", code=5,
    )  # fmt: skip
    assert "manifests/50-mine.yaml" in waited
    manifest.unlink()
    host.run("systemctl", "start", UNIT)
    host.wait_until_serving()
