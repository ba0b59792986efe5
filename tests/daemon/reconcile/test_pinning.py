"""How long the previous deployment is kept from being dropped."""

import json

import pytest

from tests.daemon import nodes
from tests.daemon.nodes import Node, assert_at_rest
from tests.fakes.world import Killed, World
from tests.update.build import A, B, C
from treenail.api.machineconfig import MachineConfig
from treenail.api.meta import ObjectMeta
from treenail.errors import BusyError
from treenail.update.state import record as records
from treenail.update.state.phases import Phase
from treenail.update.state.record import LedgerRecord, RetainedDeployment

CONFIGS = tuple(MachineConfig(ObjectMeta(name=each.config)) for each in (A, B, C))
DAY_S = 86_400.0


@pytest.fixture
def world() -> World:
    return nodes.world_at(A, *CONFIGS)


def recorded(world: World) -> LedgerRecord:
    return records.from_json(json.loads(world.ledger or "null"))


def at(world: World) -> Node:
    node = Node(world)
    node.settle()
    return node


def test_the_previous_deployment_is_pinned_before_the_reboot(world: World) -> None:
    node, before = at(world), world.system.id
    world.ask_for(B)
    pinned: list[frozenset[str]] = []

    def fate(step: str) -> None:
        if step == "unlock":
            pinned.append(frozenset(world.pins))

    world.fate = fate
    node.settle()
    assert pinned == [{before}]


def test_it_is_kept_for_a_day_after_the_node_was_found_healthy(world: World) -> None:
    node, before = at(world), world.system.id
    world.ask_for(B)
    node.settle()
    assert_at_rest(world, B)
    kept = recorded(world).retained
    assert kept is not None
    assert (kept.id, world.pins) == (before, {before})
    node.clock.move(DAY_S / 2)
    node.turn()
    assert world.pins == {before}
    node.clock.move(DAY_S / 2)
    node.settle()
    assert world.pins == set()
    assert recorded(world).retained is None


def test_the_next_update_lets_it_go_and_keeps_its_own(world: World) -> None:
    node = at(world)
    world.ask_for(B)
    node.settle()
    before = world.system.id
    world.ask_for(C)
    node.settle()
    assert_at_rest(world, C)
    assert world.pins == {before}


def test_after_going_back_nothing_stays_pinned(world: World) -> None:
    node = at(world)
    world.sick = lambda world: world.booted == B.digest
    world.ask_for(B)
    node.settle()
    assert world.booted == A.digest
    assert (world.pins, recorded(world).retained) == (set(), None)


def test_what_the_owner_pinned_stays_pinned(world: World) -> None:
    node, before = at(world), world.system.id
    world.pins.add(before)
    world.ask_for(B)
    node.settle()
    node.clock.move(2 * DAY_S)
    node.settle()
    assert world.pins == {before}


@pytest.mark.parametrize("step", ["pin", "unpin"])
def test_somebody_whose_transaction_is_in_the_way_is_waited_for(world: World, step: str) -> None:
    node = at(world)
    world.ask_for(B)
    node.settle()
    before, tries = world.system.id, busy(world, step)
    world.ask_for(C)
    node.settle()
    assert len(tries) == 3
    assert_at_rest(world, C)
    assert world.pins == {before}
    assert recorded(world).quarantined is None


def test_a_node_at_rest_lets_it_go_once_nobody_is_in_the_way(world: World) -> None:
    node = at(world)
    world.ask_for(B)
    node.settle()
    tries = busy(world, "unpin")
    node.clock.move(DAY_S)
    node.turn()
    assert (len(tries), len(world.pins)) == (1, 1)
    assert_at_rest(world, B)
    node.settle()
    assert world.pins == set()


def busy(world: World, step: str) -> list[str]:
    """Have somebody else's transaction be in the way of the step twice; the tries."""
    tries: list[str] = []

    def fate(each: str) -> None:
        if each == step:
            tries.append(each)
            if len(tries) < 3:
                raise BusyError("rpm-ostree is busy with RefreshMd")

    world.fate = fate
    return tries


def test_an_update_that_is_called_off_at_its_reboot_leaves_nothing_pinned(world: World) -> None:
    node = at(world)
    world.ask_for(B)

    def fate(step: str) -> None:
        if step == "pinned":
            raise Killed

    world.fate = fate
    while not world.pins:
        world.drain_controller()
        node.turn()
    world.fate = lambda _: None
    update = recorded(world).update
    assert update is not None
    assert update.phase is Phase.REBOOTING
    world.ask_for(A)
    node.settle()
    assert_at_rest(world, A)
    assert world.pins == set()


def test_the_ledger_of_a_version_without_it_keeps_nothing() -> None:
    document = records.to_json(LedgerRecord(retained=RetainedDeployment("os-1", 5.0)))
    assert records.from_json(document).retained == RetainedDeployment("os-1", 5.0)
    del document["retained"]
    assert records.from_json(document).retained is None
