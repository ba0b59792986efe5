"""Images that are named by the digest of a manifest list: deployments have that of a manifest."""

from dataclasses import replace

from tests.update.build import (
    BOOT_1,
    BOOT_2,
    DIGEST_A,
    DIGEST_B,
    DIGEST_C,
    A,
    B,
    facts,
    observed_node,
    update,
)
from treenail.api import annotations as key
from treenail.update.decision.actions import (
    AdoptAction,
    DropPrestagedAction,
    IdleAction,
    PrestageAction,
    RefuseAction,
    StageAction,
    VerifyAction,
)
from treenail.update.decision.decide import decide_action
from treenail.update.decision.decide_boot import CHECKS_BEGIN
from treenail.update.impact.os_change import DeploymentState
from treenail.update.state.ledger_record import LedgerRecord, Phase, PrestagedTarget
from treenail.update.status import make_report

TOKEN = f"drain-{B.config}"
LISTED = DeploymentState(
    booted_digest=DIGEST_A,
    booted_id="os-0",
    staged_digest=DIGEST_C,
    staged_list_digest=DIGEST_B,
    staged_id="os-1",
    is_locked=True,
)


def test_image_of_a_manifest_list_is_recognized_by_either_digest() -> None:
    staging = facts(record=LedgerRecord(current=A, update=update()), deployments=LISTED)
    assert not isinstance(decide_action(staging), RefuseAction | StageAction)
    booted = DeploymentState(booted_digest=DIGEST_C, booted_id="os-0", booted_list_digest=DIGEST_B)
    rebooted = LedgerRecord(
        current=A, update=update(Phase.REBOOTING, drain_token=TOKEN, reboot_count=1)
    )
    assert decide_action(facts(record=rebooted, boot_id=BOOT_2, deployments=booted)) == (
        VerifyAction(B, CHECKS_BEGIN)
    )
    at_rest = facts(record=LedgerRecord(current=B, booted_digest=DIGEST_C), deployments=booted)
    assert decide_action(at_rest) == IdleAction(f"at {B}", is_settled=True)
    without_ledger = facts(record=LedgerRecord(), deployments=booted)
    assert decide_action(without_ledger) == AdoptAction(B)


def test_booted_digest_is_annotated_for_a_manifest_list_only() -> None:
    idle = IdleAction(f"at {B}", is_settled=True)
    for digest, shown in ((DIGEST_C, DIGEST_C), (DIGEST_B, None), ("", None)):
        at = facts(record=LedgerRecord(current=B, booted_digest=digest))
        assert make_report(at, idle, None).annotations[key.BOOTED_DIGEST] == shown


def test_prestaged_manifest_list_is_not_staged_again() -> None:
    node = replace(observed_node(A), prestage=B)
    prestaging = facts(
        node=node,
        deployments=LISTED,
        record=LedgerRecord(current=A, prestaged=PrestagedTarget(B, BOOT_1)),
    )
    assert decide_action(prestaging) == PrestageAction(B, "")
    unwanted = replace(prestaging, node=observed_node(A))
    assert decide_action(unwanted) == DropPrestagedAction("os-1")
