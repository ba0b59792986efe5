"""Soft reboots: which updates may use one, and the action after one that booted another root."""

from dataclasses import replace

import pytest

from tests.update.build import (
    BOOT_1,
    BOOT_2,
    DIGEST_A,
    IMAGE_B,
    A,
    B,
    C,
    drained_node,
    facts,
    observed_node,
    staged,
    update,
)
from treenail.deployment_change import DeploymentChange
from treenail.update.decision.actions import CancelStagedAction, RebootAction
from treenail.update.decision.decide import REBOOTS_ALLOWED, decide_action
from treenail.update.impact.impact import DisruptionLevel, UpdateImpact
from treenail.update.impact.os_change import DeploymentState
from treenail.update.state.ledger_record import LedgerRecord, Moment, Phase
from treenail.update.status import NodeEvent, make_report

TOKEN = f"drain-{B.config}"
SOFT_1 = f"{BOOT_1}+1"


@pytest.mark.parametrize(
    ("impact", "is_soft"),
    [
        (IMAGE_B, True),
        (
            UpdateImpact(
                DeploymentChange(install_packages=("usbguard",)), level=DisruptionLevel.REBOOT
            ),
            True,
        ),
        (
            UpdateImpact(
                DeploymentChange(image=B.image, append_kargs=("nosmt",)),
                level=DisruptionLevel.REBOOT,
            ),
            False,
        ),
        (
            UpdateImpact(
                DeploymentChange(image=B.image, delete_kargs=("nosmt",)),
                level=DisruptionLevel.REBOOT,
            ),
            False,
        ),
        (
            UpdateImpact(
                DeploymentChange(install_packages=("kernel-rt-core",)), level=DisruptionLevel.REBOOT
            ),
            False,
        ),
        (
            UpdateImpact(
                DeploymentChange(override_remove=("kernel-core",)), level=DisruptionLevel.REBOOT
            ),
            False,
        ),
    ],
)
def test_reboot_is_soft_unless_the_kernel_changes(impact: UpdateImpact, *, is_soft: bool) -> None:
    record = LedgerRecord(
        current=A,
        update=update(
            Phase.DRAINING,
            drain_token=TOKEN,
            staged_id="os-1",
            impact=replace(impact, checked_id="os-1"),
        ),
    )
    at = facts(record=record, node=drained_node(TOKEN), deployments=staged(), can_soft_reboot=True)
    assert decide_action(at) == RebootAction(B, "os-1", is_soft=is_soft)
    assert decide_action(replace(at, can_soft_reboot=False)) == RebootAction(B, "os-1")


FINALIZED = DeploymentState(
    booted_digest=DIGEST_A, booted_id="os-0", other_ids=("os-1",), pending_id="os-1"
)


def test_soft_reboot_is_repeated_only_in_the_same_boot() -> None:
    rebooting = update(Phase.REBOOTING, drain_token=TOKEN, staged_id="os-1", reboot_count=1)
    at = facts(
        record=LedgerRecord(current=A, update=rebooting),
        node=drained_node(TOKEN),
        deployments=staged(),
        can_soft_reboot=True,
    )
    assert decide_action(at) == RebootAction(B, "os-1", is_soft=True)
    again = replace(at, record=LedgerRecord(current=A, update=replace(rebooting, reboot_count=2)))
    assert decide_action(again) == RebootAction(B, "os-1")


def test_soft_reboot_into_another_root_is_followed_by_a_full_one() -> None:
    rebooting = update(Phase.REBOOTING, drain_token=TOKEN, staged_id="os-1", reboot_count=1)
    at = facts(
        record=LedgerRecord(current=A, update=rebooting),
        node=drained_node(TOKEN),
        deployments=FINALIZED,
        can_soft_reboot=True,
        boot_id=SOFT_1,
    )
    assert decide_action(at) == RebootAction(B)
    assert decide_action(replace(at, node=None)) == RebootAction(B), "the reboot was requested"
    unfinalized = replace(at, deployments=staged(locked=False))
    assert decide_action(unfinalized) == RebootAction(B, "os-1"), "the shutdown did not finalize it"
    assert decide_action(replace(at, node=observed_node())) == CancelStagedAction(
        "another client uncordoned the node before its reboot", "os-1"
    )
    assert decide_action(replace(at, node=drained_node(TOKEN, C))) == CancelStagedAction(
        "the desired target changed", "os-1"
    )
    tried = replace(
        at, record=LedgerRecord(current=A, update=replace(rebooting, reboot_count=REBOOTS_ALLOWED))
    )
    assert isinstance(decide_action(tried), CancelStagedAction)


def test_full_reboot_after_a_soft_one_is_repeated_until_it_happens() -> None:
    rebooting = update(
        Phase.REBOOTING, boot_id=SOFT_1, drain_token=TOKEN, staged_id="os-1", reboot_count=2
    )
    at = facts(
        record=LedgerRecord(current=A, update=rebooting),
        node=drained_node(TOKEN),
        deployments=FINALIZED,
        can_soft_reboot=True,
        boot_id=SOFT_1,
    )
    assert decide_action(at) == RebootAction(B)


def test_full_reboot_into_previous_deployment_cancels_the_update() -> None:
    rebooting = update(Phase.REBOOTING, drain_token=TOKEN, staged_id="os-1", reboot_count=1)
    at = facts(
        record=LedgerRecord(current=A, update=rebooting),
        node=drained_node(TOKEN),
        deployments=FINALIZED,
        boot_id=BOOT_2,
    )
    decision = decide_action(at)
    assert isinstance(decision, CancelStagedAction)
    assert decision.reason == "the previous deployment was booted"


@pytest.mark.parametrize(("boot_id", "is_soft"), [(SOFT_1, True), (BOOT_2, False)])
def test_update_records_whether_its_reboot_kept_the_kernel(boot_id: str, *, is_soft: bool) -> None:
    rebooting = update(Phase.REBOOTING)
    assert (
        rebooting.enter_phase(Phase.VERIFYING, Moment(1.0, boot_id, 1.0)).is_soft_reboot is is_soft
    )


def test_reboot_event_mentions_the_soft_reboot() -> None:
    record = LedgerRecord(current=A, update=update(Phase.DRAINING))
    report = make_report(facts(record=record), RebootAction(B, "os-1", is_soft=True), None)
    assert report.event == NodeEvent(
        "Normal", "Reboot", f"Node will reboot into {B}, with a soft reboot if the kernel stays"
    )
