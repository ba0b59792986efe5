"""Real bootc in the guest: the contract of a back end, and updates by the agent."""

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.bootc_program import BootcProgramContract
from tests.contract.os_contract import OperatingSystemContract
from treenail.host.bootc.backend import PULL_UNIT, SWITCH_UNIT
from vmlab.drivers import Driver
from vmlab.image.build import Builder, Built
from vmlab.image.layers import Entry
from vmlab.image.programs import VARIABLES
from vmlab.remote import RemoteMachine, booted
from vmlab.site import Goal, Site
from vmlab.tools import REPOSITORY

pytestmark = pytest.mark.skipif(
    not os.environ.get(VARIABLES["bootc"]), reason=f"{VARIABLES['bootc']} names no bootc"
)

ARGUMENT = "treenail.image=2"
KERNEL_ARGUMENTS = {"usr/lib/bootc/kargs.d/10-treenail.toml": f'kargs = ["{ARGUMENT}"]\n'}
OUT = "/run/treenail-vm-output"
UNTIL_RUNNING = f"until systemctl -q is-active {SWITCH_UNIT}; do sleep 0.2; done"
Json = dict[str, Any]


@pytest.fixture
def machine(built: Built, builder: Builder, chosen: Driver) -> Iterator[RemoteMachine]:
    """Booted, with the registry's login, and no node."""
    with booted(REPOSITORY / "build/vm/bootc", built, builder, chosen) as machine:
        yield machine


class TestBootc(OperatingSystemContract):
    """On real deployments of a machine that really reboots."""


class GuestHost:
    """The guest, as the contract of the program has it."""

    def __init__(self, machine: RemoteMachine) -> None:
        self._machine = machine
        self.here = machine.images.here
        self.there = machine.images.there

    def sh(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run a script, and return what it printed, apart from its complaints."""
        command = f"sh >{OUT} 2>{OUT}.2; printf '%s\\0' $?; cat {OUT}; printf '\\0'; cat {OUT}.2"
        code, printed, complaints = self._machine.sh(command, stdin=script).split("\0")
        return subprocess.CompletedProcess(script, int(code), printed, complaints)

    def path(self, path: str) -> str:
        return path


class TestBootcProgram(BootcProgramContract):
    """The contract that the lab's bootc keeps, too."""

    @pytest.fixture
    def host(self, machine: RemoteMachine) -> GuestHost:
        return GuestHost(machine)


def read_status(site: Site) -> Json:
    """Return the status of the deployments as bootc prints it."""
    document = json.loads(site.machine.sh("bootc status --json --format-version=1"))
    status: Json = document["status"]
    return status


def goal_with_argument(site: Site) -> Goal:
    """Return a goal whose image brings a kernel argument."""
    entries = {path: Entry(text.encode()) for path, text in KERNEL_ARGUMENTS.items()}
    return site.goal(site.image("2", entries))


def assert_settled(site: Site, goal: Goal) -> None:
    """Check what bootc, the kernel and podman have after the update."""
    status = read_status(site)
    assert status["booted"]["image"]["imageDigest"] == goal.digest
    assert status["rollback"]["image"]["imageDigest"] == site.first.digest
    assert status["staged"] is None
    assert ARGUMENT in site.machine.sh("cat /proc/cmdline").split()
    assert site.machine.sh(f"podman image exists {goal.pull_spec} || echo gone") == "gone\n"


def test_update_applies_kernel_arguments_of_the_image(site: Site) -> None:
    goal = goal_with_argument(site)
    site.reach(goal)
    assert_settled(site, goal)


def test_next_image_removes_kernel_arguments(site: Site) -> None:
    site.reach(goal_with_argument(site))
    site.reach(site.goal(site.first.pull_spec))
    assert ARGUMENT not in site.machine.sh("cat /proc/cmdline").split()


def test_killed_switch_is_repeated(site: Site) -> None:
    goal = goal_with_argument(site)
    site.ask(goal)
    site.machine.sh(UNTIL_RUNNING, limit_s=600.0)
    site.machine.sh(f"systemctl kill --signal=KILL {SWITCH_UNIT}")
    site.settle(goal)
    assert_settled(site, goal)
    assert len(site.story.boots) == 1


def test_power_cut_in_switch_reaches_the_image(site: Site) -> None:
    goal = goal_with_argument(site)
    site.hold_back_writes()
    site.ask(goal)
    site.machine.sh(UNTIL_RUNNING, limit_s=600.0)
    site.cut_power()
    site.settle(goal)
    assert_settled(site, goal)
    assert [boot.digest for boot in site.story.boots] == [site.first.digest, goal.digest]


def test_host_without_composefs_reboots_in_place_of_a_soft_reboot(site: Site) -> None:
    """libostree supports soft reboots of a host with composefs only."""
    site.machine.sh("sed -i '1i reboot = \"auto\"' /etc/treenail/agent.toml")
    site.machine.sh("sync; systemctl restart treenail")
    goal = goal_with_argument(site)
    site.reach(goal)
    assert_settled(site, goal)


def test_pull_without_secret_reports_the_refusal(machine: RemoteMachine) -> None:
    machine.sh("rm /etc/ostree/auth.json")
    command = f"systemd-run --wait --pipe --quiet podman pull {machine.images.there} 2>&1; true"
    assert "authentication required" in machine.sh(command)
    command = f"bootc switch {machine.images.there} 2>&1; true"
    assert "authentication required" in machine.sh(command)
    assert machine.sh(f"systemctl is-active {PULL_UNIT}; true") == "inactive\n"
