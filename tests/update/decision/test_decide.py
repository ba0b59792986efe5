"""Every row of the decision table.

| phase       | desired   | deployments       | handshake  | action               |
|-------------|-----------|-------------------|------------|----------------------|
| none        | = current | target booted     |            | idle                 |
| none        | new       | old booted        |            | plan, stage          |
| none        | new       | new booted        |            | adopt                |
| staging     | same      | staged, locked    |            | drain                |
| draining    | same      | staged, locked    | drained    | reboot               |
| rebooting   | any       | new booted        |            | verify               |
| uncordoning | any       |                   | uncordoned | finish               |
| any earlier | changed   |                   |            | cancel, finish       |
"""

from dataclasses import replace
from typing import Any

import pytest

from tests.update.build import (
    BOOT_2,
    DIGEST_A,
    DIGEST_B,
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
from treenail.api import annotations as key
from treenail.config.drift_comparison import Drift, DriftAttribute
from treenail.config.image_content import IMAGE_FILES
from treenail.deployment_change import DeploymentChange
from treenail.update.decision.actions import (
    AdoptAction,
    AnnotateNodeAction,
    ApplyAction,
    CancelStagedAction,
    CheckImageAction,
    Decision,
    DrainAction,
    FinishAction,
    IdleAction,
    PlanAction,
    RebootAction,
    RecoverAction,
    RefuseAction,
    RestoreAction,
    RetryAction,
    StageAction,
    UncordonAction,
    UnpinAction,
    VerifyAction,
    WaitAction,
)
from treenail.update.decision.decide import (
    decide_action,
    is_target_requested,
    needs_deployments,
)
from treenail.update.decision.decide_boot import CHECKS_BEGIN
from treenail.update.decision.decide_idle import DRAIN_REMEDY
from treenail.update.decision.node_state import (
    DesiredTarget,
    DrainHandshake,
    InvalidTarget,
    NoTarget,
    ObservedNode,
    make_drain_token,
    make_uncordon_token,
    read_desired_target,
    read_drain_config,
)
from treenail.update.drift.drift_policy import DriftAssessment
from treenail.update.impact.impact import DisruptionLevel, UpdateImpact
from treenail.update.impact.os_change import DeploymentState
from treenail.update.state.ledger_record import (
    LedgerRecord,
    Phase,
    QuarantinedTarget,
    RetainedDeployment,
    Target,
)
from treenail.update.status import NodeEvent, make_report

TOKEN = "drain-rendered-worker-b"
UNCORDON = "uncordon-rendered-worker-b"


def in_phase(phase: Phase, *, current: Target = A, **changes: object) -> LedgerRecord:
    return LedgerRecord(current=current, update=update(phase, **changes))


def read_refusal(decision: Decision) -> str:
    assert isinstance(decision, RefuseAction)
    return str(decision.error)


def test_node_at_its_target_is_idle() -> None:
    at = facts(record=LedgerRecord(current=B), deployments=None)
    assert decide_action(at) == IdleAction(f"at {B}", is_settled=True)


def test_request_from_before_a_restore_is_replaced_by_the_current_target() -> None:
    record = LedgerRecord(current=B, is_reported=True)
    at = facts(record=record, node=observed_node(A, shown=A), deployments=None)
    decision = decide_action(at)
    assert isinstance(decision, AnnotateNodeAction)
    expected = {
        key.CURRENT_CONFIG: B.config,
        key.DESIRED_CONFIG: B.config,
        key.CURRENT_OS_IMAGE: B.image,
        key.DESIRED_OS_IMAGE: B.image,
    }
    report = make_report(at, decision, None)
    assert {name: value for name, value in report.annotations.items() if value} == expected
    assert "was restored from a backup" in report.event.message


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        (LedgerRecord(current=B), A),  # the report may be on its way
        (LedgerRecord(current=B, is_reported=True), B),  # the request is newer than the report
        (LedgerRecord(current=B, is_reported=True), None),  # the Node was created again
    ],
)
def test_request_after_the_last_report_is_obeyed(
    record: LedgerRecord, shown: Target | None
) -> None:
    booted = DeploymentState(booted_digest=DIGEST_B, booted_id="os-0")
    at = facts(record=record, node=observed_node(A, shown=shown), deployments=booted)
    assert decide_action(at) == PlanAction(A)


def test_new_image_is_planned_and_then_staged() -> None:
    assert decide_action(facts()) == PlanAction(B)
    assert decide_action(facts(record=in_phase(Phase.STAGING, impact=None))) == PlanAction(B)
    assert decide_action(facts(record=in_phase(Phase.STAGING))) == StageAction(B)


