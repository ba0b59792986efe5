"""The programs of a machine, as processes: arguments, output, exit codes, the lock, progress."""

import json
import os
import select
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from treenail_lab import images
from treenail_lab.images import Credential, ImageCatalogue, make_image
from treenail_lab.machine import rootfs, settings
from treenail_lab.machine.ostree.sysroot import Sysroot, layer_packages
from treenail_lab.machine.programs import commands
from treenail_lab.machine.settings import MachineSettings

pytestmark = pytest.mark.process

A = make_image("os/node", "1.0", 1_000_000)
B = make_image("os/node", "2.0", 1_000_000)
# Each event names all layers: more than a pipe holds, by far.
MANY = make_image("os/node", "3.0", 1_000_000, layers=60)
SECRET = make_image(
    "os/secret", "1", 1000, registry="private.example", credential=Credential("me", "pw")
)
Ended = subprocess.CompletedProcess[str]
LIMIT_S = 30


class Machine:
    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        self._settings = directory / "settings.json"
        images.save_catalogue(ImageCatalogue((A, B, MANY, SECRET)), directory / "images.json")
        self.change(MachineSettings(pull_bytes_per_s=1e9, staging_s=0.01))
        rootfs.install_root(self.root, A)
        rootfs.boot_root(self.root)
        commands.install_programs(self.root, directory / "images.json", self._settings)

    @property
    def sysroot(self) -> Sysroot:
        return Sysroot(self.root)

    def change(self, new: MachineSettings) -> None:
        settings.save_settings(new, self._settings)

    def program(self, name: str) -> str:
        return str(self.root / "usr/bin" / name)

    def run(self, name: str, *arguments: str) -> Ended:
        return subprocess.run(
            [self.program(name), *arguments],
            check=False, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue


def status(machine: Machine) -> dict[str, object]:
    ended = machine.run("bootc", "status", "--json", "--format-version=1")
    assert ended.returncode == 0
    return json.loads(ended.stdout)["status"]


def test_deployment_that_rpm_ostree_changed_is_incompatible(machine: Machine) -> None:
    booted = machine.sysroot.find_booted()
    assert booted is not None
    machine.sysroot.write_deployments((layer_packages(booted, ("usbguard",), ()),))
    machine.sysroot.boot_deployment()
    found = status(machine)["booted"]
    assert isinstance(found, dict)
    assert (found["incompatible"], found["image"]) == (True, None)
    # Only bootc upgrade refuses: bootc switch drops the packages.
    assert machine.run("bootc", "switch", B.pull_spec).returncode == 0
    staged = machine.sysroot.read_staged()
    assert staged.packages == ()


def test_rollback_toggles_and_drops_staged_deployment(machine: Machine) -> None:
    machine.run("bootc", "switch", B.pull_spec)
    machine.sysroot.finalize_staged()
    machine.sysroot.boot_deployment()
    machine.run("bootc", "switch", MANY.pull_spec)
    seen = []
    for _ in range(2):
        assert machine.run("bootc", "rollback").returncode == 0
        found = status(machine)
        seen.append((found["rollbackQueued"], found["staged"]))
    assert seen == [(True, None), (False, None)]


def test_full_progress_pipe_blocks_pull_until_read(machine: Machine, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    with subprocess.Popen(
        [machine.program("bootc"), "switch", "--progress-fd", str(writer), MANY.pull_spec],
        pass_fds=(writer,), stdout=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        # The pipe is full once a write to it would block.
        while select.select([], [writer], [], 0.2)[1]:
            assert process.poll() is None
        assert machine.sysroot.read_staged() is None
        os.close(writer)
        content = b"".join(iter(lambda: os.read(reader, 1 << 16), b""))
        assert process.wait(LIMIT_S) == 0
    events = [json.loads(line) for line in content.splitlines()]
    assert events[0] == {"type": "Start", "version": "0.1.0"}
    assert {event["type"] for event in events[1:]} == {"ProgressBytes", "ProgressSteps"}
    assert machine.sysroot.read_staged() is not None


def test_closed_progress_pipe_does_not_stop_pull(machine: Machine, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.close(reader)
    ended = subprocess.run(
        [machine.program("bootc"), "switch", "--progress-fd", str(writer), B.pull_spec],
        check=False, pass_fds=(writer,), capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert ended.returncode == 0
    assert "Broken pipe" in ended.stderr


def test_pull_without_credential_is_refused(machine: Machine) -> None:
    ended = machine.run("podman", "pull", SECRET.pull_spec)
    assert ended.returncode == 125
    assert "unauthorized" in ended.stderr
    missing = machine.run("podman", "pull", "--authfile", "/none", B.pull_spec)
    assert "no such file" in missing.stderr


def test_failing_and_slow_pulls_follow_the_settings(machine: Machine) -> None:
    machine.change(replace(MachineSettings(), pull_bytes_per_s=1e9, pull_error="connection reset"))
    ended = machine.run("podman", "pull", B.pull_spec)
    assert (ended.returncode, "connection reset" in ended.stderr) == (125, True)
    machine.change(MachineSettings(pull_bytes_per_s=1000))
    with subprocess.Popen([machine.program("podman"), "pull", B.pull_spec]) as slow:
        with pytest.raises(subprocess.TimeoutExpired):
            slow.wait(0.5)
        slow.terminate()


def test_ostree_undeploy_drops_staged_deployment(machine: Machine) -> None:
    machine.run("bootc", "switch", B.pull_spec)
    assert machine.run("ostree", "admin", "undeploy", "0").returncode == 0
    assert machine.sysroot.read_staged() is None
    assert machine.run("ostree", "admin", "undeploy", "0").returncode == 1
