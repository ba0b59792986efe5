"""Requests that change or vanish during an update, and steps whose cause is fixed later."""

from tests.daemon.configuration import test_config_walks as configs
from tests.daemon.configuration.test_config_walks import BROKEN, NEXT, UNIT, config
from tests.daemon.nodes import Node, assert_at_rest
from tests.daemon.reconcile.test_walks import recorded, world_at
from tests.fakes.world import FakeHealth, World
from tests.update.build import A, B
from treenail.api import annotations as key
from treenail.update.state.record import Target, UpdateOutcome


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