def test_booted_image_is_adopted_without_a_ledger() -> None:
    booted = DeploymentState(booted_digest=DIGEST_B, booted_id="os-0")
    assert decide_action(facts(record=LedgerRecord(), deployments=booted)) == AdoptAction(B)
    assert decide_action(facts(deployments=booted)) == PlanAction(B), (
        "keys and arguments may differ"
    )


def test_machine_rolled_back_by_a_user_is_updated_again() -> None:
    at = facts(
        record=LedgerRecord(current=B),
        deployments=DeploymentState(booted_digest=DIGEST_A, booted_id="os-0"),
    )
    assert decide_action(at) == PlanAction(B)


def test_deployment_staged_by_another_program_blocks() -> None:
    assert "another program staged deployment os-1" in read_refusal(
        decide_action(facts(deployments=staged(C)))
    )
    assert "another program staged deployment os-1" in read_refusal(
        decide_action(facts(deployments=staged(B, locked=False)))
    )


@pytest.mark.parametrize("phase", [Phase.STAGING, Phase.DRAINING, Phase.APPLYING, Phase.REBOOTING])
def test_unknown_booted_deployment_is_refused_before_drain_and_reboot(phase: Phase) -> None:
    unknown = replace(staged(), booted_id="", booted_digest="", other_ids=("os-7", "os-8"))
    at = facts(record=in_phase(phase, drain_token=TOKEN, staged_id="os-1"), deployments=unknown)
    decision = decide_action(at)
    assert read_refusal(decision) == (
        "cannot update the operating system: expected one deployment to be booted, found none "
        "booted of: os-1, os-7, os-8"
    )
    assert isinstance(decision, RefuseAction)
    assert "ostree admin status" in decision.error.remedy
    drained = replace(at, node=drained_node(TOKEN))
    assert read_refusal(decide_action(drained)) == read_refusal(decision)


def test_unknown_booted_deployment_is_no_failed_boot() -> None:
    unknown = DeploymentState(booted_digest="", booted_id="", other_ids=("os-1",))
    quarantined = QuarantinedTarget(B, "it failed")
    for phase in (Phase.REBOOTING, Phase.VERIFYING, Phase.ROLLING_BACK):
        ledger = replace(in_phase(phase, staged_id="os-1"), quarantined=quarantined)
        at = facts(record=ledger, deployments=unknown, boot_id=BOOT_2, has_undo=True)
        assert "found none booted of: os-1" in read_refusal(decide_action(at))


def test_unknown_booted_deployment_stops_no_change_of_files_and_no_cancellation() -> None:
    unknown = DeploymentState(booted_digest="", booted_id="", other_ids=tuple("1234567"))
    files = UpdateImpact(level=DisruptionLevel.REBOOT, needs_write=True)
    at = facts(
        record=in_phase(Phase.DRAINING, impact=files, drain_token=TOKEN),
        deployments=unknown,
        node=drained_node(TOKEN),
    )
    assert decide_action(at) == ApplyAction(B)
    at = facts(record=in_phase(Phase.STAGING), deployments=unknown, node=observed_node(C))
    assert isinstance(decide_action(at), CancelStagedAction)
    at = replace(at, node=observed_node(B))
    assert read_refusal(decide_action(at)).endswith("1, 2, 3, 4, 5 and 2 more")


STAGED = {"record": in_phase(Phase.STAGING), "deployments": staged()}
DRAINED = {"record": in_phase(Phase.DRAINING, drain_token=TOKEN), "deployments": staged()}
REBOOTED = {"record": in_phase(Phase.REBOOTING, drain_token=TOKEN, reboot_count=1)}
UNCORDONING = observed_node(requested="uncordon-rendered-worker-a", applied=TOKEN)


@pytest.mark.parametrize(
    ("at", "action"),
    [
        (STAGED, DrainAction(B, TOKEN)),
        ({**STAGED, "should_drain": False}, RebootAction(B, "os-1")),
        ({**STAGED, "node": UNCORDONING}, WaitAction("waiting for the earlier uncordon")),
        ({**STAGED, "node": None},
         WaitAction("waiting for the API server before requesting the drain")),
        ({**DRAINED, "node": drained_node(TOKEN)}, RebootAction(B, "os-1")),
        ({**REBOOTED, "deployments": staged(), "node": None}, RebootAction(B, "os-1")),
        ({**REBOOTED, "boot_id": BOOT_2, "node": drained_node(TOKEN)}, StageAction(B)),
    ],
    ids=[
        "staged and locked", "node without drain", "earlier uncordon", "drain without API server",
        "drained", "reboot without API server", "reboot that lost the staged deployment",
    ],
)  # fmt: skip
def test_update_drains_the_node_and_reboots(at: dict[str, Any], action: object) -> None:
    assert decide_action(facts(**at)) == action


