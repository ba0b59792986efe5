"""How long the previous deployment stays pinned."""

import json

import pytest

from tests.daemon import nodes
from tests.daemon.nodes import Node, assert_at_rest
from tests.fakes.world import Killed, World
from tests.update.build import A, B, C
from treenail.api.machineconfig import MachineConfig
from treenail.api.object_meta import ObjectMeta
from treenail.errors import BusyError
from treenail.update.state import ledger_record as records
from treenail.update.state.ledger_record import LedgerRecord, Phase, RetainedDeployment

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


def test_previous_deployment_is_pinned_before_reboot(world: World) -> None:
    node, before = at(world), world.system.id
    world.request_target(B)
    pinned: list[frozenset[str]] = []

    def fault_point(step: str) -> None:
        if step == "unlock":
            pinned.append(frozenset(world.pins))

    world.fault_point = fault_point
    node.settle()
    assert pinned == [{before}]


def test_previous_deployment_stays_pinned_for_a_day(world: World) -> None:
    node, before = at(world), world.system.id
    world.request_target(B)
    node.settle()
    assert_at_rest(world, B)
    kept = recorded(world).retained
    assert (kept.id, world.pins) == (before, {before})
    node.clock.move(DAY_S / 2)
    node.turn()
    assert world.pins == {before}
    node.clock.move(DAY_S / 2)
    node.settle()
    assert world.pins == set()
    assert recorded(world).retained is None


def test_next_update_unpins_and_pins_its_own(world: World) -> None:
    node = at(world)
    world.request_target(B)
    node.settle()
    before = world.system.id
    world.request_target(C)
    node.settle()
    assert_at_rest(world, C)
    assert world.pins == {before}


def test_rollback_leaves_no_pin(world: World) -> None:
    node = at(world)
    world.is_unhealthy = lambda world: world.booted == B.digest
    world.request_target(B)
    node.settle()
    assert world.booted == A.digest
    assert (world.pins, recorded(world).retained) == (set(), None)


def test_pin_of_user_stays(world: World) -> None:
    node, before = at(world), world.system.id
    world.pins.add(before)
    world.request_target(B)
    node.settle()
    node.clock.move(2 * DAY_S)
    node.settle()
    assert world.pins == {before}


@pytest.mark.parametrize("step", ["pin", "unpin"])
def test_other_transaction_is_awaited(world: World, step: str) -> None:
    node = at(world)
    world.request_target(B)
    node.settle()
    before, tries = world.system.id, busy(world, step)
    world.request_target(C)
    node.settle()
    assert len(tries) == 3
    assert_at_rest(world, C)
    assert world.pins == {before}
    assert recorded(world).quarantined is None


def test_idle_node_unpins_once_no_transaction_blocks(world: World) -> None:
    node = at(world)
    world.request_target(B)
    node.settle()
    tries = busy(world, "unpin")
    node.clock.move(DAY_S)
    node.turn()
    assert (len(tries), len(world.pins)) == (1, 1)
    assert_at_rest(world, B)
    node.settle()
    assert world.pins == set()


def busy(world: World, step: str) -> list[str]:
    """Let another program's transaction block the step twice; return the attempts."""
    tries: list[str] = []

    def fault_point(each: str) -> None:
        if each == step:
            tries.append(each)
            if len(tries) < 3:
                raise BusyError("rpm-ostree is busy with RefreshMd")

    world.fault_point = fault_point
    return tries


def test_update_cancelled_at_reboot_leaves_no_pin(world: World) -> None:
    node = at(world)
    world.request_target(B)

    def fault_point(step: str) -> None:
        if step == "pinned":
            raise Killed

    world.fault_point = fault_point
    while not world.pins:
        world.drain_controller()
        node.turn()
    world.fault_point = lambda _: None
    update = recorded(world).update
    assert update.phase is Phase.REBOOTING
    world.request_target(A)
    node.settle()
    assert_at_rest(world, A)
    assert world.pins == set()


def test_ledger_without_retained_deployment_pins_nothing() -> None:
    document = records.to_json(LedgerRecord(retained=RetainedDeployment("os-1", 5.0)))
    assert records.from_json(document).retained == RetainedDeployment("os-1", 5.0)
    del document["retained"]
    assert records.from_json(document).retained is None
