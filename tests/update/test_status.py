"""What is told of an update, and of what takes notice of one without a reboot."""

import pytest

from tests.update.build import BOOT_2, A, B, drained, facts, update, wanting
from treenail.errors import StepError, UnitError
from treenail.update.decision.actions import ApplyAction, RebootAction, UncordonAction, VerifyAction
from treenail.update.impact.disruption import DisruptionLevel
from treenail.update.impact.impact import UpdateImpact
from treenail.update.impact.os_change import OSChange
from treenail.update.state.phases import Phase
from treenail.update.state.record import LedgerRecord, Target
from treenail.update.status import (
    NodeEvent,
    list_failed_service_events,
    list_service_events,
    make_report,
)
from treenail.update.steps.steps import ConfigStep, ReloadDaemon, ReloadUnit, RestartUnit

TARGET = Target("rendered-worker-b")
FILES = UpdateImpact(needs_write=True, level=DisruptionLevel.REBOOT)
IMAGE = UpdateImpact(OSChange(image=B.image), needs_write=True, level=DisruptionLevel.REBOOT)
RESTART = UpdateImpact(needs_write=True, level=DisruptionLevel.RESTART)


def true(work: UpdateImpact, phase: Phase, decision: object) -> set[str]:
    """The conditions that are true with a move."""
    under_way = update(phase, impact=work, drain_token="drain-b", boot_id=BOOT_2)
    current = A if phase is not Phase.UNCORDONING else B
    record = LedgerRecord(current=current, update=under_way)
    seen = facts(record=record, node=drained("drain-b"), boot_id=BOOT_2)
    told = make_report(seen, decision, None)  # type: ignore[arg-type]  # a move
    return {each.type for each in told.conditions if each.status == "True"}


def test_reboot_is_told_once_the_target_is_booted_and_not_before():
    prepared = {"UpdatePrepared", "ImagePulledFromRegistry"}
    executed = {*prepared, "UpdateExecuted", "AppliedFiles", "AppliedOSImage"}
    assert true(IMAGE, Phase.REBOOTING, RebootAction(B)) == set()
    assert true(IMAGE, Phase.REBOOTING, VerifyAction(B, "the checks begin")) == {
        *executed,
        "RebootedNode",
    }
    assert true(FILES, Phase.VERIFYING, VerifyAction(B, "not Ready yet")) == {
        "UpdatePrepared",
        "UpdateExecuted",
        "AppliedFiles",
        "RebootedNode",
    }


def test_node_resumes_when_it_may_serve_again():
    move = UncordonAction("uncordon-b")
    assert true(IMAGE, Phase.UNCORDONING, move) >= {
        "RebootedNode",
        "UpdatePostActionComplete",
        "Resumed",
    }
    assert true(RESTART, Phase.UNCORDONING, move) == {
        "UpdatePrepared",
        "UpdateExecuted",
        "AppliedFiles",
        "UpdatePostActionComplete",
        "Resumed",
    }
    assert true(IMAGE, Phase.CANCELLING, move) == set(), "it was called off"


def test_what_the_checks_wait_for_is_no_other_condition():
    def conditions(reason: str) -> object:
        record = LedgerRecord(current=A, update=update(Phase.VERIFYING, impact=IMAGE))
        return make_report(facts(record=record), VerifyAction(B, reason), None).conditions

    assert conditions("the checks begin") == conditions("kubelet is not well") != ()


def test_files_of_a_moment_before_a_reboot_are_not_worth_a_write():
    record = LedgerRecord(current=A, update=update(Phase.APPLYING, impact=FILES))
    assert make_report(facts(record=record), ApplyAction(B), None).conditions == ()
    record = LedgerRecord(current=A, update=update(Phase.APPLYING, impact=RESTART))
    told = make_report(facts(record=record, node=wanting()), ApplyAction(B), None)
    assert {each.type for each in told.conditions} >= {"AppliedFiles", "UpdateExecuted"}


def test_services_that_took_notice_are_told_in_one_event_of_each_kind():
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
def test_service_that_fails_has_an_event_of_its_own(step: ConfigStep, reason: str):
    error = StepError("can't: x", step=step, remedy="look at its journal")
    assert list(list_failed_service_events(error.step, error)) == [
        NodeEvent("Warning", reason, "can't: x; look at its journal")
    ]
    assert list(list_failed_service_events(ReloadDaemon(), UnitError("x"))) == []