def test_requested_drain_is_awaited() -> None:
    record = in_phase(Phase.DRAINING, drain_token=TOKEN)
    at = facts(
        record=record,
        deployments=staged(),
        node=observed_node(requested=TOKEN, applied="uncordon-x"),
    )
    assert decide_action(at) == WaitAction("waiting for the drain")


def test_slow_drain_is_overdue() -> None:
    record = in_phase(Phase.DRAINING, drain_token=TOKEN)
    at = facts(record=record, deployments=staged(), node=observed_node(requested=TOKEN), now=4000.0)
    assert decide_action(at) == WaitAction(
        "waiting for the drain", is_overdue=True, limit_s=3600.0, remedy=DRAIN_REMEDY
    )
    report = make_report(at, decide_action(at), None)
    sentence = f"waiting for the drain for longer than its limit; {DRAIN_REMEDY}"
    assert report.event == NodeEvent("Warning", "FailedToDrain", sentence, is_in_conditions=True)
    assert (report.annotations[key.STATE], report.annotations[key.REASON]) == ("Degraded", sentence)
    assert [each.type for each in report.conditions] == ["NodeDegraded"]


def test_node_uncordoned_by_another_client_is_drained_with_a_new_token() -> None:
    record = in_phase(Phase.DRAINING, drain_token=TOKEN)
    node = observed_node(requested=TOKEN, applied=TOKEN, unschedulable=False)
    assert decide_action(facts(record=record, deployments=staged(), node=node)) == DrainAction(
        B, TOKEN + ".again-1"
    )


def test_drain_tokens_count_their_attempts() -> None:
    first = make_drain_token("rendered-a", "")
    second = make_drain_token("rendered-a", first)
    third = make_drain_token("rendered-a", second)
    assert [first, second, third] == [
        "drain-rendered-a",
        "drain-rendered-a.again-1",
        "drain-rendered-a.again-2",
    ]
    assert make_drain_token("rendered-b", third) == "drain-rendered-b"


@pytest.mark.parametrize("config", ["a", "a.again-", "a.again-b", "a.again-1", "a.again-1.again-2"])
def test_drain_tokens_of_any_config_differ_from_the_previous_one(config: str) -> None:
    for make in (make_drain_token, make_uncordon_token):
        previous = ""
        tokens = [previous := make(config, previous) for _ in range(3)]
        assert len(set(tokens)) == len(tokens)
        assert tokens[0].partition("-")[2] == config


@pytest.mark.parametrize("config", ["a", "a.again-", "a.again-b", "a.again-1x"])
def test_config_is_read_from_any_drain_token(config: str) -> None:
    first = make_drain_token(config, "")
    assert [read_drain_config(each) for each in (first, make_drain_token(config, first))] == [
        config,
        config,
    ]


@pytest.mark.parametrize("phase", [Phase.STAGING, Phase.DRAINING])
def test_changed_target_cancels_the_staged_update(phase: Phase) -> None:
    at = facts(
        record=in_phase(phase, drain_token=TOKEN), deployments=staged(), node=observed_node(C)
    )
    assert decide_action(at) == CancelStagedAction("the desired target changed", "os-1")


def test_changed_target_right_before_the_reboot_cancels_the_update() -> None:
    record = in_phase(Phase.REBOOTING, drain_token=TOKEN, reboot_count=1)
    at = facts(record=record, deployments=staged(locked=False), node=drained_node(TOKEN, A))
    assert decide_action(at) == CancelStagedAction("the desired target changed", "os-1")


def test_cancelled_update_is_uncordoned_and_finished() -> None:
    record = in_phase(Phase.CANCELLING, drain_token=TOKEN)
    cancelling = facts(record=record, node=drained_node(TOKEN, C))
    assert decide_action(cancelling) == UncordonAction(UNCORDON)
    cordoned = observed_node(C, requested=UNCORDON, applied=TOKEN, unschedulable=True)
    waiting = facts(record=record, node=cordoned)
    assert decide_action(waiting) == WaitAction("waiting for the uncordon")
    uncordoned = facts(record=record, node=observed_node(C, requested=UNCORDON, applied=UNCORDON))
    assert decide_action(uncordoned) == FinishAction(is_done=False)


