"""Properties, errors and transactions of rpm-ostree, for the lab's daemon and for the real one.

A class of tests derives from `RpmOstreeContract`, and has the fixture ``machine``.
"""

from dataclasses import replace
from typing import Any, Protocol

import pytest

from tests.contract.os_machines import OsMachine, digest, digests, go_on
from treenail.deployment_change import DeploymentChange
from treenail.errors import BusError, TransactionError
from treenail.host.rpmostree.client import TransactionFinished, TransactionOutcome
from treenail.host.systemd.system_bus import BusInterface

NAME = "org.projectatomic.rpmostree1"
PATH = "/org/projectatomic/rpmostree1"
OS_PATH = f"{PATH}/fedora_coreos"
PROPERTIES = "org.freedesktop.DBus.Properties"
OBJECTS = BusInterface(NAME, PATH, "org.freedesktop.DBus.ObjectManager")
SYSROOT = BusInterface(NAME, f"{PATH}/Sysroot", f"{NAME}.Sysroot")
OS = BusInterface(NAME, OS_PATH, f"{NAME}.OS")
DEPLOYMENT_KEYS = {
    "base-commit-meta", "base-local-replacements", "base-removals", "base-remote-replacements",
    "booted", "checksum", "container-image-reference", "container-image-reference-digest", "id",
    "osname", "packages", "pinned", "regenerate-initramfs", "requested-base-local-replacements",
    "requested-base-removals", "requested-local-fileoverride-packages", "requested-local-packages",
    "requested-packages", "serial", "staged", "timestamp", "unlocked", "version",
}  # fmt: skip
BOOT_CONFIG_KEYS = {"initrd", "linux", "options", "staged", "title", "version"}
FAILED = "org.projectatomic.rpmostreed.Error.Failed"
NOT_FOUND = "org.gtk.GDBus.UnmappedGError.Quark._g_2dio_2derror_2dquark.Code1"  # GDBus has no name
OPENING = "Preparing import: Fetching manifest: failed to invoke method OpenImage: "
PENDING = ["pending-deploy"]
ROLLBACK = ["rollback-deploy"]
INSANE = "Sanity-checking final rootfs: "
MISSING = "0" * 64


class RpmOstreeMachine(OsMachine, Protocol):
    """A machine with rpm-ostree, that was just installed and booted."""

    def transact(self, method: str, *arguments: object) -> TransactionOutcome:
        """Follow the transaction of a method of the OS interface; options are a dictionary."""

    def call(self, target: BusInterface, method: str, *arguments: object) -> Any:
        """Return the result of a method on the system bus."""

    def withhold_login(self) -> str:
        """Return an image whose registry wants a login that the machine does not have."""

    def unlock_staged(self) -> None:
        """Let the next shutdown finalize the staged deployment."""

    def set_pinned(self, index: int, *, is_pinned: bool) -> None:
        """Pin or unpin a deployment, by its place in the boot order."""

    def block_shutdown(self) -> None:
        """Hold a block inhibitor of "backup" until the test ends."""


