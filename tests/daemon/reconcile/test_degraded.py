"""A failing node reports that on all its objects until the failure is over."""

import json

import pytest

from tests.daemon.nodes import Node, assert_at_rest
from tests.daemon.reconcile.test_bootstrap_registry import place_files
from tests.daemon.reconcile.test_walks import world_at
from tests.fakes.clock import FakeClock
from tests.fakes.disk import Entry
from tests.fakes.world import FakeNotifier, World
from tests.update.build import A, B, facts, observed_node
from treenail.api import annotations as key
from treenail.api.machineconfig import MachineConfig
from treenail.config import node_paths
from treenail.daemon.local.status_file import StatusFile
from treenail.daemon.reconcile.loop import START_EXTENSION_S
from treenail.errors import (
    BusError,
    BusTimeoutError,
    ClusterError,
    ConfigError,
    ConfigMissingError,
    ConfigRejectedError,
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
from treenail.update.decision.actions import IdleAction, PlanAction, RetryAction, StageAction
from treenail.update.decision.node_state import ObservedNode
from treenail.update.state.ledger_record import Target
from treenail.update.status import make_report

FAULTS = (
    ConfigError, CredentialError, DriftError, FileError, LedgerError, PreflightError, RollbackError,
    StepError, TransactionError, UnreconcilableError,
)  # fmt: skip


class Failing:
    """A fault_point in which staging fails a few times; the last error comes first."""

    def __init__(self, world: World, *errors: TreenailError) -> None:
        self._errors = list(errors)
        world.fault_point = self

    @property
    def left(self) -> int:
        return len(self._errors)

    def __call__(self, step: str) -> None:
        if step == "staging" and self._errors:
            raise self._errors.pop()


@pytest.mark.parametrize(
    "errors",
    [
        (TransactionError("the registry closed the connection"),) * 4,
        (BusError("rpm-ostreed left the bus"), BusTimeoutError("no answer within 300 s")),
    ],
)
def test_retried_failure_stays_degraded_until_success(errors: tuple[TreenailError, ...]) -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    fault_point = Failing(world, *errors)
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


@pytest.mark.parametrize("refusal", [ConfigMissingError, ConfigRejectedError])
def test_unreadable_config_degrades_after_three_tries(refusal: type[ConfigRejectedError]) -> None:
    at = facts()
    error = refusal("cannot read MachineConfig rendered-b: it does not exist", remedy="create it")
    assert error.report_after_failures == 3
    report = make_report(at, PlanAction(B), error)
    assert report.annotations[key.STATE] == "Degraded"
    assert report.annotations[key.REASON] == f"{error}; create it"
    assert report.event.reason == "ConfigUnavailable"


def test_wait_for_api_server_has_reason_and_degrades_after_its_limit() -> None:
    error = ClusterError("get machineconfigs rendered-b: HTTP 500", remedy="wait")
    report = make_report(facts(), PlanAction(B), error)
    assert report.annotations[key.STATE] == "Working"
    assert report.annotations[key.REASON] == f"{error}; wait"
    assert (report.event.type, report.event.reason) == ("Warning", "UpdateWaiting")
    overdue = make_report(facts(), PlanAction(B), error, is_overdue=True)
    assert overdue.annotations[key.STATE] == "Degraded"
    assert [each.type for each in overdue.conditions] == ["NodeDegraded"]


def test_missing_config_degrades_node_until_it_exists() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    config = world.configs.pop(B.config)
    world.request_target(B)
    states = []
    for _ in range(4):
        node.turn()
        states.append(world.annotations[key.STATE])
    assert states == ["Working", "Working", "Degraded", "Degraded"]
    assert (
        world.annotations[key.REASON] == f"cannot read MachineConfig {B.config}: it does not exist"
    )
    world.configs[B.config] = config
    node.settle()
    assert_at_rest(world, B)
    assert world.annotations[key.REASON] == ""


class Unavailable(dict[str, MachineConfig]):
    """Configs of an API server that answers every read with an internal error."""

    def __contains__(self, name: object) -> bool:
        return True

    def __getitem__(self, name: str) -> MachineConfig:
        raise ClusterError(f"get machineconfigs {name}: HTTP 500")


def test_failing_api_server_is_reason_of_wait_and_degrades_after_limit() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    configs, world.configs = world.configs, Unavailable()
    world.request_target(B)
    began, seen = node.clock.now(), [("", "")]
    while world.annotations[key.STATE] != "Degraded":
        node.turn()
        shown = (world.annotations[key.STATE], world.annotations[key.REASON])
        if shown != seen[-1]:
            seen.append(shown)
    reason = f"get machineconfigs {B.config}: HTTP 500"
    assert seen[1:] == [("Working", ""), ("Working", reason), ("Degraded", reason)]
    assert 600 < node.clock.now() - began < 800
    world.configs = configs
    node.settle()
    assert_at_rest(world, B)


@pytest.mark.parametrize("jump_s", [-1_600_000_000.0, -3600.0, 3600.0, 1_600_000_000.0])
def test_failing_api_server_degrades_at_its_limit_when_the_wall_clock_jumps(
    jump_s: float,
) -> None:
    node = Node(world_at(A))
    node.settle()
    node.world.configs = Unavailable()
    node.world.request_target(B)
    began = node.clock.monotonic()
    while not node.world.annotations.get(key.REASON):
        node.turn()
    node.clock.set_wall_clock(node.clock.now() + jump_s)
    while node.world.annotations[key.STATE] != "Degraded":
        node.turn()
    assert 600 < node.clock.monotonic() - began < 800


def test_start_is_extended_only_while_update_is_finished() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    node.process = None
    node.turn()
    assert node.process.notifier.extensions == []
    world.request_target(B)
    while world.booted != B.digest:
        world.drain_controller()
        node.turn()
    node.turn()
    assert node.process.notifier.extensions[:1] == [START_EXTENSION_S]


def test_wait_for_uncordon_degrades_node_after_its_limit() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    world.annotations |= {key.DESIRED_DRAIN: "uncordon-b", key.LAST_APPLIED_DRAIN: "drain-b"}
    world.unschedulable = True
    began = node.clock.now()
    while world.annotations[key.STATE] != "Degraded":
        node.turn()
    assert 600 < node.clock.now() - began < 800
    assert "waiting for the uncordon for longer than its limit" in world.annotations[key.REASON]
    world.drain_controller()
    node.settle()
    assert_at_rest(world, A)


def test_status_file_shows_state_of_overdue_wait() -> None:
    documents: list[dict[str, object]] = []
    status = StatusFile(
        write=lambda content: documents.append(json.loads(content)),
        notifier=FakeNotifier(),  # type: ignore[arg-type]  # records only
        clock=FakeClock(),
        node="n1",
    )
    error = ClusterError("get machineconfigs rendered-b: HTTP 500")
    status.show_report(facts(), make_report(facts(), PlanAction(B), error), error)
    overdue = make_report(facts(), PlanAction(B), error, is_overdue=True)
    status.show_report(facts(), overdue, error)
    states = [each["failure"]["state"] for each in documents]  # type: ignore[index]  # a dict
    assert states == [None, "Degraded"]


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (None, None),
        (observed_node(Target()), {"config": "", "image": ""}),
        (observed_node(B), {"config": B.config, "image": B.image}),
    ],
    ids=["unread", "no-request", "request"],
)
def test_status_file_during_instant_action_shows_request_of_node(
    node: ObservedNode | None, expected: dict[str, str] | None
) -> None:
    documents: list[dict[str, object]] = []
    status = StatusFile(
        write=lambda content: documents.append(json.loads(content)),
        notifier=FakeNotifier(),  # type: ignore[arg-type]  # records only
        clock=FakeClock(),
        node="n1",
    )
    at = facts(node=node)
    status.show_report(at, make_report(at, RetryAction(), None), None)
    assert documents[-1]["desired"] == expected