def test_uncordon_after_incomplete_drain_differs_from_the_applied_one() -> None:
    # The drain before was cancelled too, so that its uncordon is the last applied request.
    node = observed_node(C, requested=TOKEN, applied=UNCORDON, unschedulable=True)
    again = UncordonAction(f"{UNCORDON}.again-1")
    assert decide_action(
        facts(record=in_phase(Phase.CANCELLING, drain_token=TOKEN), node=node)
    ) == (again)
    lost = facts(record=LedgerRecord(current=C), node=node, deployments=None)
    assert decide_action(lost) == again


@pytest.mark.parametrize("suffix", ["", "x", "-1", "9" * 5000])
def test_uncordon_after_acknowledgement_with_invalid_count_has_another_token(suffix: str) -> None:
    applied = f"{UNCORDON}.again-{suffix}"
    node = observed_node(C, requested=TOKEN, applied=applied, unschedulable=True)
    record = in_phase(Phase.CANCELLING, drain_token=TOKEN)
    assert decide_action(facts(record=record, node=node)) == UncordonAction(f"{UNCORDON}.again-1")


def test_cancelled_update_without_drain_keeps_the_cordon_of_another_client() -> None:
    record = in_phase(Phase.CANCELLING, drain_token=TOKEN)
    assert decide_action(
        facts(record=record, node=observed_node(C, unschedulable=True))
    ) == FinishAction(is_done=False)


def test_cancelled_update_after_crash_drops_the_staged_deployment() -> None:
    record = in_phase(Phase.CANCELLING, drain_token=TOKEN)
    assert isinstance(
        decide_action(facts(record=record, deployments=staged(), node=observed_node(C))),
        CancelStagedAction,
    )


def test_booted_target_is_verified() -> None:
    record = in_phase(Phase.REBOOTING, drain_token=TOKEN, reboot_count=1)
    at = facts(
        record=record,
        boot_id=BOOT_2,
        deployments=DeploymentState(booted_digest=DIGEST_B, booted_id="os-0"),
        node=None,
    )
    assert decide_action(at) == VerifyAction(B, CHECKS_BEGIN)


def test_pin_of_the_update_itself_stays_when_its_image_is_staged_again() -> None:
    record = in_phase(Phase.REBOOTING, drain_token=TOKEN, reboot_count=1)
    for healthy_since, decision in ((None, StageAction(B)), (5.0, UnpinAction("os-0"))):
        retained = RetainedDeployment("os-0", healthy_since)
        at = facts(record=replace(record, retained=retained), boot_id=BOOT_2)
        assert decide_action(replace(at, node=drained_node(TOKEN))) == decision


def test_boot_without_a_requested_package_stages_again() -> None:
    change = DeploymentChange(install_packages=("usbguard",))
    record = in_phase(
        Phase.REBOOTING, drain_token=TOKEN, reboot_count=1, impact=replace(IMAGE_B, os=change)
    )
    for packages, decision in (
        ((), StageAction(B)),
        (("usbguard",), VerifyAction(B, CHECKS_BEGIN)),
    ):
        deployments = DeploymentState(booted_digest=DIGEST_A, booted_id="os-0", packages=packages)
        at = facts(record=record, boot_id=BOOT_2, deployments=deployments, node=drained_node(TOKEN))
        assert decide_action(at) == decision


@pytest.mark.parametrize(
    ("error", "end"),
    [
        ("", f"each of 3 reboots booted {DIGEST_A}"),
        ("write config: No space left",
         f"{DIGEST_A}; ostree-finalize-staged failed: write config: No space left"),
    ],
)  # fmt: skip
def test_third_reboot_into_another_deployment_quarantines_the_target(error: str, end: str) -> None:
    record = in_phase(Phase.REBOOTING, drain_token=TOKEN, reboot_count=3)
    at = facts(record=record, boot_id=BOOT_2, node=drained_node(TOKEN), finalization_error=error)
    decision = decide_action(at)
    assert isinstance(decision, CancelStagedAction)
    assert decision.quarantine.reason.endswith(end)


def test_quarantined_target_is_retried_after_another_was_requested() -> None:
    quarantined = LedgerRecord(current=A, quarantined=QuarantinedTarget(B, "it does not boot"))
    assert read_refusal(decide_action(facts(record=quarantined))) == "it does not boot"
    assert decide_action(facts(record=quarantined, node=observed_node(C))) == RetryAction()


def test_unlocked_deployment_on_a_node_in_service_is_dropped() -> None:
    for phase in (Phase.STAGING, Phase.DRAINING, Phase.REBOOTING):
        at = facts(record=in_phase(phase, drain_token=TOKEN), deployments=staged(locked=False))
        assert isinstance(decide_action(at), CancelStagedAction), phase


