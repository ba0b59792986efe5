"""What is told of an update, and of what takes notice of one without a reboot."""

import pytest

from tests.update.build import BOOT_2, A, B, drained, facts, update, wanting
from treenail.errors import StepError, UnitError
from treenail.update.decision.actions import Apply, Prove, Reboot, Resume
from treenail.update.impact.disruption import Level
from treenail.update.impact.impact import Work
from treenail.update.impact.os_change import OSChange
from treenail.update.state.record import Phase, Record, Target
from treenail.update.status import Event, not_served, report, served
from treenail.update.steps.steps import ReloadDaemon, ReloadUnit, RestartUnit, Step

TARGET = Target("rendered-worker-b")
FILES = Work(writes=True, level=Level.REBOOT)
IMAGE = Work(OSChange(image=B.image), writes=True, level=Level.REBOOT)
RESTART = Work(writes=True, level=Level.RESTART)


def true(work: Work, phase: Phase, decision: object) -> set[str]:
    """The conditions that are true with a move."""
    under_way = update(phase, work=work, drain="drain-b", boot_id=BOOT_2)
    current = A if phase is not Phase.RESUMING else B
    record = Record(current=current, update=under_way)
    seen = facts(record=record, node=drained("drain-b"), boot_id=BOOT_2)
    told = report(seen, decision, None)  # type: ignore[arg-type]  # a move
    return {each.type for each in told.conditions if each.status == "True"}


def test_reboot_is_told_once_the_target_is_booted_and_not_before():
    prepared = {"UpdatePrepared", "ImagePulledFromRegistry"}
    executed = {*prepared, "UpdateExecuted", "AppliedFiles", "AppliedOSImage"}
    assert true(IMAGE, Phase.REBOOTING, Reboot(B)) == set()
    assert true(IMAGE, Phase.REBOOTING, Prove(B, "the checks begin")) == {*executed, "RebootedNode"}
    assert true(FILES, Phase.PROVING, Prove(B, "not Ready yet")) == {
        "UpdatePrepared",
        "UpdateExecuted",
        "AppliedFiles",
        "RebootedNode",
    }


def test_node_resumes_when_it_may_serve_again():
    move = Resume("uncordon-b")
    assert true(IMAGE, Phase.RESUMING, move) >= {
        "RebootedNode",
        "UpdatePostActionComplete",
        "Resumed",
    }
    assert true(RESTART, Phase.RESUMING, move) == {
        "UpdatePrepared",
        "UpdateExecuted",
        "AppliedFiles",
        "UpdatePostActionComplete",
        "Resumed",
    }
    assert true(IMAGE, Phase.RELEASING, move) == set(), "it was called off"


def test_what_the_checks_wait_for_is_no_other_condition():
    def conditions(reason: str) -> object:
        record = Record(current=A, update=update(Phase.PROVING, work=IMAGE))
        return report(facts(record=record), Prove(B, reason), None).conditions

    assert conditions("the checks begin") == conditions("kubelet is not well") != ()


def test_files_of_a_moment_before_a_reboot_are_not_worth_a_write():
    record = Record(current=A, update=update(Phase.APPLYING, work=FILES))
    assert report(facts(record=record), Apply(B), None).conditions == ()
    record = Record(current=A, update=update(Phase.APPLYING, work=RESTART))
    told = report(facts(record=record, node=wanting()), Apply(B), None)
    assert {each.type for each in told.conditions} >= {"AppliedFiles", "UpdateExecuted"}


def test_services_that_took_notice_are_told_in_one_event_of_each_kind():
    steps: list[Step] = [
        ReloadDaemon(),
        ReloadUnit("crio.service"),
        ReloadUnit("app.service"),
        RestartUnit("kubelet.service"),
    ]
    assert list(served(steps, TARGET)) == [
        Event(
            "Normal", "ServiceReload", "Reloaded crio.service, app.service for rendered-worker-b"
        ),
        Event("Normal", "ServiceRestart", "Restarted kubelet.service for rendered-worker-b"),
    ]
    assert list(served([ReloadDaemon()], TARGET)) == []


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (ReloadUnit("crio.service"), "FailedServiceReload"),
        (RestartUnit("crio.service"), "FailedServiceRestart"),
    ],
)
def test_service_that_fails_has_an_event_of_its_own(step: Step, reason: str):
    error = StepError("can't: x", step=step, remedy="look at its journal")
    assert list(not_served(error.step, error)) == [
        Event("Warning", reason, "can't: x; look at its journal")
    ]
    assert list(not_served(ReloadDaemon(), UnitError("x"))) == []
