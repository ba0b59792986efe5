"""One effect on the disk fails, or each one from it on, at every effect of an update.

The real reconcile loop, ledger, crash record and undo log write to a disk in memory that is full,
without inodes, read-only or broken. The tests inject the error where `Disk` calls the kernel.
"""

import json
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import NamedTuple

import pytest

from tests.daemon import walk_budget
from tests.daemon.configuration import test_config_walks as configs
from tests.daemon.configuration.test_config_walks import APP, FREE, FREELY, NEXT, STOCK
from tests.daemon.machines import ROOT
from tests.daemon.nodes import Node, assert_at_rest
from tests.daemon.reconcile.test_bad_boots import assert_came_back, has_next
from tests.fakes.failing_disk import FAULTS, FailingDisk
from tests.fakes.host_machine import make_machine
from tests.fakes.world import World
from tests.records import write_record
from treenail.api import annotations as key
from treenail.host.system.state_file import Ledger
from treenail.update.decision.user_requests import RequestKind, UserRequest
from treenail.update.state.ledger_record import Target

LASTING_TURNS = 30
"""So many turns of at most a minute the disk fails when it does not fail once only."""


class Update(NamedTuple):
    """An update between two targets; ``is_bad`` makes the new one unhealthy."""

    origin: Target
    target: Target
    is_bad: Callable[[World], bool] = lambda _: False


UPDATES = {
    "reboot": Update(STOCK, NEXT),
    "live": Update(NEXT, FREELY),
    "rollback": Update(STOCK, NEXT, has_next),
}


class Case(NamedTuple):
    """The number of the first effect that fails, and whether all later ones fail too."""

    first: int
    is_lasting: bool


@cache
def settled_world(origin: Target) -> World:
    world = configs.world_at(origin)
    world.disk = FailingDisk(world.disk.tree())
    world.keeps_records_on_disk = True
    Ledger(ROOT, make_machine(ROOT, world.disk).files).write_document(
        json.loads(world.ledger or "")
    )
    Node(world).settle()
    return world


def start(update: Update) -> tuple[World, FailingDisk]:
    """Return a world whose node is requested to begin the update, and its disk."""
    world = deepcopy(settled_world(update.origin))
    disk = world.disk
    assert isinstance(disk, FailingDisk)
    disk.effects.clear()
    world.is_unhealthy = update.is_bad
    world.request_target(update.target)
    return world, disk


def settle(world: World) -> None:
    node = Node(world)
    for _ in range(3):
        node.settle()


@cache
def count_effects(name: str) -> int:
    """Return the number of effects of the update on a disk that works."""
    world, disk = start(UPDATES[name])
    settle(world)
    assert_end(world, UPDATES[name])
    return len(disk.effects)


def assert_end(world: World, update: Update) -> None:
    if update.is_bad is has_next:
        assert_came_back(world, update.origin, update.target, "Kubelet")
    else:
        assert_at_rest(world, update.target)


def assert_truthful(world: World) -> None:
    """A node that reports Done has the files that it reports."""
    if world.annotations[key.STATE] != "Done":
        return
    config = world.annotations[key.CURRENT_CONFIG]
    assert world.file(APP) == (b"stock" if config == STOCK.config else b"next")
    assert (world.file(FREE) is not None) == (config == FREELY.config)


def run_case(name: str, fault: str, case: Case) -> None:
    update = UPDATES[name]
    world, disk = start(update)
    disk.fault, disk.first = FAULTS[fault], case.first
    disk.last = 1_000_000 if case.is_lasting else case.first
    if case.is_lasting:
        node = Node(world)
        for _ in range(LASTING_TURNS):
            world.drain_controller()
            node.turn()
            assert_truthful(world)
        if disk.failures and world.annotations[key.STATE] != "Done":
            reason = world.annotations[key.REASON]
            assert world.annotations[key.STATE] == "Degraded"
            assert FAULTS[fault].cause in reason
            # The remedy.
            assert "; " in reason
        disk.fault = None
    settle(world)
    assert_truthful(world)
    if case.is_lasting and is_unrecorded_rollback(world):
        assert "a rollback that has no record" in world.annotations[key.REASON]
        if update.is_bad is has_next:
            return
        world.request = UserRequest(RequestKind.RETRY)
        settle(world)
    assert_end(world, update)


def is_unrecorded_rollback(world: World) -> bool:
    """Return whether a boot trial ended on a disk that kept no record of its end."""
    quarantined = json.loads(world.ledger or "")["quarantined"]
    return quarantined is not None and quarantined["check"] == "Boot"


@pytest.mark.parametrize("name", UPDATES)
@walk_budget.exhaustive
def test_update_with_failing_disk_ends_old_or_new(name: str) -> None:
    count = count_effects(name)
    cases = [
        (fault, Case(first, is_lasting))
        for first in range(count)
        for is_lasting in (False, True)
        for fault in FAULTS
    ]
    number = 0
    for fault, case in walk_budget.sample(cases):
        try:
            run_case(name, fault, case)
        except BaseException as error:
            error.add_note(f"{name}, {fault}: {case}")
            raise
        number += 1
    write_record(
        "host",
        what=f"an update ({name}) on a disk that fails at one of its {count} effects, once or from "
        f"then on: {', '.join(FAULTS)}",
        count=number,
        result=f"old or new, a reason with its cause while it lasts, the target afterwards; "
        f"{describe_share(number, len(cases))}",
        command="make test-long ARGS=tests/daemon/reconcile/test_disk_faults.py",
    )


def describe_share(number: int, total: int) -> str:
    return "every case" if number == total else f"a sample of {total:,} cases, evenly spread"
