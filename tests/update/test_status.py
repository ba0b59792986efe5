"""The report of an action: conditions and Events."""

import pytest

from tests.update.build import BOOT_2, A, B, drained_node, facts, observed_node, update
from treenail.api import annotations as key
from treenail.deployment_change import DeploymentChange
from treenail.errors import StepError, UnitError
from treenail.update.decision.actions import (
    TRIAL_REMEDY,
    ApplyAction,
    CancelStagedAction,
    RebootAction,
    UncordonAction,
    VerifyAction,
)
from treenail.update.decision.decide_boot import CHECKS_BEGIN
from treenail.update.impact.impact import DisruptionLevel, UpdateImpact
from treenail.update.state.ledger_record import LedgerRecord, Phase, Target
from treenail.update.status import (
    NodeEvent,
    list_failed_service_events,
    list_service_events,
    make_report,
)
from treenail.update.steps.step_types import ConfigStep, ReloadDaemon, ReloadUnit, RestartUnit

TARGET = Target("rendered-worker-b")
FILES = UpdateImpact(needs_write=True, level=DisruptionLevel.REBOOT)
IMAGE = UpdateImpact(
    DeploymentChange(image=B.image), needs_write=True, level=DisruptionLevel.REBOOT
)
RESTART = UpdateImpact(needs_write=True, level=DisruptionLevel.RESTART)


def list_true(impact: UpdateImpact, phase: Phase, decision: object) -> set[str]:
    """The conditions that are list_true in the report of an action."""
    in_progress = update(phase, impact=impact, drain_token="drain-b", boot_id=BOOT_2)
    current = A if phase is not Phase.UNCORDONING else B
    record = LedgerRecord(current=current, update=in_progress)
    observed = facts(record=record, node=drained_node("drain-b"), boot_id=BOOT_2)
    report = make_report(observed, decision, None)  # type: ignore[arg-type]  # an action
    return {each.type for each in report.conditions if each.status == "True"}


def test_reboot_condition_is_true_after_the_boot_only():
    prepared = {"UpdatePrepared", "ImagePulledFromRegistry"}
    executed = {*prepared, "UpdateExecuted", "AppliedFiles", "AppliedOSImage"}
    assert list_true(IMAGE, Phase.REBOOTING, RebootAction(B)) == set()
    assert list_true(IMAGE, Phase.REBOOTING, VerifyAction(B, CHECKS_BEGIN)) == {
        *executed,
        "RebootedNode",
    }
    assert list_true(FILES, Phase.VERIFYING, VerifyAction(B, "not Ready yet")) == {
        "UpdatePrepared",
        "UpdateExecuted",
        "AppliedFiles",
        "RebootedNode",
    }


def test_resumed_condition_is_true_with_the_uncordon():
    action = UncordonAction("uncordon-b")
    assert list_true(IMAGE, Phase.UNCORDONING, action) >= {
        "RebootedNode",
        "UpdatePostActionComplete",
        "Resumed",
    }
    assert list_true(RESTART, Phase.UNCORDONING, action) == {
        "UpdatePrepared",
        "UpdateExecuted",
        "AppliedFiles",
        "UpdatePostActionComplete",
        "Resumed",
    }
    assert list_true(IMAGE, Phase.CANCELLING, action) == set(), "it was cancelled"


def test_cancelled_update_requests_no_drain():
    in_progress = update(Phase.DRAINING, impact=IMAGE, drain_token="drain-b")
    at = facts(record=LedgerRecord(current=A, update=in_progress), node=observed_node(A))
    annotations = make_report(at, CancelStagedAction("changed"), None).annotations
    assert annotations[key.STATE] == "Working"
    assert key.DESIRED_DRAIN not in annotations


def test_reason_of_the_health_checks_does_not_change_conditions():
    def conditions(reason: str) -> object:
        record = LedgerRecord(current=A, update=update(Phase.VERIFYING, impact=IMAGE))
        return make_report(facts(record=record), VerifyAction(B, reason), None).conditions

    assert conditions(CHECKS_BEGIN) == conditions("Kubelet: it is not running") != ()


def test_reason_of_node_in_boot_trial_names_checks_that_keep_failing():
    record = LedgerRecord(current=A, update=update(Phase.VERIFYING, impact=IMAGE))
    verify = VerifyAction(B, "waiting up to 9 s for Kubelet", "check Kubelet fails: no answer")
    annotations = make_report(facts(record=record), verify, None).annotations
    assert annotations[key.STATE] == "Working"
    assert annotations[key.REASON] == f"check Kubelet fails: no answer; {TRIAL_REMEDY}"


def test_conditions_are_not_written_right_before_a_reboot():
    record = LedgerRecord(current=A, update=update(Phase.APPLYING, impact=FILES))
    assert make_report(facts(record=record), ApplyAction(B), None).conditions == ()
    record = LedgerRecord(current=A, update=update(Phase.APPLYING, impact=RESTART))
    report = make_report(facts(record=record, node=observed_node()), ApplyAction(B), None)
    assert {each.type for each in report.conditions} >= {"AppliedFiles", "UpdateExecuted"}


def test_reloaded_and_restarted_units_have_one_event_each():
    steps: list[ConfigStep] = [
        ReloadDaemon(),
        ReloadUnit("crio.service"),
        ReloadUnit("app.service"),
        RestartUnit("kubelet.service"),
    ]
    assert list(list_service_events(steps, TARGET)) == [
        NodeEvent(
            "Normal", "ServiceReload", "Reloaded crio.service, app.service for rendered-worker-b"
        ),
        NodeEvent("Normal", "ServiceRestart", "Restarted kubelet.service for rendered-worker-b"),
    ]
    assert list(list_service_events([ReloadDaemon()], TARGET)) == []


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (ReloadUnit("crio.service"), "FailedServiceReload"),
        (RestartUnit("crio.service"), "FailedServiceRestart"),
    ],
)
def test_failed_service_has_its_own_event(step: ConfigStep, reason: str):
    error = StepError("cannot reload x", step=step, remedy="read its journal")
    assert list(list_failed_service_events(error.step, error)) == [
        NodeEvent("Warning", reason, "cannot reload x; read its journal")
    ]
    assert list(list_failed_service_events(ReloadDaemon(), UnitError("x"))) == []


def test_control_characters_reach_neither_annotation_nor_event():
    error = StepError(
        "cannot write /etc/a\x1b[2J: a \u202e exists", remedy="move /etc/a\x1b[2J away"
    )
    report = make_report(facts(), ApplyAction(B), error)
    escaped = r"cannot write /etc/a\u001b[2J: a \u202e exists; move /etc/a\u001b[2J away"
    assert report.annotations[key.REASON] == escaped
    assert report.event.message == escaped