def test_verified_update_requests_the_uncordon_and_finishes() -> None:
    record = in_phase(Phase.UNCORDONING, current=B, drain_token=TOKEN)
    assert decide_action(
        facts(record=record, deployments=None, node=drained_node(TOKEN))
    ) == UncordonAction(UNCORDON)
    waiting = observed_node(requested=UNCORDON, applied=TOKEN, unschedulable=True)
    assert decide_action(facts(record=record, deployments=None, node=waiting)) == WaitAction(
        "waiting for the uncordon"
    )
    uncordoned = observed_node(requested=UNCORDON, applied=UNCORDON)
    assert decide_action(facts(record=record, deployments=None, node=uncordoned)) == FinishAction(
        is_done=True
    )


@pytest.mark.parametrize("jump_s", [1_790_000_000.0, -3600.0])
def test_wall_clock_that_jumps_leaves_the_limits_of_waits(jump_s: float) -> None:
    draining = observed_node(requested=TOKEN)
    uncordoning = observed_node(requested=UNCORDON, applied=TOKEN, unschedulable=True)
    uncordoned = observed_node(A, requested=UNCORDON)
    for phase, node, limit_s in (
        (Phase.DRAINING, draining, 3600.0),
        (Phase.UNCORDONING, uncordoning, 600.0),
        (Phase.CANCELLING, uncordoned, 60.0),
    ):
        record = in_phase(phase, drain_token=TOKEN, entered=5.0, entered_monotonic=50.0)
        deployments = staged() if phase is Phase.DRAINING else facts().deployments
        at = facts(record=record, deployments=deployments, node=node, now=5.0 + jump_s)
        early = decide_action(replace(at, monotonic=50.0 + limit_s))
        late = decide_action(replace(at, monotonic=51.0 + limit_s))
        assert isinstance(early, WaitAction), phase
        assert not early.is_overdue, phase
        assert isinstance(late, FinishAction) or (isinstance(late, WaitAction) and late.is_overdue)


def test_wait_after_a_reboot_counts_from_the_boot() -> None:
    node = observed_node(requested=UNCORDON, applied=TOKEN, unschedulable=True)
    record = in_phase(Phase.UNCORDONING, current=B, drain_token=TOKEN, entered_monotonic=9000.0)
    at = facts(record=record, deployments=None, node=node, boot_id=BOOT_2, now=0.0)
    early = decide_action(replace(at, monotonic=600.0))
    late = decide_action(replace(at, monotonic=601.0))
    assert isinstance(early, WaitAction)
    assert isinstance(late, WaitAction)
    assert (early.is_overdue, late.is_overdue) == (False, True)


def test_slow_uncordon_is_overdue_and_the_node_degraded() -> None:
    record = in_phase(Phase.UNCORDONING, current=B, drain_token=TOKEN)
    waiting = observed_node(requested=UNCORDON, applied=TOKEN, unschedulable=True)
    at = facts(record=record, deployments=None, node=waiting, now=700.0)
    decision = decide_action(at)
    assert decision == WaitAction("waiting for the uncordon", is_overdue=True, remedy=DRAIN_REMEDY)
    report = make_report(at, decision, None)
    sentence = f"waiting for the uncordon for longer than its limit; {DRAIN_REMEDY}"
    assert report.event == NodeEvent("Warning", "FailedToUncordon", sentence, is_in_conditions=True)
    assert (report.annotations[key.STATE], report.annotations[key.REASON]) == ("Degraded", sentence)


def test_uncordon_by_a_user_says_that_the_acknowledgement_is_missing() -> None:
    record = in_phase(Phase.UNCORDONING, current=B, drain_token=TOKEN)
    node = observed_node(requested=UNCORDON, applied=TOKEN, unschedulable=False)
    at = facts(record=record, deployments=None, node=node, now=500.0)
    report = make_report(at, decide_action(at), None)
    sentence = (
        "the node is schedulable; waiting for the drain controller to acknowledge the uncordon"
    )
    assert (report.summary, report.annotations[key.STATE]) == (sentence, "Working")
    late = replace(at, now=700.0)
    report = make_report(late, decide_action(late), None)
    assert report.annotations[key.STATE] == "Degraded"
    assert report.annotations[key.REASON].startswith(f"{sentence} for longer than its limit; ")


