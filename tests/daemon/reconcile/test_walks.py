"""Random walks: power cuts, kills, reboots by users, changed targets, lost API servers.

The daemon's real loop acts on a small model of a machine and a cluster that keeps what a real one
keeps and loses what it loses. Two things must always hold: the OS never changes on a
node in service, and once the world calms down the node comes to rest at its target.
"""

import json
import random
from collections.abc import Iterator

import pytest

from tests.daemon import nodes, walk_budget
from tests.daemon.nodes import Node, NodeOf, assert_at_rest
from tests.fakes.world import Killed, PowerCut, World
from tests.update.build import A, B, C
from treenail.api import annotations as key
from treenail.api.machineconfig import MachineConfig
from treenail.api.object_meta import ObjectMeta
from treenail.update.decision.user_requests import RequestKind, UserRequest, explain_too_late
from treenail.update.state import ledger_record as records
from treenail.update.state.ledger_record import LedgerRecord, Phase, Target, UpdateOutcome

CONFIGS = tuple(MachineConfig(ObjectMeta(name=each.config)) for each in (A, B, C))


def world_at(target: Target) -> World:
    return nodes.world_at(target, *CONFIGS)


def recorded(world: World) -> LedgerRecord:
    return records.from_json(json.loads(world.ledger) if world.ledger else None)


class Chaos:
    """Random faults, the same for the same seed."""

    def __init__(self, node: Node, seed: int) -> None:
        self._node = node
        self._random = random.Random(seed)
        self.target = A

    def fault_point(self, _step: str) -> None:
        draw = self._random.random()
        if draw < 0.04:
            raise PowerCut
        if draw < 0.08:
            raise Killed

    def step(self) -> None:
        world, draw = self._node.world, self._random.random()
        if draw < 0.10:
            self.change_target()
        elif draw < 0.15:
            self._node.process = None
            world.reboot()
        elif draw < 0.18:
            self._node.process = None
            world.power_cut()
        elif draw < 0.24:
            world.api_up = not world.api_up
        elif draw < 0.27:
            world.loses_answers = 1
        elif draw < 0.60:
            world.drain_controller()
        elif draw < 0.62:
            self.uncordon_by_hand()
        elif draw < 0.65:
            self.cancel_update()
        elif draw < 0.67:
            world.request = UserRequest(RequestKind.RETRY)
        elif draw < 0.71:
            self._node.process = None
            world.soft = True
            world.reboot()
        elif draw < 0.74:
            world.has_same_kernel = not world.has_same_kernel
        elif draw < 0.77:
            world.starts_wrong_root = not world.starts_wrong_root
        elif draw < 0.82:
            self.clean_up()

    def change_target(self) -> None:
        if self._node.world.api_up:
            self.target = self._random.choice((A, B, C))
            self._node.world.request_target(self.target)

    def cancel_update(self) -> None:
        update = recorded(self._node.world).update
        if update is not None:
            self._node.world.request = UserRequest(RequestKind.CANCEL, update.id)

    def clean_up(self) -> None:
        """Drop every deployment that is neither pinned nor boots next, as a user may."""
        world, update = self._node.world, recorded(self._node.world).update
        if world.previous is None or world.rolled_back or world.tried_again:
            return
        if {world.previous.id, world.previous.digest} & world.pins:
            return
        world.previous = None
        if update is None or update.impact is None or update.impact.os.is_empty:
            return
        back = {world.system.id, world.system.digest} & world.pins
        if update.phase in (Phase.VERIFYING, Phase.ROLLING_BACK) and not back:
            world.violations.append("there was nothing to go back to on trial")

    def uncordon_by_hand(self) -> None:
        # Behind the back of an agent past its point of no return nothing can be promised.
        world = self._node.world
        if world.api_up and world.may_be_uncordoned and self._node.process is not None:
            world.unschedulable = False

    def on_wait(self) -> None:
        draw = self._random.random()
        if draw < 0.05:
            self.cancel_update()
        elif draw < 0.2:
            self.change_target()
            if self._node.process is not None:
                self._node.process.cluster.see()


