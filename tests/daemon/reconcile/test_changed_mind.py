"""Requests that change or vanish during an update, and steps whose cause is fixed later."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.daemon.configuration import test_config_walks as configs
from tests.daemon.configuration.test_config_walks import BROKEN, NEXT, STOCK, UNIT, config
from tests.daemon.machines import Systemd
from tests.daemon.nodes import Node, Process, assert_at_rest
from tests.daemon.reconcile.test_bad_boots import FILES_ALONE
from tests.daemon.reconcile.test_boot_trials import make_live_update
from tests.daemon.reconcile.test_crashes_before_reboot import (
    KUBELET,
    OTHER,
    has_kubelet_file,
    stop_in_applying,
)
from tests.daemon.reconcile.test_walks import recorded, world_at
from tests.fakes.world import FakeHealth, Killed, PowerCut, World
from tests.update.build import A, B, C
from treenail.api import annotations as key
from treenail.api.disruptionpolicy import (
    ClusterDisruptionPolicy,
    NonePolicyAction,
    UnitDisruptionPolicy,
)
from treenail.update.decision.user_requests import RequestKind, UserRequest, cancel_update
from treenail.update.state import ledger_record as records
from treenail.update.state.ledger_record import Moment, Target, UpdateOutcome


def booted_b(world: World) -> bool:
    return world.booted == B.digest


def step(node: Node) -> None:
    node.world.drain_controller()
    node.turn()


def test_request_for_previous_target_ends_trial_before_deadline() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    world.is_unhealthy = booted_b
    world.request_target(B)
    while not booted_b(world):
        step(node)
    began = node.clock.now()
    world.request_target(A)
    states = set()
    while booted_b(world):
        step(node)
        states.add(world.annotations[key.STATE])
    assert node.clock.now() - began < FakeHealth.DEADLINE_S
    assert states == {"Working"}
    node.settle()
    assert_at_rest(world, A)
    assert recorded(world).history[0].outcome is UpdateOutcome.CANCELLED
    assert recorded(world).quarantined is None


def test_node_created_again_in_update_is_done_with_what_it_has() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    world.request_target(B)
    while world.staging is None:
        step(node)
    world.annotations.clear()
    world.unschedulable = False
    for _ in range(4):
        step(node)
    notes = world.annotations
    assert (notes[key.STATE], notes[key.REASON]) == ("Done", "")
    assert (notes[key.CURRENT_CONFIG], notes[key.CURRENT_OS_IMAGE]) == (A.config, A.image)
    assert world.staging is None
    world.request_target(B)
    node.settle()
    assert_at_rest(world, B)


def test_failed_step_succeeds_without_new_request_after_its_cause_is_fixed() -> None:
    world = configs.world_at(NEXT)
    node = Node(world)
    world.request_target(BROKEN)
    node.settle()
    assert world.annotations[key.STATE] == "Degraded"
    assert "treenail retry" in world.annotations[key.REASON]
    fixed = config(BROKEN.config, {configs.APP: "fixed"}, image=A.image, units=(UNIT,))
    world.configs[BROKEN.config] = fixed
    for _ in range(500):
        step(node)
        if world.annotations[key.STATE] == "Done":
            break
    assert_at_rest(world, Target(BROKEN.config))
    tries = [each.outcome for each in recorded(world).history[:2]]
    assert tries == [UpdateOutcome.DONE, UpdateOutcome.FAILED]


def test_image_without_agent_is_refused_before_drain() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    world.image_finding = "AgentMissing: it has no treenail.service"
    world.request_target(B)
    node.settle()
    assert "AgentMissing" in world.annotations[key.REASON]
    assert (world.booted, world.staging, world.boots) == (A.digest, None, 1)
    assert not world.annotations.get(key.DESIRED_DRAIN, "").startswith("drain-")


def request_stock(world: World) -> None:
    world.request_target(STOCK)


def request_cancel(world: World) -> None:
    update = recorded(world).update
    world.request = UserRequest(RequestKind.CANCEL, update.id)


def cancel_without_agent(world: World) -> None:
    cancelled = cancel_update(recorded(world), Moment(0.0, f"boot-{world.boots}", 1.0))
    world.ledger = json.dumps(records.to_json(cancelled))


class CountingSystemd(Systemd):
    """Counts the starts of the default target, which follow a reload after a boot."""

    def __init__(self, world: World) -> None:
        super().__init__(world.disk)
        self.start_count = 0

    def start_default_target(self) -> None:
        self.start_count += 1


class CountingNode(Node):
    """A node with a systemd."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.systemd = CountingSystemd(world)

    def start_process(self) -> Process:
        systemd = self.systemd

        class SystemdProcess(Process):
            def open_services(self, _world: World) -> CountingSystemd:
                return systemd

        return SystemdProcess(self.world, self.clock)


def start_at_stock() -> CountingNode:
    node = CountingNode(configs.world_at(STOCK))
    node.settle()
    node.systemd.start_count = 0
    return node


@pytest.mark.parametrize("cancel", [request_stock, request_cancel, cancel_without_agent])
@pytest.mark.parametrize(("fault", "count"), [(PowerCut, 1), (Killed, 0)])
def test_cancel_after_another_reboot_reloads_the_restored_units(
    cancel: Callable[[World], None], fault: type[BaseException], count: int
) -> None:
    node = start_at_stock()
    world = node.world
    world.configs[FILES_ALONE.name] = FILES_ALONE
    stop_in_applying(node, Target(FILES_ALONE.name), OTHER, fault)
    cancel(world)
    node.settle()
    assert (world.file(OTHER), node.systemd.start_count) == (None, count)


def test_failed_update_without_reboot_reloads_units_after_another_reboot() -> None:
    node = start_at_stock()
    world, target = node.world, make_live_update(node)
    world.configs[target.config] = config(
        target.config,
        {configs.APP: "stock", configs.BAKED: configs.BAKED_TEXT, KUBELET: "x"},
        image=C.image,
    )
    policy = world.policy.policy
    units = (UnitDisruptionPolicy(str(UNIT["name"]), (NonePolicyAction(),)),)
    world.policy = ClusterDisruptionPolicy(replace(policy, units=units))
    stop_in_applying(node, target, KUBELET, PowerCut)
    world.is_unhealthy = has_kubelet_file
    node.settle()
    assert (world.file(KUBELET), node.systemd.start_count) == (None, 1)