def test_cancelled_update_of_uncordoned_node_ends_without_drain_controller() -> None:
    record = in_phase(Phase.CANCELLING, drain_token=TOKEN, entered=0.0)
    waiting = observed_node(A, requested=UNCORDON, applied="", unschedulable=False)
    early = facts(record=record, node=waiting, now=50.0)
    assert decide_action(early) == WaitAction("waiting for the uncordon", remedy=DRAIN_REMEDY)
    assert decide_action(replace(early, now=70.0)) == FinishAction(is_done=False)
    over = facts(record=LedgerRecord(current=A), node=waiting)
    assert decide_action(over) == IdleAction(f"at {A}", is_settled=True)


def test_machine_that_shuts_down_is_idle() -> None:
    assert decide_action(facts(is_shutting_down=True)) == IdleAction("the machine is shutting down")


def test_drain_from_before_the_ledger_was_lost_is_withdrawn() -> None:
    at = facts(record=LedgerRecord(current=B), deployments=None, node=drained_node(TOKEN))
    assert decide_action(at) == UncordonAction(UNCORDON)


def test_node_without_a_request_is_idle() -> None:
    node = ObservedNode(NoTarget(), DrainHandshake(), Target())
    without_ledger = facts(node=node, record=LedgerRecord())
    assert decide_action(without_ledger) == IdleAction("the Node requests no config")


def test_lost_annotations_are_written_again_from_ledger() -> None:
    node = ObservedNode(NoTarget(), DrainHandshake(), Target())
    at = facts(node=node)
    decision = decide_action(at)
    assert decision == IdleAction(f"at {A}; the Node requests no config", is_settled=True)
    annotations = make_report(at, decision, None).annotations
    assert annotations[key.STATE] == "Done"
    assert annotations[key.CURRENT_CONFIG] == A.config
    assert annotations[key.CURRENT_OS_IMAGE] == A.image


@pytest.mark.parametrize("phase", [Phase.STAGING, Phase.DRAINING, Phase.APPLYING, Phase.REBOOTING])
def test_update_of_node_created_again_is_cancelled_until_done(phase: Phase) -> None:
    node = ObservedNode(NoTarget(), DrainHandshake(), Target())
    at = facts(record=in_phase(phase, drain_token=TOKEN), deployments=staged(), node=node)
    assert isinstance(decide_action(at), CancelStagedAction)
    cancelled = in_phase(Phase.CANCELLING, drain_token=TOKEN)
    assert decide_action(facts(record=cancelled, node=node)) == FinishAction(is_done=False)


def test_empty_image_annotation_requests_no_image() -> None:
    asked = read_desired_target(_annotations((key.DESIRED_IMAGE, "")))
    assert asked == DesiredTarget(Target(B.config))
    assert read_desired_target({key.DESIRED_IMAGE: ""}) == NoTarget()


def test_mistake_in_second_image_annotation_keeps_update() -> None:
    for mistake in (A.image, "registry.example.com/os:latest"):
        asked = read_desired_target(
            _annotations((key.DESIRED_OS_IMAGE, B.image), (key.DESIRED_IMAGE, mistake))
        )
        assert isinstance(asked, InvalidTarget)
        node = replace(observed_node(), desired=asked)
        assert is_target_requested(node, update())
        assert not is_target_requested(node, update(target=C))


def test_refused_request_is_reported_as_desired() -> None:
    asked = read_desired_target(_annotations((key.DESIRED_OS_IMAGE, "registry/os:latest")))
    at = facts(node=replace(observed_node(), desired=asked))
    decision = decide_action(at)
    assert isinstance(decision, RefuseAction)
    report = make_report(at, decision, decision.error)
    assert report.requested == Target(B.config, "registry/os:latest")
    assert str(report.requested) == f"{B.config} with registry/os:latest"


def test_node_without_a_ledger_adopts_the_config_that_it_claims() -> None:
    at = Target("rendered-a")
    node = observed_node(at, claimed=at)
    assert decide_action(facts(record=LedgerRecord(), node=node)) == AdoptAction(at)
    assert decide_action(facts(record=LedgerRecord(current=at), node=node)) == IdleAction(
        f"at {at}", is_settled=True
    )


def test_idle_node_does_not_need_the_deployments() -> None:
    at_rest = facts(record=LedgerRecord(current=B), deployments=None)
    assert not needs_deployments(at_rest, is_first=False)
    assert needs_deployments(at_rest, is_first=True)
    assert needs_deployments(facts(), is_first=False)
    assert not needs_deployments(facts(node=None), is_first=True)


def _annotations(*pairs: tuple[str, str]) -> dict[str, str]:
    return {key.DESIRED_CONFIG: B.config, **dict(pairs)}