@walk_budget.walk
def test_walk_ends_at_target_and_never_changes_node_in_service(part: int, node_of: NodeOf) -> None:
    for seed in walk_budget.seeds(part):
        world = world_at(A)
        node = node_of(world)
        node.softly = seed % 2 == 0
        node.settle()
        chaos = Chaos(node, seed)
        world.fault_point, world.on_wait = chaos.fault_point, chaos.on_wait
        for _ in range(60):
            chaos.step()
            node.turn()
        world.fault_point, world.on_wait = (lambda _: None), (lambda: None)
        world.api_up, world.loses_answers = True, 0
        node.settle()
        if '"quarantined": {' in (world.ledger or ""):
            # Cancelled; or three power cuts in three reboots, which look like an image that
            # does not boot.
            request_another_and_back(node, chaos.target)
        try:
            assert_at_rest(world, chaos.target)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}\n{world}") from error


def request_another_and_back(node: Node, target: Target) -> None:
    for requested in (A if target == B else B, target):
        node.world.request_target(requested)
        node.settle()


def strike(world: World, fault: type[BaseException], *, after: int) -> Iterator[int]:
    """Raise one fault after so many effects; return the countdown."""
    left = iter(range(after))

    def fault_point(_step: str) -> None:
        if next(left, None) is None:
            world.fault_point = lambda _: None
            raise fault

    world.fault_point = fault_point
    return left


def effects_of_an_update(node_of: NodeOf, *, softly: bool) -> list[str]:
    """Every effect of one update, in order."""
    steps: list[str] = []
    world = world_at(A)
    node = node_of(world)
    node.softly = softly
    node.settle()
    world.request_target(B)
    world.fault_point = steps.append
    node.settle()
    assert_at_rest(world, B)
    return steps


@pytest.mark.parametrize("softly", [False, True])
@pytest.mark.parametrize("fault", [Killed, PowerCut])
@walk_budget.exhaustive
def test_update_survives_interruption_at_any_effect(
    node_of: NodeOf, fault: type[BaseException], *, softly: bool
) -> None:
    effects = effects_of_an_update(node_of, softly=softly)
    assert len(effects) > 20
    for index in walk_budget.sample(range(len(effects))):
        world = world_at(A)
        node = node_of(world)
        node.softly = softly
        node.settle()
        world.request_target(B)
        left = strike(world, fault, after=index)
        node.settle()
        assert next(left, None) is None, f"effect {index} did not happen"
        try:
            assert_at_rest(world, B)
        except AssertionError as error:
            raise AssertionError(f"{fault.__name__} at effect {index}: {error}") from error


def test_update_takes_five_node_writes() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    world.writes.clear()
    world.request_target(B)
    node.settle()
    assert_at_rest(world, B)
    assert len(world.writes) == 5, world.writes


def test_idle_node_writes_nothing() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    world.writes.clear()
    node.settle()
    assert world.writes == []


def test_drained_update_finishes_without_api_server(
    node_of: NodeOf,
) -> None:
    world = world_at(A)
    node = node_of(world)
    node.settle()
    world.request_target(B)
    while world.in_service:
        node.turn()
        world.drain_controller()
    node.turn()
    world.api_up = False
    for _ in range(10):
        node.turn()
    assert world.booted == B.digest
    assert world.annotations[key.CURRENT_CONFIG] == A.config, "the API server is still unreachable"
    world.api_up = True
    node.settle()
    assert_at_rest(world, B)


def test_failure_during_shutdown_does_not_fail_the_update() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    world.request_target(B)
    while world.in_service:
        node.turn()
        world.drain_controller()
    world.is_going_down = True
    world.writes.clear()
    node.turn()
    assert world.writes == []
    assert recorded(world).update is not None


def test_preflight_finding_after_staging_does_not_cordon(node_of: NodeOf) -> None:
    world = world_at(A)
    node = node_of(world)
    node.settle()
    world.request_target(B)
    world.finding = "NoSpaceOnVar"
    node.settle()
    assert world.annotations[key.STATE] == "Degraded"
    assert "cannot start the update: NoSpaceOnVar" in world.annotations[key.REASON]
    assert key.DESIRED_DRAIN not in world.annotations
    update = recorded(world).update
    assert update.staged_id, "it was not even staged"
    world.finding = ""
    node.settle()
    assert_at_rest(world, B)


