"""Soft reboots: when they are requested, and what follows one into the wrong root."""

import json

import pytest

from tests.daemon import nodes
from tests.daemon.nodes import Node, assert_at_rest
from tests.fakes.world import World
from tests.update.build import A, B, C
from treenail.api import annotations as key
from treenail.api.machineconfig import MachineConfig
from treenail.api.object_meta import ObjectMeta
from treenail.update.state import ledger_record as records
from treenail.update.state.ledger_record import PastUpdate

CONFIGS = tuple(MachineConfig(ObjectMeta(name=each.config)) for each in (A, B, C))


@pytest.fixture
def world() -> World:
    return nodes.world_at(A, *CONFIGS)


def settled(world: World, *, softly: bool = True) -> Node:
    node = Node(world, softly=softly)
    node.settle()
    return node


def boots(world: World) -> tuple[int, int]:
    """Of the kernel, and of user space since."""
    return world.boots, world.soft_boots


def last(world: World) -> PastUpdate:
    return records.from_json(json.loads(world.ledger or "null")).history[0]


@pytest.mark.parametrize(
    ("machine", "boot_counts", "reboots", "is_soft"),
    [
        ({}, (1, 1), 1, True),
        ({"has_same_kernel": False}, (2, 0), 1, False),
        ({"starts_wrong_root": True}, (2, 0), 2, False),
    ],
    ids=["same kernel", "other kernel", "soft reboot into another root"],
)
def test_image_causes_one_reboot_which_is_soft_if_possible(
    world: World,
    machine: dict[str, bool],
    boot_counts: tuple[int, int],
    reboots: int,
    is_soft: bool,
) -> None:
    node = settled(world)
    for name, value in machine.items():
        setattr(world, name, value)
    world.request_target(B)
    node.settle()
    assert_at_rest(world, B)
    assert boots(world) == boot_counts
    assert (last(world).reboot_count, last(world).is_soft_reboot) == (reboots, is_soft)


def test_full_reboot_mode_never_soft_reboots(world: World) -> None:
    node = settled(world, softly=False)
    world.request_target(B)
    node.settle()
    assert_at_rest(world, B)
    assert boots(world) == (2, 0)


def test_kernel_arguments_cause_a_full_reboot(world: World) -> None:
    meta = ObjectMeta(name=B.config)
    world.configs[B.config] = MachineConfig(meta, kernel_arguments=("nosmt",))
    node = settled(world)
    world.request_target(B)
    node.settle()
    assert_at_rest(world, B)
    assert boots(world) == (2, 0)


def test_unreachable_target_is_quarantined_after_three_reboots(world: World) -> None:
    node = settled(world)
    world.starts_wrong_root, world.finalizes = True, False
    world.request_target(B)
    node.settle()
    assert world.booted == A.digest
    assert not world.unschedulable
    assert not world.staged
    assert "3 reboots" in world.annotations[key.REASON]
    assert last(world).reboot_count == 3


def test_update_cancelled_after_failed_soft_reboot_never_boots(
    world: World,
) -> None:
    node = settled(world)
    world.starts_wrong_root = True
    world.request_target(B)
    while not world.soft_boots:
        node.turn()
        world.drain_controller()
    world.request_target(A)
    node.settle()
    assert_at_rest(world, A)
    world.reboot()
    assert world.booted == A.digest


def test_soft_reboot_by_user_changes_nothing(world: World) -> None:
    node = settled(world)
    world.soft = True
    node.process = None
    world.reboot()
    node.settle()
    assert_at_rest(world, A)
    assert boots(world) == (1, 1)


def test_unhealthy_target_is_left_by_a_full_reboot(world: World) -> None:
    node = settled(world)
    world.is_unhealthy = lambda world: world.booted == B.digest
    world.request_target(B)
    node.settle()
    assert (world.booted, boots(world)) == (A.digest, (2, 0))
    assert not world.unschedulable