@pytest.mark.parametrize("spelling", list(key.IMAGE_SPELLINGS))
def test_each_spelling_of_the_image_is_read(spelling: str) -> None:
    assert read_desired_target(_annotations((spelling, B.image))) == DesiredTarget(B, (spelling,))


def test_two_equal_spellings_are_one_target() -> None:
    asked = _annotations((key.DESIRED_IMAGE, B.image), (key.DESIRED_OS_IMAGE, B.image))
    assert read_desired_target(asked) == DesiredTarget(B, (key.DESIRED_OS_IMAGE, key.DESIRED_IMAGE))


def test_two_different_spellings_are_an_error_that_names_both() -> None:
    asked = read_desired_target(
        _annotations((key.DESIRED_IMAGE, A.image), (key.DESIRED_OS_IMAGE, B.image))
    )
    assert isinstance(asked, InvalidTarget)
    for part in (key.DESIRED_IMAGE, key.DESIRED_OS_IMAGE, A.image, B.image):
        assert part in str(asked.error)


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        ("registry.example.com/os/node:latest", "it names a tag"),
        ("registry.example.com/os/node", "it has no digest"),
        (f"registry.example.com/os/node:1@{DIGEST_B}", "a tag beside the digest"),
        (f"docker://registry.example.com/os/node@{DIGEST_B}", "starts with a transport"),
        (f"ostree-unverified-registry:r.example.com/n@{DIGEST_B}", "starts with a transport"),
        (f"containers-storage:localhost/node@{DIGEST_B}", "images come from a registry"),
        ("registry.example.com/os/node@sha256:abc", "not sha256: and 64 hex digits"),
        (f"registry.example.com/os/node@sha512:{'b' * 128}", "not sha256: and 64 hex digits"),
        (f"node@{DIGEST_B}", "does not start with a registry host"),
        (f"registry.example.com/OS@{DIGEST_B}", "lower-case path components"),
        (f"registry.example.com/os/../node@{DIGEST_B}", "lower-case path components"),
        (f"user:secret@registry.example.com/os@{DIGEST_B}", ""),
        ("rm -rf /", "it has no digest"),
    ],
)
def test_image_without_a_valid_digest_is_refused_with_a_remedy(image: str, problem: str) -> None:
    asked = read_desired_target(_annotations((key.DESIRED_OS_IMAGE, image)))
    assert isinstance(asked, InvalidTarget)
    assert problem in str(asked.error)
    assert "@sha256:" in asked.error.remedy
    assert isinstance(
        decide_action(facts(node=ObservedNode(asked, DrainHandshake(), A))), RefuseAction
    ), "nothing changes"


def test_staged_image_is_compared_with_the_config_before_the_drain() -> None:
    unchecked = in_phase(Phase.STAGING, impact=replace(IMAGE_B, checked_id=""))
    decision = decide_action(facts(record=unchecked, deployments=staged()))
    assert decision == CheckImageAction(B, "os-1")
    other = in_phase(Phase.STAGING, impact=replace(IMAGE_B, checked_id="os-0"))
    decision = decide_action(facts(record=other, deployments=staged()))
    assert decision == CheckImageAction(B, "os-1"), "a deployment staged again is compared again"
    checked = facts(record=in_phase(Phase.STAGING), deployments=staged())
    assert decide_action(checked) == DrainAction(B, TOKEN)


def test_quarantine_by_missing_files_ends_when_the_agent_may_write_them() -> None:
    blamed = QuarantinedTarget(B, "the image differs", check=IMAGE_FILES)
    refused = facts(record=LedgerRecord(current=A, quarantined=blamed))
    assert isinstance(decide_action(refused), RefuseAction)
    assert decide_action(replace(refused, has_files_in_image=False)) == RetryAction()


def test_claimed_target_without_its_os_is_moved_to() -> None:
    found = facts(record=LedgerRecord(), node=observed_node(A, claimed=A))
    assert decide_action(found) == AdoptAction(A)
    change = DeploymentChange(image=A.image)
    assert decide_action(replace(found, adoption_change=change)) == PlanAction(A)


def test_drift_of_the_image_moves_the_node_to_its_target() -> None:
    drift = Drift("operating system", DriftAttribute.IMAGE, DIGEST_B, DIGEST_A)
    found = facts(node=observed_node(A), drift=DriftAssessment(reported=(drift,)))
    assert decide_action(found) == PlanAction(A)


