"""Real bootc in the guest: the contract of a back end, and updates by the agent."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.bootc_program import SAVE_PROGRESS, BootcProgramContract, digest
from tests.contract.os_contract import OperatingSystemContract
from treenail.errors import BusyError
from treenail.host.bootc.backend import PULL_UNIT, SWITCH_UNIT
from vmlab.drivers import Driver, driver
from vmlab.image.build import Builder, Built
from vmlab.image.layers import Entry
from vmlab.image.programs import VARIABLES
from vmlab.machine import Machine
from vmlab.remote import RemoteMachine, booted
from vmlab.site import Goal, Site
from vmlab.tools import REPOSITORY

pytestmark = pytest.mark.skipif(
    not os.environ.get(VARIABLES["bootc"]), reason=f"{VARIABLES['bootc']} names no bootc"
)

ARGUMENT = "treenail.image=2"
ARGUMENTS_FILE = "usr/lib/bootc/kargs.d/10-treenail.toml"
OUT = "/run/treenail-vm-output"
UNTIL_DEPLOYING = (
    f"until systemctl show -P ActiveState {SWITCH_UNIT} | grep -qx activating; do sleep 0.2; done; "
    "until journalctl -b -t bootc | grep -q 'Staging image for deployment'; do sleep 0.2; done"
)
"""Within the switch, before its result is complete."""
WRITABLE = "unshare --mount sh -c 'mount -o remount,rw /sysroot && {}'"
"""Runs a command that may write to /sysroot, which libostree mounts read-only."""
HOLD_LOCK = """\
import fcntl, time
lock = open("/sysroot/ostree/lock", "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
open("/run/locked", "w").close()
time.sleep(3600)
"""
Json = dict[str, Any]


@pytest.fixture
def machine(built: Built, builder: Builder, chosen: Driver) -> Iterator[RemoteMachine]:
    """Booted, with the registry's login, and no node."""
    with booted(REPOSITORY / "build/vm/bootc", built, builder, chosen) as machine:
        yield machine


@pytest.fixture(scope="class")
def shared(built: Built, builder: Builder) -> Iterator[RemoteMachine]:
    """One machine for a class of tests."""
    with (
        # A socket's path must be short.
        tempfile.TemporaryDirectory(prefix="tnvm", dir="/tmp") as directory,
        booted(REPOSITORY / "build/vm/bootc", built, builder, driver(Path(directory))) as machine,
    ):
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
    """The contract that the lab's bootc keeps, too; on one machine, as nothing reboots it."""

    @pytest.fixture
    def host(self, shared: RemoteMachine) -> Iterator[GuestHost]:
        yield GuestHost(shared)
        if read_status(shared)["staged"] is not None:
            shared.sh("ostree admin undeploy 0; rm /run/reboot-required; bootc internals cleanup")


def read_status(machine: Machine | RemoteMachine) -> Json:
    """Return the status of the deployments as bootc prints it."""
    document = json.loads(machine.sh("bootc status --json --format-version=1"))
    status: Json = document["status"]
    return status


def goal_with_argument(site: Site) -> Goal:
    """Return a goal whose image brings a kernel argument."""
    return site.goal(site.image("2", {ARGUMENTS_FILE: make_arguments_file(ARGUMENT)}))


def make_arguments_file(*arguments: str) -> Entry:
    """Return the file of an image that adds these kernel arguments."""
    return Entry(f"kargs = {json.dumps(arguments)}\n".encode())


def assert_settled(site: Site, goal: Goal) -> None:
    """Check what bootc, the kernel and podman have after the update."""
    status = read_status(site.machine)
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
    # Without the directory in the next image, bootc keeps the arguments.
    site.reach(site.goal(site.image("3", {ARGUMENTS_FILE: make_arguments_file()})))
    assert ARGUMENT not in site.machine.sh("cat /proc/cmdline").split()


def test_killed_switch_is_repeated(site: Site) -> None:
    goal = goal_with_argument(site)
    site.ask(goal)
    site.machine.sh(UNTIL_DEPLOYING, limit_s=600.0)
    site.machine.sh(f"systemctl kill --signal=KILL {SWITCH_UNIT}")
    site.settle(goal)
    assert_settled(site, goal)
    assert len(site.story.boots) == 1


def test_power_cut_in_switch_reaches_the_image(site: Site) -> None:
    goal = goal_with_argument(site)
    site.hold_back_writes()
    site.ask(goal)
    site.machine.sh(UNTIL_DEPLOYING, limit_s=600.0)
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


def test_rollback_toggles_and_drops_staged_deployment(machine: RemoteMachine) -> None:
    machine.sh(f"bootc switch --quiet {machine.images.there}")
    machine.reboot()
    booted = read_status(machine)["booted"]
    assert booted["image"]["imageDigest"] == digest(machine.images.there)
    machine.sh(f"bootc switch --quiet {machine.images.here}")
    seen = []
    for _ in range(2):
        machine.sh("bootc rollback")
        found = read_status(machine)
        seen.append((found["rollbackQueued"], found["staged"]))
    assert seen == [(True, None), (False, None)]


def test_deployment_that_rpm_ostree_changed_is_incompatible(machine: RemoteMachine) -> None:
    change = (
        r'printf "\n[packages]\nrequested=usbguard;\n" | tee -a /ostree/deploy/*/deploy/*.origin'
    )
    machine.sh(WRITABLE.format(change))
    booted = read_status(machine)["booted"]
    assert (booted["incompatible"], booted["image"]) == (True, None)
    assert "rpm-ostree" in machine.sh("bootc upgrade 2>&1 && echo upgraded; true")
    machine.sh(f"bootc switch --quiet {machine.images.there}")
    staged = read_status(machine)["staged"]
    assert (staged["incompatible"], staged["image"]["imageDigest"]) == (
        False,
        digest(machine.images.there),
    )
    assert "[packages]" not in machine.sh("cat /run/ostree/staged-deployment")


def test_status_waits_for_the_lock_of_the_sysroot(machine: RemoteMachine) -> None:
    machine.sh("cat >/run/hold.py", stdin=HOLD_LOCK)
    holding = WRITABLE.format("exec python3 /run/hold.py")
    machine.sh(f"systemd-run --quiet --unit=hold {holding}")
    machine.sh("until [ -e /run/locked ]; do sleep 0.2; done")
    assert machine.sh("timeout 20 bootc status --json 2>&1; echo $?") == "124\n"
    with pytest.raises(BusyError, match="holds the sysroot"):
        machine.os().read_deployments()
    machine.sh("systemctl stop hold")
    assert read_status(machine)["staged"] is None


def test_switch_from_podmans_storage_reports_unpacked_bytes(machine: RemoteMachine) -> None:
    image = machine.images.there
    machine.sh(f"podman pull --quiet --authfile /etc/ostree/auth.json {image}")
    command = (
        "bootc switch --quiet --progress-fd 3 --transport containers-storage "
        f"{image} >/dev/null 2>&1"
    )
    lines = machine.sh(SAVE_PROGRESS.format(command)).splitlines()
    events = [json.loads(line) for line in lines]
    last = [each for each in events if each["type"] == "ProgressBytes"][-1]
    assert (last["task"], last["bytes"] > last["bytesTotal"] > 0) == ("pulling", True)


def test_switch_to_image_with_truncated_history_fails(
    machine: RemoteMachine, built: Built, builder: Builder
) -> None:
    image = builder.variant(built, "no-history", {}, has_whole_history=False)
    assert "Truncated history" in machine.sh(f"bootc switch {image} 2>&1 && echo switched; true")
    assert read_status(machine)["staged"] is None


def test_soft_reboot_capable_deployment_cannot_be_soft_rebooted(machine: RemoteMachine) -> None:
    machine.sh(f"bootc switch --quiet {machine.images.there}")
    assert read_status(machine)["staged"]["softRebootCapable"] is True
    assert "composefs" in machine.sh("ostree admin prepare-soft-reboot 0 2>&1 && echo done; true")