def test_target_changed_before_reboot_causes_no_reboot(
    node_of: NodeOf,
) -> None:
    world = world_at(A)
    node = node_of(world)
    node.settle()
    boots = world.boots
    world.request_target(B)
    while world.in_service:
        node.turn()
        world.drain_controller()
    world.request_target(A)
    node.settle()
    assert_at_rest(world, A)
    assert world.boots == boots


@pytest.mark.parametrize("turns", range(12))
def test_cancelled_update_restores_the_node(turns: int, node_of: NodeOf) -> None:
    """Cancel at any point; once it is too late, the update finishes."""
    world = world_at(A)
    node = node_of(world)
    node.settle()
    boots = world.boots
    world.request_target(B)
    for _ in range(turns):
        node.turn()
        world.drain_controller()
    update = recorded(world).update
    late = "" if update is None else explain_too_late(update)
    world.request = None if update is None else UserRequest(RequestKind.CANCEL, update.id)
    node.settle()
    assert world.request is None, "the request was not answered"
    if update is None or late:
        assert_at_rest(world, B)
        return
    assert (world.booted, world.boots, world.staged) == (A.digest, boots, "")
    assert world.in_service
    assert world.violations == []
    assert world.annotations[key.STATE] == "Degraded"
    assert "was cancelled on this node; request another target" in world.annotations[key.REASON]
    (past,) = recorded(world).history
    assert past.outcome is UpdateOutcome.CANCELLED


def test_cancelled_target_is_tried_again_after_retry_request() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    world.request_target(B)
    node.turn()
    update = recorded(world).update
    world.request = UserRequest(RequestKind.CANCEL, update.id)
    node.settle()
    assert world.booted == A.digest
    world.request = UserRequest(RequestKind.RETRY)
    node.settle()
    assert world.request is None
    assert_at_rest(world, B)


def test_cancelled_pull_ends_at_once() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()

    def cancel_update() -> None:
        update = recorded(world).update
        world.request = UserRequest(RequestKind.CANCEL, update.id)

    world.request_target(B)
    world.on_wait = cancel_update
    steps: list[str] = []
    world.fault_point = steps.append
    node.settle()
    assert "staged" not in steps
    assert world.booted == A.digest


def test_request_for_finished_update_is_removed() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    for request in (UserRequest(RequestKind.CANCEL, "another"), UserRequest(RequestKind.RETRY)):
        world.request = request
        node.turn()
        assert world.request is None
    assert_at_rest(world, A)


def test_cordon_by_user_survives_a_cancelled_update() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    world.unschedulable = True
    world.request_target(B)
    world.on_wait = lambda: world.request_target(A)
    for _ in range(20):
        node.turn()
        world.drain_controller()
    assert world.unschedulable
    assert world.booted == A.digest
    assert not world.staged


def test_image_by_tag_degrades_node_and_changes_nothing() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    world.fault_point = lambda step: pytest.fail(step) if step not in ("patch", "patched") else None
    world.annotations[key.DESIRED_OS_IMAGE] = "registry.example.com/os/node:latest"
    node.settle()
    assert world.annotations[key.STATE] == "Degraded"
    assert "names a tag" in world.annotations[key.REASON]
    assert "@sha256:" in world.annotations[key.REASON]
    world.fault_point = lambda _: None
    world.request_target(A)
    node.settle()
    assert_at_rest(world, A)
    assert world.annotations[key.REASON] == ""


def test_other_fips_mode_is_unreconcilable_and_never_cordons() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    world.configs[B.config] = MachineConfig(ObjectMeta(name=B.config), fips=True)
    world.request_target(B)
    node.settle()
    assert world.annotations[key.STATE] == "Unreconcilable"
    assert "FIPS" in world.annotations[key.REASON]
    assert not world.unschedulable
    assert not world.staged


def test_reboot_without_effect_is_abandoned_after_three(
    node_of: NodeOf,
) -> None:
    world = world_at(A)
    node = node_of(world)
    node.settle()
    world.request_target(B)
    world.finalizes = False
    node.settle()
    assert world.booted == A.digest
    assert world.annotations[key.STATE] == "Degraded"
    assert "3 reboots" in world.annotations[key.REASON]
    assert not world.unschedulable
