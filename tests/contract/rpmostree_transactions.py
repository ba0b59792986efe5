"""Results of rpm-ostree's transactions, for the lab's daemon and for the real one.

A class of tests derives from `RpmOstreeContract`, and has the fixture ``machine``.
"""

from typing import Protocol

import pytest

from tests.contract.os_machines import OsMachine, digest, digests, go_on
from treenail.errors import TransactionError
from treenail.host.ostree.deployments import DeploymentChange
from treenail.host.rpmostree.transaction import TransactionFinished, TransactionOutcome

PENDING = ["pending-deploy"]
ROLLBACK = ["rollback-deploy"]
INSANE = "Sanity-checking final rootfs: "
MISSING = "0" * 64


class RpmOstreeMachine(OsMachine, Protocol):
    """A machine with rpm-ostree, that was just installed and booted."""

    def transact(self, method: str, *arguments: object) -> TransactionOutcome:
        """Follow the transaction of a method of the OS interface; options are a dictionary."""

    def unlock_staged(self) -> None:
        """Let the next shutdown finalize the staged deployment."""

    def set_pinned(self, index: int, *, is_pinned: bool) -> None:
        """Pin or unpin a deployment, by its place in the boot order."""

    def block_shutdown(self) -> None:
        """Hold a block inhibitor of "backup" until the test ends."""


class RpmOstreeContract:
    """Transactions with staged, pinned and insane deployments."""

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
