"""bootc by a systemd, whichever one that is: the contract, and what is bootc's own."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.contract.bootc_machine import (
    BAD,
    BAD_AT_BOOT,
    HERE,
    QUICK,
    REPOSITORY,
    THERE,
    UNITS,
    UNSIGNED,
    BootcMachine,
)
from tests.contract.os_contract import OperatingSystemContract
from tests.contract.os_machines import go_on
from tests.waiting import wait_until
from treenail.deployment_change import DeploymentChange
from treenail.errors import BusyError, HostError, TransactionError
from treenail.host.bootc.backend import PULL_UNIT, ROLLBACK_UNIT, SWITCH_UNIT
from treenail.host.ostree.backend_settings import TransactionLimits
from treenail.host.ostree.deployments import TransactionProgress, TransactionVerdict
from treenail.host.systemd.transient import TransientJob
from treenail_lab.lifetime.fork_server import LabProcess
from treenail_lab.machine.ostree.sysroot import layer_packages, make_deployment

TO_THERE = DeploymentChange(image=THERE.pull_spec)
PROGRAM = """
import sys
from treenail.clocks import SystemClock
from treenail.host.bootc.backend import BootcBackend
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.ostree.deployments import TransactionVerdict
from treenail.deployment_change import DeploymentChange
from treenail.host.systemd.system_bus import SystemBus
from treenail_lab.lifetime.fork_server import LabProcess
root, address, verb, given = sys.argv[1:]
bootc = BootcBackend(Machine(
    Root(root),
    clock=SystemClock(),
    bus=SystemBus(address),
))
if verb == "finalize":
    bootc.finalize_staged(given)
elif verb == "roll back":
    bootc.roll_back()
else:
    bootc.stage_deployment(DeploymentChange(given), watch=lambda _: TransactionVerdict.CONTINUE)
