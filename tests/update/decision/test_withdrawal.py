"""A target that is withdrawn during its boot trial."""

from dataclasses import replace

import pytest

from tests.update.build import (
    BOOT_1,
    BOOT_2,
    DIGEST_A,
    DIGEST_B,
    A,
    B,
    C,
    drained_node,
    facts,
    observed_node,
    update,
)
from treenail.api import annotations as key
from treenail.update.checks.health import BootTrialStatus, HealthCheckResult
from treenail.update.decision.actions import RetryAction, RollBackAction, VerifyAction
from treenail.update.decision.decide import decide_action
from treenail.update.decision.node_state import Facts
from treenail.update.impact.os_change import DeploymentState
from treenail.update.state.boot_trial import BootTrial, HealthCheckMode, TrialLimits
from treenail.update.state.ledger_record import LedgerRecord, Phase, QuarantinedTarget, Target
from treenail.update.status import make_report

LIMITS = TrialLimits()


def on_trial(requested: Target, *, failing_s: float = 0.0, other_ids: tuple[str, ...]) -> Facts:
    check = HealthCheckResult("Kubelet", is_passing=False, problem="starts", since_s=failing_s)
    trial = BootTrial(boot_id=BOOT_2, boot_count=1)
    record = update(
        Phase.VERIFYING,
        boot_id=BOOT_2,
        boot_trial=trial,
        reboot_count=1,
        staged_id="os-1",
        drain_token="drain-b",
    )
    return facts(
        record=LedgerRecord(current=A, update=record),
        boot_id=BOOT_2,
        node=drained_node("drain-b", requested),
        deployments=DeploymentState(booted_digest=DIGEST_B, booted_id="os-0", other_ids=other_ids),
        trial_status=BootTrialStatus(elapsed_s=20.0, limits=LIMITS, checks=(check,)),
    )


def test_request_for_origin_rolls_back_without_waiting_for_deadline() -> None:
    at = on_trial(A, other_ids=("os-0",))
    decision = decide_action(at)
    assert isinstance(decision, RollBackAction)
    assert decision.quarantine.is_withdrawn
    report = make_report(at, decision, None)
    assert (report.annotations[key.STATE], report.annotations[key.REASON]) == ("Working", "")


def test_request_for_origin_does_not_reboot_a_node_in_service() -> None:
    # A user uncordoned it, or a backup of etcd shows it as it was before the drain.
    at = replace(on_trial(A, other_ids=("os-0",)), node=observed_node(A))
    assert isinstance(decide_action(at), VerifyAction)


@pytest.mark.parametrize(("failing_s", "ends"), [(30.0, False), (LIMITS.failing_s, True)])
def test_request_for_third_target_ends_trial_of_failing_one(
    *, failing_s: float, ends: bool
) -> None:
    decision = decide_action(on_trial(C, failing_s=failing_s, other_ids=("os-0",)))
    assert isinstance(decision, RollBackAction if ends else VerifyAction)


def test_trial_continues_without_previous_deployment_or_enforcement() -> None:
    assert isinstance(decide_action(on_trial(A, other_ids=())), VerifyAction)
    at = replace(on_trial(A, other_ids=("os-0",)), health_mode=HealthCheckMode.REPORT)
    assert isinstance(decide_action(at), VerifyAction)
    assert isinstance(decide_action(on_trial(B, other_ids=("os-0",))), VerifyAction)


def test_withdrawn_target_may_be_requested_again() -> None:
    quarantined = QuarantinedTarget(B, "withdrawn", is_withdrawn=True)
    record = LedgerRecord(current=A, quarantined=quarantined)
    booted = DeploymentState(booted_digest=DIGEST_A, booted_id="os-0")
    assert isinstance(
        decide_action(facts(record=record, node=observed_node(B), deployments=booted)), RetryAction
    )


@pytest.mark.parametrize(
    ("boot_id", "other_ids", "rolls_back"),
    [
        (BOOT_2, ("os-1",), True),
        (BOOT_2, (), False),
        (BOOT_1, ("os-1",), False),
    ],
)
def test_cancelled_image_that_booted_is_rolled_back_if_there_is_a_previous_one(
    *, boot_id: str, other_ids: tuple[str, ...], rolls_back: bool
) -> None:
    cancelling = update(Phase.CANCELLING, boot_id=BOOT_1, staged_id="os-0")
    at = facts(
        record=LedgerRecord(current=A, update=cancelling),
        boot_id=boot_id,
        node=observed_node(A),
        deployments=DeploymentState(booted_digest=DIGEST_B, booted_id="os-0", other_ids=other_ids),
    )
    assert isinstance(decide_action(at), RollBackAction) is rolls_back