class RpmOstreeContract:
    """Properties, errors, and transactions with staged, pinned and insane deployments."""

    def test_booted_deployment_has_every_key(self, machine: RpmOstreeMachine) -> None:
        shown = machine.call(replace(SYSROOT, interface=PROPERTIES), "GetAll", SYSROOT.interface)
        assert (shown["Booted"], shown["Path"]) == (OS_PATH, "/")
        assert shown["AutomaticUpdatePolicy"] == "none"
        (booted,) = shown["Deployments"]
        assert booted.keys() == DEPLOYMENT_KEYS
        image = f"ostree-unverified-registry:{machine.images.here}"
        assert booted["container-image-reference"] == image
        assert booted["container-image-reference-digest"] == digest(machine.images.here)
        assert (booted["booted"], booted["staged"], booted["unlocked"]) == (True, False, "none")
        assert machine.call(OBJECTS, "GetManagedObjects").keys() == {SYSROOT.path, OS_PATH}

    def test_unknown_names_and_indexes_are_refused(self, machine: RpmOstreeMachine) -> None:
        config = machine.call(OS, "GetDeploymentBootConfig", "", False)
        assert config.keys() == BOOT_CONFIG_KEYS
        for index, text in (("1", "Out of range deployment index 1, expected < 1"), ("x", "Inv")):
            with pytest.raises(BusError, match=text) as refused:
                machine.call(OS, "GetDeploymentBootConfig", index, True)
            assert refused.value.name == FAILED
        with pytest.raises(BusError, match='OS name "rhcos" not found') as refused:
            machine.call(SYSROOT, "GetOS", "rhcos")
        assert refused.value.name == NOT_FOUND

    def test_refused_pull_has_its_cause(self, machine: RpmOstreeMachine) -> None:
        modifiers = {"set-refspec": f"ostree-unverified-registry:{machine.withhold_login()}"}
        text = result(machine.transact("UpdateDeployment", modifiers, {}))
        assert text.startswith(OPENING)
        assert text.endswith("authentication required")

    def test_transactions_with_nothing_staged(self, machine: RpmOstreeMachine) -> None:
        here = [f"{digest(machine.images.here)} booted"]
        assert result(machine.transact("Rollback", {})) == "No rollback deployment found"
        assert result(machine.transact("Cleanup", [*PENDING, *ROLLBACK])) == ""
        finalized = machine.transact("FinalizeDeployment", {"allow-missing-checksum": True})
        assert result(finalized) == "No pending staged deployment found"
        assert digests(machine.os()) == here

    def test_transactions_with_staged_deployment(self, machine: RpmOstreeMachine) -> None:
        there = digest(machine.images.there)
        machine.os().stage_deployment(machine.images.to_there, watch=go_on)
        staged = [f"{there} staged locked", f"{digest(machine.images.here)} booted"]
        rolled_back = machine.transact("Rollback", {})
        assert result(rolled_back) == "Staged deployment (remove with cleanup -p)"
        assert result(machine.transact("Cleanup", ROLLBACK)) == ""
        assert digests(machine.os()) == staged

        machine.block_shutdown()
        assert finalize(machine, {}) == "Missing expected checksum"
        mismatch = finalize(machine, {"checksum": MISSING, "allow-missing-checksum": True})
        assert mismatch == f"Expected staged base checksum {MISSING}, but found {there}"
        blocked = finalize(machine, {"checksum": there})
        assert blocked.startswith("Reboot blocked by a systemd inhibitor lock in `block` mode")
        assert "Held by: backup" in blocked
        assert digests(machine.os()) == staged

        assert result(machine.transact("Cleanup", PENDING)) == ""
        assert digests(machine.os()) == staged[1:]

    def test_unlocked_deployment_is_finalized_only_if_allowed(
        self, machine: RpmOstreeMachine
    ) -> None:
        there = digest(machine.images.there)
        machine.os().stage_deployment(machine.images.to_there, watch=go_on)
        machine.unlock_staged()
        refused = finalize(machine, {"checksum": there})
        assert refused == "Staged deployment already unlocked"
        assert finalize(machine, {"checksum": there, "allow-unlocked": True}) == ""

    def test_rollback_toggles_and_cleanup_leaves_pinned_deployments(
        self, machine: RpmOstreeMachine
    ) -> None:
        here, there = digest(machine.images.here), digest(machine.images.there)
        machine.os().stage_deployment(machine.images.to_there, watch=go_on)
        machine.unlock_staged()
        machine.reboot()
        for order in ([here, f"{there} booted"], [f"{there} booted", here]):
            assert result(machine.transact("Rollback", {})) == ""
            assert digests(machine.os()) == order

        machine.set_pinned(1, is_pinned=True)
        assert result(machine.transact("Cleanup", ROLLBACK)) == ""
        assert digests(machine.os()) == [f"{there} booted", f"{here} pinned"]
        assert result(machine.transact("Rollback", {})) == ""
        assert result(machine.transact("Cleanup", PENDING)) == ""
        assert digests(machine.os()) == [f"{here} pinned", f"{there} booted"]
        machine.set_pinned(0, is_pinned=False)
        assert result(machine.transact("Cleanup", PENDING)) == ""
        assert digests(machine.os()) == [f"{there} booted"]

    def test_deployment_that_fails_its_sanity_check_stays_staged(
        self, machine: RpmOstreeMachine
    ) -> None:
        insane = machine.images.insane
        if not insane:
            pytest.skip("no image that fails the check")
        modifiers = {"set-refspec": f"ostree-unverified-registry:{insane}"}
        staged = machine.transact("UpdateDeployment", modifiers, {"lock-finalization": True})
        assert result(staged).startswith(INSANE)
        here = f"{digest(machine.images.here)} booted"
        assert digests(machine.os()) == [f"{digest(insane)} staged locked", here]
        assert result(machine.transact("Cleanup", PENDING)) == ""
        # The agent drops it.
        with pytest.raises(TransactionError, match=INSANE):
            machine.os().stage_deployment(DeploymentChange(image=insane), watch=go_on)
        assert digests(machine.os()) == [here]


def finalize(machine: RpmOstreeMachine, options: dict[str, object]) -> str:
    """Return the error of FinalizeDeployment with these options."""
    return result(machine.transact("FinalizeDeployment", options))


def result(outcome: TransactionOutcome) -> str:
    """Return the error of a transaction; empty if it succeeded."""
    assert isinstance(outcome, TransactionFinished)
    assert outcome.is_success is (outcome.text == "")
    return outcome.text
