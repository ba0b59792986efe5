"""Random walks through power cuts, kills, human reboots, changed minds and lost API servers.

The daemon's real loop acts on a small model of a machine and a cluster that keeps what a real one
keeps and loses what it loses. Two things must hold whatever happens: the OS never changes on a
node in service, and once the world calms down the node comes to rest at what is asked of it.
"""

import itertools
import json
import os
import random
from collections.abc import Iterator

import pytest

from tests.daemon import nodes
from tests.daemon.nodes import BACK_ENDS, Node, NodeOf, assert_at_rest, directories
from tests.fakes.world import Killed, PowerCut, World
from tests.update.build import A, B, C
from treenail.api import annotations as key
from treenail.api.machineconfig import MachineConfig
from treenail.api.meta import ObjectMeta
from treenail.update.decision.request import RequestKind, UserRequest, explain_too_late
from treenail.update.state import record as records
from treenail.update.state.phases import Phase
from treenail.update.state.record import LedgerRecord, Target, UpdateOutcome

WALKS = int(os.environ.get("TREENAIL_WALKS", "600"))


CONFIGS = tuple(MachineConfig(ObjectMeta(name=each.config)) for each in (A, B, C))


def world_at(target: Target) -> World:
    return nodes.world_at(target, *CONFIGS)


def recorded(world: World) -> LedgerRecord:
    return records.from_json(json.loads(world.ledger) if world.ledger else None)


class Chaos:
    """Random misfortune, the same for the same seed."""

    def __init__(self, node: Node, seed: int) -> None:
        self._node = node
        self._random = random.Random(seed)
        self.target = A

    def fate(self, _step: str) -> None:
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
            self.call_off()
        elif draw < 0.67:
            world.request = UserRequest(RequestKind.RETRY)
        elif draw < 0.71:
            self._node.process = None
            world.soft = True
            world.reboot()
        elif draw < 0.74:
            world.softens = not world.softens
        elif draw < 0.77:
            world.misleads = not world.misleads
        elif draw < 0.82:
            self.clean_up()

    def change_target(self) -> None:
        if self._node.world.api_up:
            self.target = self._random.choice((A, B, C))
            self._node.world.ask_for(self.target)

    def call_off(self) -> None:
        update = recorded(self._node.world).update
        if update is not None:
            self._node.world.request = UserRequest(RequestKind.CANCEL, update.id)

    def clean_up(self) -> None:
        """Somebody drops every deployment that is not pinned, nor boots next."""
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

    def meanwhile(self) -> None:
        draw = self._random.random()
        if draw < 0.05:
            self.call_off()
        elif draw < 0.2:
            self.change_target()
            if self._node.process is not None:
                self._node.process.cluster.see()


@pytest.mark.limit(300.0)
@pytest.mark.parametrize("start", range(0, WALKS, 100))
def test_every_walk_ends_at_the_target_and_never_changes_a_node_in_service(
    start: int, node_of: NodeOf
) -> None:
    for seed in range(start, min(start + 100, WALKS)):
        world = world_at(A)
        node = node_of(world)
        node.softly = seed % 2 == 0
        node.settle()
        chaos = Chaos(node, seed)
        world.fate, world.meanwhile = chaos.fate, chaos.meanwhile
        for _ in range(60):
            chaos.step()
            node.turn()
        world.fate, world.meanwhile = (lambda _: None), (lambda: None)
        world.api_up, world.loses_answers = True, 0
        node.settle()
        if '"quarantined": {' in (world.ledger or ""):
            # Called off; or three power cuts in three reboots, which look like an image that
            # does not boot.
            ask_for_another_and_back(node, chaos.target)
        try:
            assert_at_rest(world, chaos.target)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}\n{world}") from error


def ask_for_another_and_back(node: Node, target: Target) -> None:
    for asked in (A if target == B else B, target):
        node.world.ask_for(asked)
        node.settle()


def effects_of_an_update(bootc: str, *, softly: bool) -> list[str]:
    """Every effect of one update, in order."""
    steps: list[str] = []
    world = world_at(A)
    node = Node(world, bootc=bootc, softly=softly)
    node.settle()
    world.ask_for(B)
    world.fate = steps.append
    node.settle()
    assert_at_rest(world, B)
    return steps


def interruptions() -> Iterator[tuple[str, bool, int, type[BaseException]]]:
    with directories() as directory_of:
        for back_end, softly in itertools.product(BACK_ENDS, (False, True)):
            bootc = directory_of(back_end)
            for index in range(len(effects_of_an_update(bootc, softly=softly))):
                yield back_end, softly, index, Killed
                yield back_end, softly, index, PowerCut


@pytest.mark.parametrize(
    ("node_of", "softly", "index", "misfortune"), list(interruptions()), indirect=["node_of"]
)
def test_an_update_survives_an_interruption_at_any_effect(
    node_of: NodeOf, index: int, misfortune: type[BaseException], *, softly: bool
) -> None:
    world = world_at(A)
    node = node_of(world)
    node.softly = softly
    node.settle()
    world.ask_for(B)
    countdown = iter(range(index + 1))

    def fate(_step: str) -> None:
        if next(countdown, None) == index:
            raise misfortune

    world.fate = fate
    node.settle()
    assert_at_rest(world, B)


def test_an_update_takes_five_writes_to_the_node() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    world.writes.clear()
    world.ask_for(B)
    node.settle()
    assert_at_rest(world, B)
    assert len(world.writes) == 5, world.writes


def test_a_node_at_rest_writes_nothing() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    world.writes.clear()
    node.settle()
    assert world.writes == []


