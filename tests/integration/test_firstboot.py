"""``treenail firstboot`` as a process, on a machine that has never joined."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.commands import AGENT
from tests.waiting import wait_until
from treenail_lab import images
from treenail_lab.cluster import build_pull_secret
from treenail_lab.images import Credential, ImageCatalogue, make_image
from treenail_lab.lifetime.fork_server import LabProcess
from treenail_lab.lifetime.owner import owner
from treenail_lab.machine.node.daemons import build_environment
from treenail_lab.machine.node.machine import LabMachine
from treenail_lab.machine.settings import MachineSettings

pytestmark = pytest.mark.integration

STOCK = make_image("os/stock", "1", 1_000_000)
WANTED = make_image("os/node", "2", 5_000_000, credential=Credential("puller", "canary-55"))
RPM_OSTREED = "usr/lib/systemd/system/rpm-ostreed.service"
LIMIT_S = 30.0
USED_WRONGLY = 64


@pytest.fixture
def directory() -> Iterator[Path]:
    with owner.temporary_directory() as name:
        yield name


@pytest.fixture(params=["rpm-ostree", "bootc"])
def machine(directory: Path, request: pytest.FixtureRequest) -> Iterator[LabMachine]:
    catalogue = directory / "images.json"
    images.save_catalogue(ImageCatalogue((STOCK, WANTED)), catalogue)
    behaviour = MachineSettings(pull_bytes_per_s=1e9, staging_s=0.02)
    with LabMachine(
        "new",
        directory / "m",
        catalogue,
        image=STOCK,
        kubelet_config=build_pull_secret([WANTED]),
        machine_settings=behaviour,
    ) as machine:
        if request.param == "bootc":
            # It is chosen where rpm-ostree is not.
            (machine.root / RPM_OSTREED).unlink()
        yield machine


def first_boot(machine: LabMachine) -> "subprocess.Popen[bytes]":
    home = machine.root.parent
    return LabProcess(
        [sys.executable, "-c", AGENT, "firstboot", "--root", str(machine.root)],
        env={
            **build_environment(home),
            "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
            "DBUS_SYSTEM_BUS_ADDRESS": machine.address,
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def by_bootc(machine: LabMachine) -> bool:
    return not (machine.root / RPM_OSTREED).exists()


def said(machine: LabMachine, words: str) -> bool:
    return any(words in str(each["MESSAGE"]) for each in machine.read_journal())


def booted(machine: LabMachine) -> str:
    found = machine.booted_deployment
    return found.digest if found else ""


def test_new_machine_moves_to_its_image_and_joins(machine: LabMachine) -> None:
    document = {
        "kind": "MachineConfig",
        "metadata": {"name": "rendered-worker-1"},
        # bootc changes nothing but the image.
        "spec": {
            "osImageURL": WANTED.pull_spec,
            "kernelArguments": [] if by_bootc(machine) else ["nosmt"],
        },
    }
    encapsulated = machine.root / "etc/ignition-machine-config-encapsulated.json"
    encapsulated.write_text(json.dumps(document))
    process = first_boot(machine)
    assert machine.wait_for_boot(2, LIMIT_S)
    process.terminate()
    assert process.wait(LIMIT_S) != 0, "what waits for it must not start"
    assert booted(machine) == WANTED.digest
    again = first_boot(machine)
    assert again.wait(LIMIT_S) == 0
    assert machine.boot_count == 2
    assert not encapsulated.exists()
    assert encapsulated.with_name(encapsulated.name + ".bak").exists()
    arguments = (machine.root / "proc/cmdline").read_text().split()
    assert ("nosmt" in arguments) is not by_bootc(machine)


@pytest.mark.long("bootc")
def test_power_cut_during_first_boot_is_recovered(machine: LabMachine) -> None:
    machine.change_settings(pull_bytes_per_s=5e6)
    settings = machine.root / "etc/treenail/agent.toml"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(f'[firstboot]\nimage = "{WANTED.pull_spec}"\n')
    process = first_boot(machine)
    wait_until(lambda: said(machine, "staging"), limit_s=LIMIT_S)
    process.kill()
    process.wait()
    machine.cut_power()
    machine.change_settings(pull_bytes_per_s=1e9)
    process = first_boot(machine)
    assert machine.wait_for_boot(3, LIMIT_S)
    process.terminate()
    process.wait(LIMIT_S)
    assert first_boot(machine).wait(LIMIT_S) == 0
    assert (booted(machine), machine.boot_count) == (WANTED.digest, 3)


def test_machine_joins_after_killed_first_boot(machine: LabMachine) -> None:
    """Whenever it is killed; what it had begun is gone on with, and nothing is done twice."""
    settings = machine.root / "etc/treenail/agent.toml"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(f'[firstboot]\nimage = "{WANTED.pull_spec}"\n')
    with machine.inhibit_shutdown("backup", "copies") as _:
        settings.write_text(
            settings.read_text() + '[preflight]\nonly_warn = ["ShutdownInhibited"]\n'
        )
        process = first_boot(machine)
        wait_until(lambda: said(machine, "rebooting into"), limit_s=LIMIT_S)
        if by_bootc(machine):
            wait_until(lambda: machine.staged_deployment is not None, limit_s=LIMIT_S)
        process.kill()
        process.wait()
    process = first_boot(machine)
    assert machine.wait_for_boot(2, LIMIT_S)
    process.terminate()
    process.wait(LIMIT_S)
    assert first_boot(machine).wait(LIMIT_S) == 0
    assert (booted(machine), machine.boot_count) == (WANTED.digest, 2)


@pytest.mark.long("bootc")
def test_machine_without_target_joins(machine: LabMachine) -> None:
    assert first_boot(machine).wait(LIMIT_S) == 0
    assert (machine.root / "var/lib/treenail/firstboot.done").exists()
    assert machine.boot_count == 1


def test_killed_firstboot_is_completed_by_next_run(machine: LabMachine) -> None:
    """It joins in the boot in which the one before was killed, or could not begin."""
    settings = machine.root / "etc/treenail/agent.toml"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text("[firstboot\n")
    assert first_boot(machine).wait(LIMIT_S) == USED_WRONGLY
    settings.unlink()
    assert first_boot(machine).wait(LIMIT_S) == 0
    assert (machine.root / "var/lib/treenail/firstboot.done").exists()
