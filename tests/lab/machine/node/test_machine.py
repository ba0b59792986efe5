"""A whole machine: power, the agent's service, and faults."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from gi.repository import GLib

from tests.lab.machine import stub_agent
from tests.lab.machine.client import (
    Client,
    Peer,
    RpmOstreeClient,
    error_name,
    run,
    variants,
    wait_until,
)
from treenail.errors import HostError, UsageError
from treenail_lab import images
from treenail_lab.images import Image, ImageCatalogue, make_image
from treenail_lab.lifetime.owner import owner
from treenail_lab.machine.bus.objects import BUSY
from treenail_lab.machine.node.agent_unit import AGENT_UNIT, START_LIMIT_BURST
from treenail_lab.machine.node.machine import KUBELET_CONFIG, LabMachine
from treenail_lab.machine.settings import MachineSettings
from treenail_lab.machine.systemd import login1

pytestmark = pytest.mark.integration

A = make_image("os/node", "41.1", 1_000_000)
B = replace(make_image("os/node", "41.2", 2_000_000), kernel_arguments=("from.image",))
BROKEN = make_image("os/node", "41.3", 2_000_000, faults={"finalize": "bootloader: no space"})
QUICK = MachineSettings(pull_bytes_per_s=100e6, staging_s=0.02, agent_stop_s=5.0)
LIMIT_S = 20.0


def make_machine(
    directory: Path, mode: str = "", behaviour: MachineSettings = QUICK, image: Image = A
) -> LabMachine:
    catalogue = directory / "images.json"
    images.save_catalogue(ImageCatalogue((A, B, BROKEN)), catalogue)
    agent = [sys.executable, str(stub_agent.__file__), mode] if mode else []
    return LabMachine(
        "node-a", directory / "a", catalogue, image=image, agent=agent, machine_settings=behaviour
    )


@contextmanager
def running(
    directory: Path, mode: str = "", behaviour: MachineSettings = QUICK
) -> Iterator[LabMachine]:
    with make_machine(directory, mode, behaviour) as machine:
        yield machine


@pytest.fixture
def machine(directory: Path) -> Iterator[LabMachine]:
    with running(directory) as started:
        yield started


def booted(machine: LabMachine) -> str:
    deployment = machine.booted_deployment
    return deployment.version if deployment is not None else ""


def wait_for_start(machine: LabMachine, count: int = 1) -> bool:
    """Wait until the agent, started so often, is ready."""
    return machine.agent.wait_until(
        lambda agent: agent.start_count == count and agent.is_ready, LIMIT_S
    )


def marked(directory: Path) -> list[str]:
    """The command lines of the processes that a machine in this directory started."""
    mark = f"TREENAIL_LAB_MACHINE={directory}/a".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().decode())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    # A client of the fork server stands for the daemon that its server forked.
    return [command for command in found if command and "fork_client" not in command]


# Power


def test_first_boot_is_the_image_it_was_installed_from(machine: LabMachine) -> None:
    assert (machine.is_on, machine.boot_count, booted(machine)) == (True, 1, "41.1")
    assert (machine.root / "run/ostree-booted").exists()
    with RpmOstreeClient(machine.address) as client:
        assert [d["version"] for d in client.deployments()] == ["41.1"]


def test_reboot_empties_run_and_has_another_boot_id(machine: LabMachine) -> None:
    before = machine.boot_id
    (machine.root / "run/leftover").touch()
    (machine.root / "var/lib/kept").touch()
    machine.reboot()
    assert machine.boot_id != before
    assert not (machine.root / "run/leftover").exists()
    assert (machine.root / "var/lib/kept").exists()
    assert machine.boot_count == 2


def test_soft_reboot_keeps_run_and_boot_id_and_enters_prepared_deployment(
    machine: LabMachine,
) -> None:
    before = machine.boot_id
    (machine.root / "run/kept").touch()
    machine.reboot(soft=True)
    assert (machine.boot_id, machine.boot_count) == (before, 2)
    assert (machine.root / "run/kept").exists()
    machine.stage_foreign_image(B, locked=True)
    machine.reboot(soft=True)
    assert (booted(machine), machine.is_staged_locked) == ("41.1", True)
    ostree = machine.root / "usr/bin/ostree"
    for arguments in (("lock-finalization", "--unlock"), ("prepare-soft-reboot", "0")):
        subprocess.run([ostree, "admin", *arguments], check=True)
    machine.reboot(soft=True)
    assert (booted(machine), machine.staged_deployment) == ("41.2", None)
    assert machine.boot_id == before
    machine.reboot()
    assert booted(machine) == "41.2"
    assert machine.boot_id != before


def test_reboot_goes_into_the_unlocked_deployment(machine: LabMachine) -> None:
    with RpmOstreeClient(machine.address) as client:
        assert run(client.rebase(B.pull_spec, locked=False)) == (True, "")
    machine.reboot()
    assert booted(machine) == "41.2"
    assert [d.version for d in machine.deployments] == ["41.2", "41.1"]


def test_reboot_with_locked_deployment_drops_it_and_logs(machine: LabMachine) -> None:
    machine.stage_foreign_image(B, locked=True)
    assert machine.is_staged_locked
    machine.reboot()
    assert (booted(machine), machine.staged_deployment) == ("41.1", None)
    assert [e["MESSAGE"] for e in machine.read_journal({"SYSLOG_IDENTIFIER": "ostree"})] == [
        "Not finalizing; deployment is locked for finalization"
    ]


def test_power_cut_with_unlocked_deployment_drops_it(machine: LabMachine) -> None:
    machine.stage_foreign_image(B)
    before = machine.boot_id
    machine.cut_power()
    assert (booted(machine), machine.staged_deployment) == ("41.1", None)
    assert machine.boot_id != before


@pytest.mark.parametrize("image", [B, BROKEN])
def test_failed_finalization_boots_the_old_deployment(directory: Path, image: Image) -> None:
    behaviour = replace(QUICK, finalization_error="" if image is BROKEN else "bootloader: no space")
    with running(directory, behaviour=behaviour) as machine:
        machine.stage_foreign_image(image)
        machine.reboot()
        assert booted(machine) == "41.1"
        (entry,) = machine.read_journal({"SYSLOG_IDENTIFIER": "ostree"})
        assert (entry["MESSAGE"], entry["PRIORITY"]) == ("error: bootloader: no space", "3")


def test_logind_reboots_the_machine(machine: LabMachine) -> None:
    machine.stage_foreign_image(B)
    with Client(machine.address) as client:
        manager = (login1.NAME, login1.PATH, f"{login1.NAME}.Manager", "Reboot")
        client.call(manager, "(b)", False)
        wait_until(client.connection.is_closed)
    assert machine.wait_for_boot(2, LIMIT_S)
    assert booted(machine) == "41.2"


def test_finalize_deployment_unlocks_and_reboots(machine: LabMachine) -> None:
    with RpmOstreeClient(machine.address) as client:
        run(client.rebase(B.pull_spec))
        (address,) = client.os("FinalizeDeployment", "(a{sv})", variants(checksum=("s", B.digest)))
        assert run(address) == (True, "")
    assert machine.wait_for_boot(2, LIMIT_S)
    assert booted(machine) == "41.2"


def test_rebase_after_rpm_ostree_began_reboot_is_refused(machine: LabMachine) -> None:
    # The delay lock keeps the machine up long enough to ask.
    machine.change_settings(inhibit_delay_max_s=60.0)
    refspec = f"ostree-unverified-registry:{B.pull_spec}"
    with (
        machine.inhibit_shutdown("backup", "busy", mode="delay"),
        RpmOstreeClient(machine.address) as client,
    ):
        options = variants(reboot=("b", True))
        (address,) = client.os("Rebase", "(a{sv}sas)", options, refspec, [])
        assert run(address) == (True, "")
        with pytest.raises(GLib.Error, match="Reboot initiated"):
            client.rebase(A.pull_spec)
    assert machine.wait_for_boot(2, LIMIT_S)
    assert booted(machine) == "41.2"


def test_stopped_machine_leaves_no_process_and_no_socket(directory: Path) -> None:
    machine = make_machine(directory, "run")
    machine.start()
    with RpmOstreeClient(machine.address) as client:
        client.shown()
    assert len(marked(directory)) == 4
    machine.stop()
    assert marked(directory) == []
    assert [path for path in directory.rglob("*") if path.is_socket()] == []


def test_machine_can_be_started_again(directory: Path) -> None:
    machine = make_machine(directory)
    with machine:
        machine.stage_foreign_image(B)
    assert not machine.is_on
    with machine:
        assert (machine.boot_count, booted(machine)) == (2, "41.2")


def test_failed_boot_leaves_no_process(directory: Path) -> None:
    machine = make_machine(directory)
    (directory / "a/settings.json").write_text("{")
    with pytest.raises(HostError, match="cannot start the systemd emulator") as failed:
        machine.start()
    assert str(failed.value.remedy).endswith("/daemons.log")
    assert not machine.is_on
    assert marked(directory) == []


def test_stop_during_slow_boot_does_not_wait(directory: Path) -> None:
    with running(directory, behaviour=replace(QUICK, boot_s=3600.0)) as machine:
        rebooting = threading.Thread(target=machine.reboot)
        rebooting.start()
        wait_until(lambda: not machine.is_on)
        machine.stop()
        rebooting.join(LIMIT_S)
        assert not machine.is_on


def test_power_cut_with_suspended_processes_ends_them(directory: Path) -> None:
    with running(directory, "deaf") as machine:
        wait_for_start(machine)
        with RpmOstreeClient(machine.address) as client:
            client.shown()
        with (
            machine.hang_daemon("rpm-ostreed"),
            machine.hang_daemon("bus"),
            machine.hang_daemon("agent"),
        ):
            machine.cut_power()
        assert machine.boot_count == 2


def test_transient_service_does_not_survive_a_power_cut(
    machine: LabMachine, directory: Path
) -> None:
    command = [("/bin/sleep", ["sleep", "3600"], False)]
    properties = [("ExecStart", GLib.Variant("a(sasb)", command))]
    with Client(machine.address) as client:
        client.call(
            (
                "org.freedesktop.systemd1",
                "/org/freedesktop/systemd1",
                "org.freedesktop.systemd1.Manager",
                "StartTransientUnit",
            ),
            "(ssa(sv)a(sa(sv)))",
            "x.service",
            "fail",
            properties,
            [],
        )
    assert any(command.startswith("sleep") for command in marked(directory))
    machine.cut_power()
    wait_until(lambda: not any(command.startswith("sleep") for command in marked(directory)))


def test_several_machines_run_side_by_side(directory: Path) -> None:
    with (
        owner.temporary_directory() as other,
        running(directory, "run") as first,
        running(other, "run") as second,
    ):
        first.stage_foreign_image(B)
        first.reboot()
        assert (booted(first), booted(second)) == ("41.2", "41.1")
        assert (first.boot_count, second.boot_count) == (2, 1)


def test_directory_with_long_path_is_refused_before_installation(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    with pytest.raises(UsageError, match="107 is the limit"):
        LabMachine("node-a", long, tmp_path / "images.json", image=A)
    assert not long.exists()


def test_pull_secret_of_the_kubelet_is_private(directory: Path) -> None:
    catalogue = directory / "images.json"
    machine = LabMachine("a", directory / "a", catalogue, image=A, kubelet_config='{"auths": {}}')
    place = machine.root / KUBELET_CONFIG
    assert (place.read_text(), place.stat().st_mode & 0o777) == ('{"auths": {}}', 0o600)


# The agent


def test_agent_notification_sets_readiness_and_status(directory: Path) -> None:
    with running(directory, "run") as machine:
        assert wait_for_start(machine)
        assert (machine.agent.state, machine.agent.status) == ("active", "run none")
        machine.stop_agent()
        assert (machine.agent.state, machine.agent.pid) == ("inactive", 0)
        assert machine.agent.status == "stopping"


def test_agent_that_is_killed_is_started_again(directory: Path) -> None:
    with running(directory, "run") as machine:
        wait_for_start(machine)
        machine.kill_agent()
        assert wait_for_start(machine, 2)
        text = f"{AGENT_UNIT}: Main process exited, code=killed, status=9"
        assert machine.read_journal({"MESSAGE": text})


def test_agent_that_exits_with_0_is_not_restarted(directory: Path) -> None:
    with running(directory, "leave") as machine:
        assert machine.agent.wait_until(lambda agent: agent.state == "inactive", LIMIT_S)
        assert machine.agent.start_count == 1


def test_agent_that_keeps_failing_reaches_start_limit(directory: Path) -> None:
    with running(directory, "fail") as machine:
        assert machine.agent.wait_until(lambda agent: agent.state == "failed", LIMIT_S)
        assert machine.agent.start_count == START_LIMIT_BURST + 1
        machine.reboot()
        assert machine.agent.wait_until(
            lambda agent: agent.start_count > START_LIMIT_BURST + 1, LIMIT_S
        )


def test_agent_without_watchdog_messages_is_restarted(directory: Path) -> None:
    behaviour = replace(QUICK, agent_watchdog_s=0.5)
    with running(directory, "mute", behaviour) as machine:
        assert wait_for_start(machine, 2)
        assert machine.agent.status == "mute 500000"


def test_suspended_agent_is_restarted(directory: Path) -> None:
    with running(directory, "run", replace(QUICK, agent_watchdog_s=0.5)) as machine:
        wait_for_start(machine)
        with machine.hang_daemon("agent"):
            assert wait_for_start(machine, 2)


def test_agent_that_ignores_sigterm_is_killed_at_the_limit(directory: Path) -> None:
    with running(directory, "deaf", replace(QUICK, agent_stop_s=0.2)) as machine:
        wait_for_start(machine)
        machine.stop_agent()
        assert (machine.agent.state, machine.agent.pid) == ("inactive", 0)


def test_agent_is_started_on_request_and_by_every_boot(directory: Path) -> None:
    with running(directory, "run") as machine:
        machine.stop_agent()
        machine.start_agent()
        assert wait_for_start(machine, 2)
        machine.reboot()
        assert wait_for_start(machine, 3)
        machine.cut_power()
        assert wait_for_start(machine, 4)


# The services


def test_restart_of_rpm_ostreed_ends_its_transaction(machine: LabMachine) -> None:
    machine.change_settings(pull_bytes_per_s=1000.0)
    with RpmOstreeClient(machine.address) as client:
        with Peer(client.rebase(B.pull_spec)) as peer:
            peer.start()
            machine.restart_service("rpm-ostreed")
            wait_until(peer.connection.is_closed)
        assert peer.finished is None
        assert client.shown()["ActiveTransactionPath"] == ""
        assert [d["version"] for d in client.deployments()] == ["41.1"]
        machine.change_settings(pull_bytes_per_s=100e6)
        assert run(client.rebase(B.pull_spec)) == (True, "")


def test_systemctl_restarts_rpm_ostreed_as_well(machine: LabMachine) -> None:
    machine.change_settings(pull_bytes_per_s=1000.0)
    with RpmOstreeClient(machine.address) as client:
        peer = Peer(client.rebase(B.pull_spec))
        peer.start()
        manager = "org.freedesktop.systemd1.Manager"
        whom = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", manager, "RestartUnit")
        client.call(whom, "(ss)", "rpm-ostreed.service", "replace")
        wait_until(peer.connection.is_closed)


def test_suspended_service_answers_after_it_continues(machine: LabMachine) -> None:
    with RpmOstreeClient(machine.address) as client:
        client.shown()
        with machine.hang_daemon("rpm-ostreed"), pytest.raises(GLib.Error):
            client.connection.call_sync(
                "org.projectatomic.rpmostree1",
                "/org/projectatomic/rpmostree1/Sysroot",
                "org.projectatomic.rpmostree1.Sysroot",
                "Reload",
                None,
                None,
                0,
                200,
                None,
            )
        assert client.shown()["ActiveTransactionPath"] == ""


def test_suspend_of_stopped_service_is_refused(machine: LabMachine) -> None:
    with pytest.raises(HostError, match="cannot suspend rpm-ostreed: it does not run on node-a"):
        machine.hang_daemon("rpm-ostreed").__enter__()


def test_held_transaction_makes_others_busy_until_released(machine: LabMachine) -> None:
    with RpmOstreeClient(machine.address) as client:
        with machine.hold_transaction():
            method, sender, _ = client.shown()["ActiveTransaction"]
            assert method == "RefreshMd"
            assert sender != client.connection.get_unique_name()
            with pytest.raises(GLib.Error) as refused:
                client.rebase(B.pull_spec)
            assert error_name(refused.value) == BUSY
        wait_until(lambda: client.shown()["ActiveTransactionPath"] == "")
        assert run(client.rebase(B.pull_spec)) == (True, "")


def test_locked_sysroot_makes_rpm_ostree_busy(machine: LabMachine) -> None:
    with RpmOstreeClient(machine.address) as client:
        with machine.lock_sysroot():
            with pytest.raises(GLib.Error, match="System transaction in progress") as refused:
                client.rebase(B.pull_spec)
            assert error_name(refused.value) == BUSY
            assert client.shown()["ActiveTransactionPath"] == ""
        assert run(client.rebase(B.pull_spec)) == (True, "")


def test_sysroot_is_free_once_a_transaction_has_finished(machine: LabMachine) -> None:
    machine.change_settings(pull_bytes_per_s=1000.0)
    with RpmOstreeClient(machine.address) as client, Peer(client.rebase(B.pull_spec)) as peer:
        peer.start()
        with pytest.raises(HostError, match="a transaction holds it"):
            machine.lock_sysroot().__enter__()
        peer.cancel()
        peer.result()
        with machine.lock_sysroot():
            pass


def test_inhibitor_of_another_program_is_listed(machine: LabMachine) -> None:
    with machine.inhibit_shutdown("backup", "running"), Client(machine.address) as client:
        manager = (login1.NAME, login1.PATH, f"{login1.NAME}.Manager", "ListInhibitors")
        (held,) = client.call(manager)
        assert held == [("shutdown", "backup", "running", "block", os.getuid(), os.getpid())]


def test_unknown_setting_is_refused(machine: LabMachine) -> None:
    with pytest.raises(TypeError, match="pull_bites_per_s"):
        machine.change_settings(pull_bites_per_s=1)


def test_unknown_service_name_is_refused(machine: LabMachine) -> None:
    with pytest.raises(ValueError, match="rpm-ostreed"):
        machine.restart_service("sshd")
    with pytest.raises(ValueError, match="sshd"):
        machine.hang_daemon("sshd").__enter__()


def test_rpm_ostreed_after_crash_is_activated_by_next_call(machine: LabMachine) -> None:
    with RpmOstreeClient(machine.address) as client:
        client.shown()
        machine.restart_service("rpm-ostreed", signal_number=signal.SIGKILL)
        assert client.shown()["ActiveTransactionPath"] == ""