def test_gap_of_the_image_blocks_neither_another_target_nor_a_write() -> None:
    gap = Drift("/etc/app.conf", DriftAttribute.KIND, "file", "nothing")
    drift = DriftAssessment(blocking=(gap,), image_gaps=frozenset({gap.subject}))
    at_rest = facts(node=observed_node(A), drift=drift)
    refused = decide_action(at_rest)
    assert isinstance(refused, RefuseAction)
    assert "build the config into the image" in refused.error.remedy
    assert decide_action(replace(at_rest, node=observed_node(B))) == PlanAction(B)
    assert decide_action(replace(at_rest, has_files_in_image=False)) == PlanAction(A)


CONFIG_ONLY = Target("rendered-worker-b")


def config_only(phase: Phase, level: DisruptionLevel, **changes: object) -> LedgerRecord:
    impact = UpdateImpact(needs_write=True, level=level)
    return in_phase(phase, target=CONFIG_ONLY, impact=impact, **changes)


def test_harmless_config_is_applied_in_service() -> None:
    at = facts(
        record=config_only(Phase.STAGING, DisruptionLevel.RELOAD), node=observed_node(CONFIG_ONLY)
    )
    assert not needs_deployments(at, is_first=False)
    assert decide_action(replace(at, deployments=None)) == ApplyAction(CONFIG_ONLY)


def test_config_that_needs_a_drain_is_applied_after_it_without_a_reboot() -> None:
    record = config_only(Phase.STAGING, DisruptionLevel.DRAIN)
    at = facts(record=record, node=observed_node(CONFIG_ONLY), deployments=None)
    assert decide_action(at) == DrainAction(CONFIG_ONLY, TOKEN)
    record = config_only(Phase.DRAINING, DisruptionLevel.DRAIN, drain_token=TOKEN)
    at = facts(record=record, node=drained_node(TOKEN, CONFIG_ONLY), deployments=None)
    assert decide_action(at) == ApplyAction(CONFIG_ONLY)


def test_config_that_needs_a_reboot_is_applied_before_it() -> None:
    record = config_only(Phase.APPLYING, DisruptionLevel.REBOOT, drain_token=TOKEN)
    at = facts(record=record, node=drained_node(TOKEN, CONFIG_ONLY))
    assert decide_action(at) == ApplyAction(CONFIG_ONLY)
    assert decide_action(replace(at, has_undo=True)) == RebootAction(CONFIG_ONLY)
    booted = replace(at, has_undo=True, boot_id=BOOT_2)
    assert decide_action(booted) == VerifyAction(CONFIG_ONLY, CHECKS_BEGIN)


def test_boot_of_another_deployment_restores_files_first() -> None:
    record = in_phase(Phase.REBOOTING, drain_token=TOKEN, reboot_count=1)
    at = facts(record=record, boot_id=BOOT_2, node=drained_node(TOKEN), has_undo=True)
    assert decide_action(at) == RestoreAction()
    assert decide_action(replace(at, has_undo=False)) == StageAction(B)


@pytest.mark.parametrize("phase", [Phase.REBOOTING, Phase.VERIFYING, Phase.ROLLING_BACK])
def test_boot_of_the_previous_deployment_restores_files_before_cancelling(phase: Phase) -> None:
    staged_id = "os-1"
    record = in_phase(phase, drain_token=TOKEN, reboot_count=3, staged_id=staged_id)
    record = replace(record, quarantined=QuarantinedTarget(B, "bad"))
    previous = DeploymentState(booted_digest=DIGEST_A, booted_id="os-0", other_ids=(staged_id,))
    at = facts(record=record, boot_id=BOOT_2, node=None, deployments=previous, has_undo=True)
    assert decide_action(at) == RestoreAction()
    assert isinstance(decide_action(replace(at, has_undo=False)), CancelStagedAction)


def test_cancelled_update_drops_then_restores_then_uncordons() -> None:
    record = in_phase(Phase.CANCELLING, drain_token=TOKEN)
    at = facts(record=record, node=drained_node(TOKEN, C), deployments=staged(), has_undo=True)
    assert decide_action(at) == CancelStagedAction("cancelled", "os-1")
    dropped = replace(at, deployments=DeploymentState(booted_digest=DIGEST_A, booted_id="os-0"))
    assert decide_action(dropped) == RestoreAction()
    assert decide_action(replace(dropped, has_undo=False)) == UncordonAction(UNCORDON)


def test_interrupted_change_is_recovered_first() -> None:
    assert decide_action(facts(node=None, has_interrupted_change=True)) == RecoverAction()


def test_invalid_name_of_a_config_is_refused() -> None:
    asked = read_desired_target({key.DESIRED_CONFIG: "../../etc/shadow"})
    assert isinstance(asked, InvalidTarget)