"""


class BootcContract(OperatingSystemContract):
    def killed_at_work(self, machine: BootcMachine, verb: str, given: str, unit: str) -> None:
        """Another process begins it, and is killed as soon as the unit runs."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        arguments = [str(machine.root), machine.address, verb, given]
        with LabProcess(
            [sys.executable, "-c", PROGRAM, *arguments],
            env=environment,
            stdout=subprocess.DEVNULL,
        ) as process:
            units = machine.units()
            try:
                wait_until(
                    lambda: (run := units.find_run(unit)) is not None and run.is_running,
                    limit_s=60.0,
                )
            finally:
                process.send_signal(signal.SIGKILL)

    def test_pull_of_killed_agent_continues_and_is_joined(self, machine: BootcMachine) -> None:
        machine.change(replace(QUICK, pull_bytes_per_s=100_000))
        self.killed_at_work(machine, "stage", THERE.pull_spec, PULL_UNIT)
        run = machine.units().find_run(PULL_UNIT)
        assert run.is_running
        transaction = machine.os().read_deployments().transaction
        assert transaction.method == f"treenail: pull {THERE.pull_spec}"
        machine.change(QUICK)
        machine.os().stage_deployment(TO_THERE, watch=go_on)
        again = machine.units().find_run(PULL_UNIT)
        assert (again.invocation, again.is_done) == (run.invocation, True)

    def test_switch_of_killed_agent_continues_and_is_joined(self, machine: BootcMachine) -> None:
        machine.os().stage_deployment(TO_THERE, watch=go_on)
        machine.change(replace(QUICK, pull_bytes_per_s=100_000))
        self.killed_at_work(machine, "finalize", THERE.digest, SWITCH_UNIT)
        run = machine.units().find_run(SWITCH_UNIT)
        assert run.is_running
        during = machine.os().read_deployments()
        assert during.transaction.method == f"treenail: switch to {THERE.pull_spec}"
        assert during.booted.digest == HERE.digest
        machine.change(QUICK)
        machine.os().finalize_staged(THERE.digest)
        staged = machine.os().read_deployments().staged
        assert (staged.digest, staged.is_locked) == (THERE.digest, False)

    def at_there(self, machine: BootcMachine) -> None:
        """The machine was booted into `THERE`, from `HERE`."""
        machine.os().stage_deployment(TO_THERE, watch=go_on)
        machine.os().finalize_staged(THERE.digest)
        machine.reboot()

    def assert_goes_back(self, machine: BootcMachine) -> None:
        first, *_ = machine.sysroot.list_deployments()
        assert first.digest == HERE.digest
        machine.reboot()
        assert [each.digest for each in machine.os().read_deployments().in_boot_order] == [
            HERE.digest,
            THERE.digest,
        ]

    def test_rollback_of_killed_agent_continues_and_stays(self, machine: BootcMachine) -> None:
        self.at_there(machine)
        machine.change(replace(QUICK, staging_s=300.0))
        self.killed_at_work(machine, "roll back", "", ROLLBACK_UNIT)
        run = machine.units().find_run(ROLLBACK_UNIT)
        assert run.is_running
        machine.change(QUICK)
        machine.os().roll_back()
        assert machine.units().find_run(ROLLBACK_UNIT) is None
        self.assert_goes_back(machine)

    def test_rollback_with_unread_result_stays(self, machine: BootcMachine) -> None:
        self.at_there(machine)
        bootc = (str(machine.root / "usr/bin/bootc"), "rollback")
        what = f"treenail: roll back to {HERE.pull_spec}"
        machine.units().run_job(TransientJob(ROLLBACK_UNIT, what, bootc, 60.0), lambda: None)
        machine.os().roll_back()
        self.assert_goes_back(machine)

    def test_roll_back_drops_image_staged_since(self, machine: BootcMachine) -> None:
        self.at_there(machine)
        machine.os().roll_back()
        subprocess.run(
            [machine.root / "usr/bin/bootc", "switch", BAD_AT_BOOT.pull_spec], check=True
        )
        machine.os().roll_back()
        self.assert_goes_back(machine)

    def test_drop_removes_image_that_boot_loader_gave_up(self, machine: BootcMachine) -> None:
        here = machine.sysroot.find_booted()
        there = make_deployment(THERE, THERE.pull_spec, here.kernel_arguments)
        machine.sysroot.write_deployments((there, here))
        machine.sysroot.boot_deployment(1)
        machine.os().drop_staged(BAD.digest)
        assert len(machine.os().read_deployments().in_boot_order) == 2
        for _ in range(2):
            machine.os().drop_staged(THERE.digest)
            assert [each.digest for each in machine.os().read_deployments().in_boot_order] == [
                HERE.digest
            ]

    def test_finalize_undeploys_former_deployment_of_same_image(
        self, machine: BootcMachine
    ) -> None:
        self.at_there(machine)
        machine.os().stage_deployment(DeploymentChange(image=HERE.pull_spec), watch=go_on)
        machine.os().finalize_staged(HERE.digest)
        found = machine.os().read_deployments().in_boot_order
        assert [each.digest for each in found] == [HERE.digest, THERE.digest]
        assert found[0].is_staged

    def test_finalize_leaves_no_unit_and_no_pulled_image(self, machine: BootcMachine) -> None:
        bootc = machine.os()
        bootc.stage_deployment(TO_THERE, watch=go_on)
        bootc.finalize_staged(THERE.digest)
        assert [unit for unit in UNITS if machine.units().find_run(unit)] == []
        stored = machine.root / "var/lib/containers/storage/images.json"
        assert stored.read_text() == "[]"

    def test_switch_with_unread_result_does_not_block(self, machine: BootcMachine) -> None:
        machine.os().stage_deployment(TO_THERE, watch=go_on)
        for what in (f"treenail: switch to {THERE.pull_spec}", "treenail: switch to another"):
            machine.units().run_job(
                TransientJob(SWITCH_UNIT, what, ("/bin/true",), 60.0), lambda: None
            )
            machine.os().finalize_staged(THERE.digest)
            staged = machine.os().read_deployments().staged
            assert (staged.digest, staged.is_locked) == (THERE.digest, False)
            machine.os().drop_staged(THERE.digest)
            machine.os().stage_deployment(TO_THERE, watch=go_on)

    def test_failed_pull_does_not_block(self, machine: BootcMachine) -> None:
        with pytest.raises(TransactionError):
            machine.os().stage_deployment(
                DeploymentChange(image=machine.images.broken), watch=go_on
            )
        machine.os().stage_deployment(TO_THERE, watch=go_on)
        staged = machine.os().read_deployments().staged
        assert staged.digest == THERE.digest

    def test_deployed_image_is_not_locked(self, machine: BootcMachine) -> None:
        machine.os().stage_deployment(TO_THERE, watch=go_on)
        machine.os().finalize_staged(THERE.digest)
        with pytest.raises(HostError, match=f"cannot stage .*: {THERE.pull_spec} is staged"):
            machine.os().stage_deployment(TO_THERE, watch=go_on)

    def test_failed_switch_reports_the_error_of_bootc(self, machine: BootcMachine) -> None:
        bootc = machine.os()
        bootc.stage_deployment(DeploymentChange(image=BAD.pull_spec), watch=go_on)
        with pytest.raises(TransactionError) as caught:
            bootc.finalize_staged(BAD.digest)
        assert str(caught.value) == (
            f"cannot switch to {BAD.pull_spec} with bootc: "
            "Switching: Switching (ostree): Staging: no space left on device"
        )
        assert caught.value.remedy == "free space in /sysroot and /boot"
        staged = bootc.read_deployments().staged
        assert staged.is_locked

    def test_image_staged_instead_of_the_requested_one_is_dropped(
        self, machine: BootcMachine
    ) -> None:
        bootc = machine.os()
        bootc.stage_deployment(TO_THERE, watch=go_on)
        machine.change(replace(QUICK, staged_instead=BAD_AT_BOOT.pull_spec))
        with pytest.raises(TransactionError) as caught:
            bootc.finalize_staged(THERE.digest)
        assert str(caught.value) == (
            f"bootc did not stage {THERE.pull_spec}: it staged {BAD_AT_BOOT.pull_spec} "
            f"({BAD_AT_BOOT.digest})"
        )
        assert machine.sysroot.read_staged() is None
        machine.change(QUICK)
        bootc.finalize_staged(THERE.digest)
        staged = bootc.read_deployments().staged
        assert (staged.digest, staged.is_locked) == (THERE.digest, False)

    def staged_wrong_image_after_kill(self, machine: BootcMachine) -> None:
        """An agent is killed in a switch that stages another image, and the switch ends."""
        machine.os().stage_deployment(TO_THERE, watch=go_on)
        wrong = replace(QUICK, staged_instead=BAD_AT_BOOT.pull_spec)
        # Slow until the agent is dead: an agent that sees the end of the switch removes the unit.
        machine.change(replace(wrong, staging_s=300.0))
        self.killed_at_work(machine, "finalize", THERE.digest, SWITCH_UNIT)
        machine.change(wrong)
        units = machine.units()
        wait_until(
            lambda: (run := units.find_run(SWITCH_UNIT)) is not None and run.is_done,
            limit_s=60.0,
        )
        assert machine.sysroot.read_staged() is not None

    def test_wrong_image_of_killed_agent_is_dropped(self, machine: BootcMachine) -> None:
        self.staged_wrong_image_after_kill(machine)
        machine.change(QUICK)
        machine.os().finalize_staged(THERE.digest)
        staged = machine.os().read_deployments().staged
        assert (staged.digest, staged.is_locked) == (THERE.digest, False)

    def test_drop_removes_wrong_image_of_killed_agent_and_no_other(
        self, machine: BootcMachine
    ) -> None:
        self.staged_wrong_image_after_kill(machine)
        machine.os().drop_staged(THERE.digest)
        assert machine.sysroot.read_staged() is None
        machine.change(QUICK)
        subprocess.run(
            [machine.root / "usr/bin/bootc", "switch", BAD_AT_BOOT.pull_spec], check=True
        )
        machine.os().drop_staged(THERE.digest)
        staged = machine.sysroot.read_staged()
        assert staged.digest == BAD_AT_BOOT.digest

    def test_switch_without_progress_is_stopped(self, machine: BootcMachine) -> None:
        machine.os().stage_deployment(TO_THERE, watch=go_on)
        machine.slow_down()
        hurried = machine.os(TransactionLimits(stall_s=0.5))
        with pytest.raises(TransactionError, match=r"no progress for 0\.5 s"):
            hurried.finalize_staged(THERE.digest)
        assert machine.units().find_run(SWITCH_UNIT) is None
        staged = machine.os().read_deployments().staged
        assert staged.is_locked

    def test_stage_of_image_without_digest_is_refused(self, machine: BootcMachine) -> None:
        with pytest.raises(HostError, match="not named by its digest"):
            machine.os().stage_deployment(
                DeploymentChange(image="registry.lab.example/os/node:2.0"), watch=go_on
            )

    def test_status_under_sysroot_lock_is_busy(self, machine: BootcMachine) -> None:
        lock = machine.sysroot.acquire_lock()
        assert lock is not None
        try:
            with pytest.raises(BusyError, match=r"did not answer within 1 s.* holds the sysroot"):
                machine.os(status_s=1.0).read_deployments()
            hurried = machine.os(TransactionLimits(transaction_s=0.0), status_s=0.2)
            with pytest.raises(BusyError):
                hurried.wait_for_other_transaction(watch=go_on)
        finally:
            os.close(lock)
        assert machine.os().read_deployments().booted is not None

    def test_wait_for_other_returns_after_sysroot_lock(self, machine: BootcMachine) -> None:
        lock = machine.sysroot.acquire_lock()
        assert lock is not None
        texts: list[str] = []

        def watch(progress: TransactionProgress) -> TransactionVerdict:
            if not texts:
                os.close(lock)
            texts.append(progress.text)
            return TransactionVerdict.CONTINUE

        machine.os().wait_for_other_transaction(watch=watch)
        assert texts == ["waiting for the lock of the sysroot"]

    def test_labels_are_read_before_and_after_deployment(self, machine: BootcMachine) -> None:
        bootc = machine.os()
        bootc.stage_deployment(TO_THERE, watch=go_on)
        staged = bootc.read_deployments().staged
        assert staged.labels["machineconfig"] == "rendered-worker-2"
        bootc.finalize_staged(THERE.digest)
        machine.reboot()
        booted = machine.os().read_deployments().booted
        assert booted.labels == staged.labels

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            (DeploymentChange(append_kargs=("nosmt",)), "kernel arguments"),
            (DeploymentChange(image=THERE.pull_spec, install_packages=("usbguard",)), "packages"),
        ],
    )
    def test_stage_of_other_changes_is_refused_with_remedy(
        self, machine: BootcMachine, change: DeploymentChange, named: str
    ) -> None:
        with pytest.raises(HostError, match=f"only the image .* requested: {named}$") as e:
            machine.os().stage_deployment(change, watch=go_on)
        assert "/usr/lib/bootc/kargs.d" in e.value.remedy
        assert 'backend = "rpm-ostree"' in e.value.remedy

    def test_stage_with_local_changes_is_refused_before_pull(self, machine: BootcMachine) -> None:
        sysroot = machine.sysroot
        booted = sysroot.find_booted()
        assert booted is not None
        changed = layer_packages(booted, ("usbguard",), ())
        sysroot.write_deployments((changed,))
        sysroot.boot_deployment()
        name = f"{changed.checksum}.{changed.serial}.origin"
        origin = machine.root / f"sysroot/ostree/deploy/{changed.osname}/deploy/{name}"
        origin.parent.mkdir(parents=True, exist_ok=True)
        origin.write_text(
            f"[origin]\ncontainer-image-reference={changed.refspec}\n\n"
            "[packages]\nrequested=usbguard;\n"
        )
        with pytest.raises(HostError) as caught:
            machine.os().stage_deployment(TO_THERE, watch=go_on)
        assert str(caught.value) == (
            "bootc cannot replace the booted deployment: rpm-ostree changed it: "
            "packages requested=usbguard"
        )
        assert machine.units().find_run(PULL_UNIT) is None

    def test_switch_verifies_signature_if_policy_requires_it(self, machine: BootcMachine) -> None:
        machine.set_policy({
            "default": [{"type": "reject"}],
            "transports": {
                "docker": {REPOSITORY: [{"type": "sigstoreSigned", "keyPath": "/etc/node.pub"}]},
                "containers-storage": {"": [{"type": "insecureAcceptAnything"}]},
            },
        })  # fmt: skip
        bootc = machine.os()
        with pytest.raises(TransactionError, match="Source image rejected: A signature was req"):
            bootc.stage_deployment(DeploymentChange(image=UNSIGNED.pull_spec), watch=go_on)
        assert bootc.read_deployments().staged is None
        bootc.stage_deployment(TO_THERE, watch=go_on)
        bootc.finalize_staged(THERE.digest)
        staged = machine.sysroot.read_staged()
        assert staged.refspec == f"ostree-image-signed:containers-storage:{THERE.pull_spec}"
        assert bootc.read_deployments().in_boot_order[0].image == THERE.pull_spec

    def test_switch_without_required_signature_leaves_it_to_podman(
        self, machine: BootcMachine
    ) -> None:
        machine.set_policy({
            "default": [{"type": "insecureAcceptAnything"}],
            "transports": {
                "docker": {REPOSITORY: [{"type": "sigstoreSigned", "keyPath": "/etc/node.pub"}]}
            },
        })  # fmt: skip
        bootc = machine.os()
        with pytest.raises(TransactionError, match="Source image rejected: A signature was req"):
            bootc.stage_deployment(DeploymentChange(image=UNSIGNED.pull_spec), watch=go_on)
        bootc.stage_deployment(TO_THERE, watch=go_on)
        bootc.finalize_staged(THERE.digest)
        staged = machine.sysroot.read_staged()
        assert staged.refspec == f"ostree-unverified-image:containers-storage:{THERE.pull_spec}"

    def test_stage_with_image_of_another_is_refused(self, machine: BootcMachine) -> None:
        subprocess.run([machine.root / "usr/bin/bootc", "switch", THERE.pull_spec], check=True)
        with pytest.raises(HostError, match=f"cannot stage .*: {THERE.pull_spec} is staged"):
            machine.os().stage_deployment(DeploymentChange(image=BAD.pull_spec), watch=go_on)

    def test_drop_leaves_the_reboot_request_of_another_program(self, machine: BootcMachine) -> None:
        bootc = machine.os()
        bootc.stage_deployment(TO_THERE, watch=go_on)
        bootc.finalize_staged(THERE.digest)
        request = machine.root / "run/reboot-required"
        request.write_text("*** System restart required ***\n")
        bootc.drop_staged(THERE.digest)
        assert request.exists()

    def test_switch_requests_a_reboot_until_image_is_dropped(self, machine: BootcMachine) -> None:
        bootc = machine.os()
        bootc.stage_deployment(TO_THERE, watch=go_on)
        bootc.finalize_staged(THERE.digest)
        request = machine.root / "run/reboot-required"
        assert request.read_text() == f"bootc: Reboot required for image: {THERE.digest}"
        bootc.drop_staged(THERE.digest)
        assert not request.exists()

    def test_drop_removes_deployed_image(self, machine: BootcMachine) -> None:
        bootc = machine.os()
        bootc.stage_deployment(TO_THERE, watch=go_on)
        bootc.finalize_staged(THERE.digest)
        bootc.drop_staged(THERE.digest)
        assert bootc.read_deployments().staged is None
        wait_until(lambda: machine.sysroot.read_staged() is None)
