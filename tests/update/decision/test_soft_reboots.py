"""Which reboots may keep the kernel, and what follows one that led elsewhere."""

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
    drained,
    facts,
    staged,
    update,
    wanting,
)
from treenail.update.decision.actions import CancelStagedAction, RebootAction
from treenail.update.decision.decide import REBOOTS_ALLOWED, decide_action
from treenail.update.decision.facts import DeploymentState
from treenail.update.impact.disruption import DisruptionLevel
from treenail.update.impact.impact import UpdateImpact
from treenail.update.impact.os_change import OSChange
from treenail.update.state.phases import Phase
from treenail.update.state.record import LedgerRecord
from treenail.update.status import NodeEvent, make_report

TOKEN = f"drain-{B.config}"
SOFT_1 = f"{BOOT_1}+1"


@pytest.mark.parametrize(
    ("work", "softly"),
    [
        (IMAGE_B, True),
        (UpdateImpact(OSChange(install=("usbguard",)), level=DisruptionLevel.REBOOT), True),
        (
            UpdateImpact(OSChange(image=B.image, append=("nosmt",)), level=DisruptionLevel.REBOOT),
            False,
        ),
        (
            UpdateImpact(OSChange(image=B.image, delete=("nosmt",)), level=DisruptionLevel.REBOOT),
            False,
        ),
        (UpdateImpact(OSChange(install=("kernel-rt-core",)), level=DisruptionLevel.REBOOT), False),
        (UpdateImpact(OSChange(remove=("kernel-core",)), level=DisruptionLevel.REBOOT), False),
    ],
)
def test_a_reboot_may_be_soft_unless_the_change_concerns_the_kernel(
    work: UpdateImpact, *, softly: bool
) -> None:
    record = LedgerRecord(
        current=A,
        update=update(Phase.DRAINING, drain_token=TOKEN, staged_id="os-1", impact=work),
    )
    at = facts(record=record, node=drained(TOKEN), deployments=staged(), can_soft_reboot=True)
    assert decide_action(at) == RebootAction(B, "os-1", is_soft=softly)
    assert decide_action(replace(at, can_soft_reboot=False)) == RebootAction(B, "os-1")


def test_a_soft_reboot_is_asked_for_again_in_the_same_boot_and_in_no_other() -> None:
    asked = update(Phase.REBOOTING, drain_token=TOKEN, staged_id="os-1", reboot_count=1)
    at = facts(
        record=LedgerRecord(current=A, update=asked),
        node=drained(TOKEN),
        deployments=staged(),
        can_soft_reboot=True,
    )
    assert decide_action(at) == RebootAction(B, "os-1", is_soft=True)
    again = replace(at, record=LedgerRecord(current=A, update=replace(asked, reboot_count=2)))
    assert decide_action(again) == RebootAction(B, "os-1")


def test_a_soft_reboot_that_led_elsewhere_is_followed_by_a_full_one() -> None:
    asked = update(Phase.REBOOTING, drain_token=TOKEN, staged_id="os-1", reboot_count=1)
    written = DeploymentState(booted_digest=DIGEST_A, other_ids=("os-1",), pending_id="os-1")
    at = facts(
        record=LedgerRecord(current=A, update=asked),
        node=drained(TOKEN),
        deployments=written,
        can_soft_reboot=True,
        boot_id=SOFT_1,
    )
    assert decide_action(at) == RebootAction(B)
    assert decide_action(replace(at, node=None)) == RebootAction(B), "past the point of no return"
    left = replace(at, deployments=staged(locked=False))
    assert decide_action(left) == RebootAction(B, "os-1"), "the shutdown did not finalize it"
    assert decide_action(replace(at, node=wanting())) == CancelStagedAction(
        "the node came back into service while it was about to reboot", "os-1"
    )
    assert decide_action(replace(at, node=drained(TOKEN, C))) == CancelStagedAction(
        "another target is asked for", "os-1"
    )
    tried = replace(
        at, record=LedgerRecord(current=A, update=replace(asked, reboot_count=REBOOTS_ALLOWED))
    )
    assert isinstance(decide_action(tried), CancelStagedAction)


def test_a_full_reboot_after_a_soft_one_is_asked_for_until_it_comes() -> None:
    asked = update(
        Phase.REBOOTING, boot_id=SOFT_1, drain_token=TOKEN, staged_id="os-1", reboot_count=2
    )
    at = facts(
        record=LedgerRecord(current=A, update=asked),
        node=drained(TOKEN),
        deployments=DeploymentState(booted_digest=DIGEST_A, other_ids=("os-1",), pending_id="os-1"),
        can_soft_reboot=True,
        boot_id=SOFT_1,
    )
    assert decide_action(at) == RebootAction(B)


def test_the_earlier_system_after_a_reboot_of_the_kernel_is_the_boot_loaders_doing() -> None:
    asked = update(Phase.REBOOTING, drain_token=TOKEN, staged_id="os-1", reboot_count=1)
    written = DeploymentState(booted_digest=DIGEST_A, other_ids=("os-1",), pending_id="os-1")
    at = facts(
        record=LedgerRecord(current=A, update=asked),
        node=drained(TOKEN),
        deployments=written,
        boot_id=BOOT_2,
    )
    decision = decide_action(at)
    assert isinstance(decision, CancelStagedAction)
    assert decision.reason == "the earlier system was booted"


@pytest.mark.parametrize(("boot_id", "soft"), [(SOFT_1, True), (BOOT_2, False)])
def test_an_update_knows_whether_its_reboot_kept_the_kernel(boot_id: str, *, soft: bool) -> None:
    asked = update(Phase.REBOOTING)
    assert asked.enter_phase(Phase.VERIFYING, boot_id=boot_id, now=1.0).is_soft_reboot is soft


def test_the_node_is_told_that_its_reboot_may_be_soft() -> None:
    record = LedgerRecord(current=A, update=update(Phase.DRAINING))
    told = make_report(facts(record=record), RebootAction(B, "os-1", is_soft=True), None)
    assert told.event == NodeEvent(
        "Normal", "Reboot", f"Node will reboot into {B}, with a soft reboot if the kernel stays"
    )