def test_an_update_that_is_past_the_drain_goes_through_without_the_api_server(
    node_of: NodeOf,
) -> None:
    world = world_at(A)
    node = node_of(world)
    node.settle()
    world.ask_for(B)
    while world.in_service:
        node.turn()
        world.drain_controller()
    node.turn()
    world.api_up = False
    for _ in range(10):
        node.turn()
    assert world.booted == B.digest
    assert world.annotations[key.CURRENT_CONFIG] == A.config, "nobody could be told yet"
    world.api_up = True
    node.settle()
    assert_at_rest(world, B)


def test_what_fails_because_the_machine_goes_down_is_no_failure_of_the_update() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    world.ask_for(B)
    while world.in_service:
        node.turn()
        world.drain_controller()
    world.going_down = True
    world.writes.clear()
    node.turn()
    assert world.writes == []
    assert recorded(world).update is not None


def test_what_comes_in_the_way_after_the_staging_cordons_nothing(node_of: NodeOf) -> None:
    world = world_at(A)
    node = node_of(world)
    node.settle()
    world.ask_for(B)
    world.in_the_way = "NoSpaceOnVar"
    node.settle()
    assert world.annotations[key.STATE] == "Degraded"
    assert "the update can't begin: NoSpaceOnVar" in world.annotations[key.REASON]
    assert key.DESIRED_DRAIN not in world.annotations
    update = recorded(world).update
    assert update is not None
    assert update.staged_id, "it was not even staged"
    world.in_the_way = ""
    node.settle()
    assert_at_rest(world, B)


def test_a_changed_mind_before_the_reboot_costs_no_reboot(
    node_of: NodeOf,
) -> None:
    world = world_at(A)
    node = node_of(world)
    node.settle()
    boots = world.boots
    world.ask_for(B)
    while world.in_service:
        node.turn()
        world.drain_controller()
    world.ask_for(A)
    node.settle()
    assert_at_rest(world, A)
    assert world.boots == boots


@pytest.mark.parametrize("turns", range(12))
def test_an_update_that_is_called_off_leaves_the_node_as_it_was(
    turns: int, node_of: NodeOf
) -> None:
    """Whenever it is asked for; once it is too late, the update goes through."""
    world = world_at(A)
    node = node_of(world)
    node.settle()
    boots = world.boots
    world.ask_for(B)
    for _ in range(turns):
        node.turn()
        world.drain_controller()
    update = recorded(world).update
    late = "" if update is None else explain_too_late(update)
    world.request = None if update is None else UserRequest(RequestKind.CANCEL, update.id)
    node.settle()
    assert world.request is None, "whoever asked is not answered"
    if update is None or late:
        assert_at_rest(world, B)
        return
    assert (world.booted, world.boots, world.staged) == (A.digest, boots, "")
    assert world.in_service
    assert world.violations == []
    assert world.annotations[key.STATE] == "Degraded"
    assert "called off on this machine; ask for another" in world.annotations[key.REASON]
    (past,) = recorded(world).history
    assert past.outcome is UpdateOutcome.CANCELLED


def test_a_target_that_was_called_off_is_tried_again_once_it_is_forgiven() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    world.ask_for(B)
    node.turn()
    update = recorded(world).update
    assert update is not None
    world.request = UserRequest(RequestKind.CANCEL, update.id)
    node.settle()
    assert world.booted == A.digest
    world.request = UserRequest(RequestKind.RETRY)
    node.settle()
    assert world.request is None
    assert_at_rest(world, B)


def test_a_pull_that_is_called_off_ends_at_once() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()

    def call_off() -> None:
        update = recorded(world).update
        assert update is not None
        world.request = UserRequest(RequestKind.CANCEL, update.id)

    world.ask_for(B)
    world.meanwhile = call_off
    steps: list[str] = []
    world.fate = steps.append
    node.settle()
    assert "staged" not in steps
    assert world.booted == A.digest


def test_a_request_for_what_is_over_is_taken_away() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    for request in (UserRequest(RequestKind.CANCEL, "another"), UserRequest(RequestKind.RETRY)):
        world.request = request
        node.turn()
        assert world.request is None
    assert_at_rest(world, A)


def test_a_cordon_by_hand_from_before_a_cancelled_update_stays() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    world.unschedulable = True
    world.ask_for(B)
    world.meanwhile = lambda: world.ask_for(A)
    for _ in range(20):
        node.turn()
        world.drain_controller()
    assert world.unschedulable
    assert world.booted == A.digest
    assert not world.staged


def test_a_bad_digest_degrades_the_node_and_touches_nothing() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    world.fate = lambda step: pytest.fail(step) if step not in ("patch", "patched") else None
    world.annotations[key.DESIRED_OS_IMAGE] = "registry.example.com/os/node:latest"
    node.settle()
    assert world.annotations[key.STATE] == "Degraded"
    assert "names a tag" in world.annotations[key.REASON]
    assert "@sha256:" in world.annotations[key.REASON]
    world.fate = lambda _: None
    world.ask_for(A)
    node.settle()
    assert_at_rest(world, A)
    assert world.annotations[key.REASON] == ""


def test_fips_the_other_way_is_unreconcilable_and_never_cordons() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    world.configs[B.config] = MachineConfig(ObjectMeta(name=B.config), fips=True)
    world.ask_for(B)
    node.settle()
    assert world.annotations[key.STATE] == "Unreconcilable"
    assert "FIPS" in world.annotations[key.REASON]
    assert not world.unschedulable
    assert not world.staged


def test_a_reboot_that_never_leads_to_the_image_is_given_up_after_three(
    node_of: NodeOf,
) -> None:
    world = world_at(A)
    node = node_of(world)
    node.settle()
    world.ask_for(B)
    world.finalizes = False
    node.settle()
    assert world.booted == A.digest
    assert world.annotations[key.STATE] == "Degraded"
    assert "3 times" in world.annotations[key.REASON]
    assert not world.unschedulable
