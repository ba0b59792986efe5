"""Behaviour that the agent relies on with every operating system back end.

A class of tests for each back end derives from this, and has the fixture ``machine``.
"""

import pytest

from tests.contract.os_machines import OsMachine, at_once, digest, digests, go_on
from treenail.deployment_change import DeploymentChange
from treenail.errors import CancelledError, HostError, TransactionError
from treenail.host.ostree.deployments import TransactionVerdict


class OperatingSystemContract:
    """Tests of `treenail.host.ostree.deployments.OSBackend`."""

    def test_new_machine_has_its_installed_image(self, machine: OsMachine) -> None:
        os = machine.os()
        assert digests(os) == [f"{digest(machine.images.here)} booted"]
        assert os.read_deployments().transaction is None

    def test_stage_locks_image_and_is_idempotent(self, machine: OsMachine) -> None:
        os, images = machine.os(), machine.images
        os.stage_deployment(images.to_there, watch=go_on)
        first = os.read_deployments()
        machine.os().stage_deployment(images.to_there, watch=go_on)
        assert os.read_deployments() == first
        assert digests(os) == [
            f"{digest(images.there)} staged locked",
            f"{digest(images.here)} booted",
        ]
        assert first.staged.image == images.there

    def test_reboot_with_locked_image_boots_the_current_one(self, machine: OsMachine) -> None:
        machine.os().stage_deployment(machine.images.to_there, watch=go_on)
        machine.reboot()
        booted = machine.os().read_deployments().booted
        assert booted.digest == digest(machine.images.here)

    def test_reboot_after_finalize_boots_the_image(self, machine: OsMachine) -> None:
        os, images = machine.os(), machine.images
        os.stage_deployment(images.to_there, watch=go_on)
        staged = os.read_deployments().staged
        os.finalize_staged(staged.id)
        assert [each.is_locked for each in os.read_deployments().in_boot_order] == [False, False]
        machine.reboot()
        assert digests(machine.os()) == [f"{digest(images.there)} booted", digest(images.here)]

    def test_finalize_twice_changes_nothing(self, machine: OsMachine) -> None:
        machine.os().stage_deployment(machine.images.to_there, watch=go_on)
        staged = machine.os().read_deployments().staged
        machine.os().finalize_staged(staged.id)
        first = machine.os().read_deployments()
        machine.os().finalize_staged(staged.id)
        assert machine.os().read_deployments() == first

    def test_finalize_of_unstaged_image_is_refused(self, machine: OsMachine) -> None:
        os = machine.os()
        with pytest.raises(HostError, match="nothing is staged"):
            os.finalize_staged("unknown")
        os.stage_deployment(machine.images.to_there, watch=go_on)
        before = os.read_deployments()
        with pytest.raises(HostError, match="cannot reboot into unknown"):
            os.finalize_staged("unknown")
        assert os.read_deployments() == before

    def test_drop_removes_image_and_is_idempotent(self, machine: OsMachine) -> None:
        os = machine.os()
        os.stage_deployment(machine.images.to_there, watch=go_on)
        staged = os.read_deployments().staged
        assert staged is not None
        os.drop_staged("unknown")
        assert os.read_deployments().staged == staged
        for _ in range(2):
            os.drop_staged(staged.id)
            assert digests(os) == [f"{digest(machine.images.here)} booted"]

    def test_tree_of_staged_image_can_be_read_until_it_is_dropped(self, machine: OsMachine) -> None:
        os = machine.os()
        if not hasattr(os, "open_staged_tree"):
            pytest.skip("a tree in a virtual machine cannot be opened here")
        os.stage_deployment(machine.images.to_there, watch=go_on)
        staged = os.read_deployments().staged
        paths = ["/etc/systemd/system/", "/etc/no-such-file"]
        with os.open_staged_tree(staged.id, paths) as tree:
            assert tree.resolve_path("/etc/systemd/system").is_dir()
            assert not tree.resolve_path("/etc/no-such-file").exists()
        os.drop_staged(staged.id)
        with pytest.raises(HostError, match="cannot read the content"):
            os.open_staged_tree(staged.id, paths).__enter__()

    def test_roll_back_boots_the_previous_image(self, machine: OsMachine) -> None:
        images = machine.images
        machine.os().stage_deployment(images.to_there, watch=go_on)
        staged = machine.os().read_deployments().staged
        machine.os().finalize_staged(staged.id)
        machine.reboot()
        for _ in range(2):
            machine.os().roll_back()
        machine.reboot()
        booted = machine.os().read_deployments().booted
        assert booted.digest == digest(images.here)

    def test_roll_back_of_first_image_is_refused(self, machine: OsMachine) -> None:
        with pytest.raises(HostError, match="no previous deployment"):
            machine.os().roll_back()

    def test_stage_of_booted_image_stages_nothing(self, machine: OsMachine) -> None:
        os = machine.os()
        os.stage_deployment(DeploymentChange(image=machine.images.here), watch=go_on)
        assert digests(os) == [f"{digest(machine.images.here)} booted"]

    def test_manifest_list_is_staged_and_booted_as_its_manifest(self, machine: OsMachine) -> None:
        images = machine.images
        if not images.listed:
            pytest.skip("no manifest list to stage")
        change = DeploymentChange(image=images.listed)
        machine.os().stage_deployment(change, watch=go_on)
        machine.os().stage_deployment(change, watch=go_on)
        staged = machine.os().read_deployments().staged
        assert (staged.is_locked, staged.has_image(digest(images.listed))) == (True, True)
        for _ in range(2):
            machine.os().finalize_staged(staged.id)
        armed = machine.os().read_deployments().staged
        assert (armed.id, armed.is_locked) == (staged.id, False)
        machine.reboot()
        machine.os().stage_deployment(change, watch=go_on)
        found = machine.os().read_deployments()
        assert found.staged is None
        assert found.booted.digest == images.listed_manifest
        assert found.booted.list_digest == digest(images.listed)

    def test_drop_removes_staged_manifest_list(self, machine: OsMachine) -> None:
        images = machine.images
        if not images.listed:
            pytest.skip("no manifest list to stage")
        machine.os().stage_deployment(DeploymentChange(image=images.listed), watch=go_on)
        staged = machine.os().read_deployments().staged
        machine.os().drop_staged(staged.id)
        assert digests(machine.os()) == [f"{digest(images.here)} booted"]

    def test_failed_pull_has_cause_and_stages_nothing(self, machine: OsMachine) -> None:
        os = machine.os()
        with pytest.raises(TransactionError, match=machine.images.complaint):
            os.stage_deployment(DeploymentChange(image=machine.images.broken), watch=go_on)
        assert digests(os) == [f"{digest(machine.images.here)} booted"]

    def test_stage_ends_when_watcher_cancels(self, machine: OsMachine) -> None:
        os = machine.os()
        machine.slow_down()
        with pytest.raises(CancelledError):
            os.stage_deployment(machine.images.to_there, watch=at_once(TransactionVerdict.CANCEL))
        assert digests(os) == [f"{digest(machine.images.here)} booted"]

    def test_drop_ends_detached_stage(self, machine: OsMachine) -> None:
        os = machine.os()
        machine.slow_down()
        with pytest.raises(CancelledError):
            os.stage_deployment(machine.images.to_there, watch=at_once(TransactionVerdict.DETACH))
        machine.os().drop_staged("")
        found = machine.os().read_deployments()
        assert (found.transaction, found.staged) == (None, None)