def make_new_machine() -> World:
    """A machine that its installation served the config A, which the cluster does not have."""
    world = world_at(A)
    content = json.dumps(world.configs[A.config].to_json()).encode()
    place_files(world, {node_paths.SERVED_CONFIG: Entry("file", 0o600, content)})
    return world


def test_new_machine_waits_for_the_config_that_it_was_served() -> None:
    world = make_new_machine()
    config = world.configs.pop(A.config)
    node = Node(world)
    states = set()
    for _ in range(6):
        node.turn()
        states.add(world.annotations[key.STATE])
    assert states == {"Working"}
    reason = world.annotations[key.REASON]
    assert reason.startswith(f"waiting for MachineConfig {A.config}, which this machine was served")
    assert "machine-configs/ of the install directory" in reason
    world.configs[A.config] = config
    node.settle()
    assert_at_rest(world, A)


def test_new_machine_without_its_config_is_degraded_after_the_limit() -> None:
    world = make_new_machine()
    del world.configs[A.config]
    node = Node(world)
    for _ in range(20):
        node.turn()
    assert world.annotations[key.STATE] == "Working"
    node.clock.move(1801.0)
    node.turn()
    assert world.annotations[key.STATE] == "Degraded"
    assert world.annotations[key.REASON].startswith(f"waiting for MachineConfig {A.config}")


def test_served_config_that_was_deleted_later_degrades_the_node() -> None:
    world = make_new_machine()
    node = Node(world)
    node.settle()
    world.request_target(B)
    node.settle()
    del world.configs[A.config]
    world.request_target(A)
    for _ in range(4):
        node.turn()
    assert world.annotations[key.STATE] == "Degraded"


def test_new_machine_that_was_served_another_config_is_degraded() -> None:
    world = make_new_machine()
    world.request_target(B)
    del world.configs[B.config]
    node = Node(world)
    for _ in range(4):
        node.turn()
    assert world.annotations[key.STATE] == "Degraded"
