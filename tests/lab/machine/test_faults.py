"""Systems that boot badly, or not at all, and what a machine says of a registry's images."""

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from treenail.clocks import SystemClock
from treenail.host.container.registry import SkopeoClient
from treenail.observations import ImageInspection, InspectionProblem
from treenail.process import ProgramRunner
from treenail_lab import images
from treenail_lab.images import Credential, ImageCatalogue, make_image
from treenail_lab.machine.container import skopeo
from treenail_lab.machine.node.machine import CriSocket, LabMachine, is_unit_active
from treenail_lab.machine.ostree.sysroot import SysrootDeployment
from treenail_lab.machine.settings import MachineSettings

pytestmark = pytest.mark.integration

GOOD = make_image("os/node", "41.1", 1_000_000, layers=2)
DEAD = make_image("os/node", "41.2", 1_000_000, faults={"boot": "Kernel panic"})
LOCKED = make_image(
    "os/secret", "1", 1_000, registry="private.lab.example", credential=Credential("u", "p")
)
QUICK = MachineSettings(pull_bytes_per_s=100e6, staging_s=0.02)


def made(directory: Path) -> LabMachine:
    catalogue = directory / "images.json"
    images.save_catalogue(ImageCatalogue((GOOD, DEAD, LOCKED)), catalogue)
    return LabMachine("n", directory / "m", catalogue, image=GOOD, machine_settings=QUICK)


def version(machine: LabMachine) -> str:
    booted = machine.booted_deployment
    return booted.version if booted else ""


def test_kernel_that_never_boots_falls_back_to_earlier_deployment(directory: Path) -> None:
    with made(directory) as machine:
        machine.stage_foreign_image(DEAD)
        machine.reboot()
        assert version(machine) == "41.1"
        assert [each.version for each in machine.deployments] == ["41.2", "41.1"]
        assert (machine.failed_boot_count, machine.boot_count) == (3, 2)


def test_failing_unit_fails_at_boot(directory: Path) -> None:
    with made(directory) as machine:
        before = machine.is_kubelet_running
        machine.change_settings(failing_units=("kubelet.service",))
        machine.reboot()
        after = machine.is_kubelet_running
        assert (before, after) == (True, False)
        assert is_unit_active(machine.address, "crio.service")


def test_on_boot_is_called_before_services_start(directory: Path) -> None:
    seen: list[str] = []

    def mask(booted: SysrootDeployment) -> None:
        seen.append(booted.version)
        machine.change_settings(failing_units=("kubelet.service",))

    machine = made(directory)
    machine.on_boot = mask
    with machine:
        assert (seen, machine.is_kubelet_running) == (["41.1"], False)


def test_runtime_socket_of_running_machine_accepts_connections(directory: Path) -> None:
    with made(directory) as machine, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(machine.root / "run/crio/crio.sock"))


def test_skopeo_inspect_prints_image_or_error(directory: Path) -> None:
    catalogue = directory / "images.json"
    images.save_catalogue(
        ImageCatalogue((GOOD, LOCKED, replace(DEAD, faults={"inspect": "i/o timeout"}))), catalogue
    )
    root = directory / "root"
    root.mkdir()
    commands = skopeo.install_skopeo(directory, root, catalogue)
    environment = {**os.environ, "PATH": f"{commands}:/usr/bin:/bin"}
    clock = SystemClock()
    registry = SkopeoClient(ProgramRunner(clock, environment), clock, timeout_s=30.0)
    found = registry.inspect_image(GOOD.pull_spec)
    assert isinstance(found, ImageInspection)
    assert (found.architecture, sum(each.size_bytes for each in found.layers)) == (
        "amd64",
        1_000_000,
    )
    assert found.created == GOOD.timestamp
    assert json.loads(GOOD.render_configuration())["config"]["Labels"] == found.labels
    kinds = {}
    for spec in (LOCKED.pull_spec, DEAD.pull_spec, GOOD.pull_spec.replace("/node", "/none")):
        trouble = registry.inspect_image(spec)
        assert isinstance(trouble, InspectionProblem)
        kinds[spec] = trouble.kind
    assert list(kinds.values()) == ["RegistryUnauthorized", "RegistryTimeout", "ImageNotFound"]


def test_runtime_socket_accepts_any_number_of_connections(directory: Path) -> None:
    runtime = CriSocket(directory)
    runtime.start()
    # More than the backlog, SOMAXCONN, of a listener that accepts none.
    for _ in range(5000):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(directory / "run/crio/crio.sock"))
    runtime.stop()
    assert not (directory / "run/crio/crio.sock").exists()
