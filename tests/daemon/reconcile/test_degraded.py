"""A failing node reports that on all its objects until the failure is over."""

import pytest

from tests.daemon.nodes import Node, assert_at_rest
from tests.daemon.reconcile.test_walks import world_at
from tests.fakes.world import World
from tests.update.build import A, B, facts
from treenail.api import annotations as key
from treenail.errors import (
    ConfigError,
    CredentialError,
    DriftError,
    FileError,
    InvalidError,
    LedgerError,
    PreflightError,
    RollbackError,
    StepError,
    TransactionError,
    TreenailError,
    UnreconcilableError,
)
from treenail.update.decision.actions import IdleAction, PlanAction, StageAction
from treenail.update.status import make_report

FAULTS = (
    ConfigError, CredentialError, DriftError, FileError, LedgerError, PreflightError, RollbackError,
    StepError, TransactionError, UnreconcilableError,
)  # fmt: skip


class Failing:
    """A fault_point in which staging fails a few times."""

    def __init__(self, world: World, times: int) -> None:
        self.left = times
        world.fault_point = self

    def __call__(self, step: str) -> None:
        if step == "staging" and self.left:
            self.left -= 1
            raise TransactionError("the registry closed the connection")


def test_retried_failure_stays_degraded_until_success() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    fault_point = Failing(world, 4)
    world.request_target(B)
    seen: list[str] = []
    while fault_point.left or world.staged != B.digest:
        node.turn()
        seen.append(world.annotations[key.STATE])
    first = seen.index("Degraded")
    assert set(seen[:first]) <= {"Done", "Working"}
    assert set(seen[first:-1]) == {"Degraded"}
    node.settle()
    assert_at_rest(world, B)
    assert world.annotations[key.REASON] == ""


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "decision", [StageAction(B), PlanAction(B), IdleAction("at rest", is_settled=True)], ids=repr
)
def test_failure_is_on_node_and_machineconfignode_alike(
    fault: type[TreenailError], decision: StageAction | PlanAction | IdleAction
) -> None:
    error = fault("it went wrong", remedy="fix it")
    report = make_report(facts(), decision, error)
    assert report.annotations[key.STATE] == error.node_state != "Working"
    (verdict,) = report.conditions
    assert (verdict.type, verdict.status) == ("NodeDegraded", "True")
    assert verdict.message == report.annotations[key.REASON] == "it went wrong; fix it"
    assert report.event is not None
    assert (report.event.type, report.event.message) == ("Warning", verdict.message)


def test_rejected_report_is_retried_with_backoff() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    del world.annotations[key.STATE]

    def fault_point(step: str) -> None:
        if step == "patch":
            raise InvalidError("patch nodes node-1: it is invalid")

    world.fault_point = fault_point
    assert [node.turn() for _ in range(6)] == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    world.fault_point = lambda _: None
    world.loses_answers = 1
    assert [node.turn(), node.turn()] == [5.0, 60.0]
    assert_at_rest(world, A)
