"""A node that is in trouble says so, everywhere at once, and until the trouble is over."""

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
    """A fate in which staging fails a few times."""

    def __init__(self, world: World, times: int) -> None:
        self.left = times
        world.fate = self

    def __call__(self, step: str) -> None:
        if step == "staging" and self.left:
            self.left -= 1
            raise TransactionError("the registry went away")


def test_what_is_tried_again_is_degraded_until_it_has_succeeded() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    fate = Failing(world, 4)
    world.ask_for(B)
    seen: list[str] = []
    while fate.left or world.staged != B.digest:
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
def test_every_failure_is_on_the_node_and_its_machine_config_node_alike(
    fault: type[TreenailError], decision: StageAction | PlanAction | IdleAction
) -> None:
    error = fault("it went wrong", remedy="mend it")
    told = make_report(facts(), decision, error)
    assert told.annotations[key.STATE] == error.node_state != "Working"
    (verdict,) = told.conditions
    assert (verdict.type, verdict.status) == ("NodeDegraded", "True")
    assert verdict.message == told.annotations[key.REASON] == "it went wrong; mend it"
    assert told.event is not None
    assert (told.event.type, told.event.message) == ("Warning", verdict.message)


def test_report_that_is_refused_is_made_again_after_growing_pauses() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    del world.annotations[key.STATE]

    def fate(step: str) -> None:
        if step == "patch":
            raise InvalidError("patch nodes node-1: it is invalid")

    world.fate = fate
    assert [node.turn() for _ in range(6)] == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    world.fate = lambda _: None
    world.loses_answers = 1
    assert [node.turn(), node.turn()] == [5.0, 60.0]
    assert_at_rest(world, A)
