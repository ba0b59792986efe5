"""Pre-staging: an image is staged before the node must move to it."""

import random

import pytest

from tests.daemon import walk_budget
from tests.daemon.nodes import Node, assert_at_rest
from tests.daemon.reconcile.test_walks import Chaos, recorded, strike, world_at
from tests.fakes.world import Killed, World
from tests.update.build import A, B, C
from treenail.api import annotations as key
from treenail.update.state.ledger_record import Target


def request_prestage(world: World, target: Target | None) -> None:
    """As the rollout controller does."""
    for name in (key.PRESTAGE_CONFIG, key.PRESTAGE_IMAGE):
        world.annotations.pop(name, None)
    if target is not None:
        world.annotations[key.PRESTAGE_CONFIG] = target.config
        world.annotations[key.PRESTAGE_IMAGE] = target.image


def reported(world: World) -> tuple[str, str, str]:
    """The state, the pre-staged image, and why there is none."""
    notes = world.annotations
    return notes[key.STATE], notes.get(key.PRESTAGED, ""), notes.get(key.PRESTAGE_ERROR, "")


class Pulls:
    """A fault_point that counts how often an image is pulled."""

    def __init__(self, world: World) -> None:
        self.count = 0
        world.fault_point = self

    def __call__(self, step: str) -> None:
        self.count += step == "stage begins"


def at_rest(ahead: Target | None = None) -> tuple[Node, Pulls]:
    world = world_at(A)
    node = Node(world)
    node.settle()
    pulls = Pulls(world)
    request_prestage(world, ahead)
    node.settle()
    return node, pulls


def test_prestage_in_service_is_annotated() -> None:
    node, pulls = at_rest(B)
    world = node.world
    assert reported(world) == ("Done", B.image, "")
    assert (world.staged, world.locked, world.booted) == (B.digest, True, A.digest)
    assert (world.unschedulable, pulls.count) == (False, 1)
    assert recorded(world).update is None
    assert key.DESIRED_DRAIN not in world.annotations


def test_prestaged_node_makes_no_further_calls() -> None:
    node, pulls = at_rest(B)
    writes = len(node.world.writes)
    node.settle()
    assert (len(node.world.writes), pulls.count) == (writes, 1)


def test_update_to_prestaged_image_pulls_nothing() -> None:
    node, pulls = at_rest(B)
    request_prestage(node.world, None)
    node.world.request_target(B)
    node.settle()
    assert_at_rest(node.world, B)
    assert reported(node.world) == ("Done", "", "")
    assert pulls.count == 1
    assert recorded(node.world).prestaged is None


def test_prestaged_image_no_longer_requested_is_dropped() -> None:
    node, _ = at_rest(B)
    request_prestage(node.world, None)
    node.settle()
    assert_at_rest(node.world, A)
    assert reported(node.world) == ("Done", "", "")


def test_prestage_of_another_image_replaces_it() -> None:
    node, pulls = at_rest(B)
    request_prestage(node.world, C)
    node.settle()
    assert reported(node.world) == ("Done", C.image, "")
    assert (node.world.staged, pulls.count) == (C.digest, 2)


def test_update_to_other_image_drops_prestaged_first() -> None:
    node, _ = at_rest(B)
    node.world.request_target(C)
    request_prestage(node.world, None)
    node.settle()
    assert_at_rest(node.world, C)


def test_prestage_of_same_image_for_other_config_stays() -> None:
    node, pulls = at_rest(B)
    request_prestage(node.world, Target(C.config, B.image))
    node.settle()
    assert reported(node.world) == ("Done", B.image, "")
    assert pulls.count == 1


def test_prestage_failure_is_annotated_and_retried() -> None:
    missing = Target("rendered-worker-x", B.image)
    node, pulls = at_rest(missing)
    state, staged, error = reported(node.world)
    assert (state, staged, pulls.count) == ("Done", "", 0)
    assert error.startswith(f"{B.image}: ")
    assert "cannot read MachineConfig rendered-worker-x: it does not exist" in error
    assert node.world.annotations[key.REASON] == ""
    node.world.configs["rendered-worker-x"] = node.world.configs[B.config]
    node.settle()
    assert reported(node.world) == ("Done", B.image, "")


def test_prestage_over_foreign_deployment_is_rejected() -> None:
    node, _ = at_rest(C)
    foreign = node.world.staging
    assert foreign is not None
    node.world.ledger = None
    node.process = None
    request_prestage(node.world, B)
    node.settle()
    state, staged, error = reported(node.world)
    assert (state, staged) == ("Done", "")
    assert f"deployment {foreign.id} is staged, and treenail did not stage it" in error
    assert node.world.staging == foreign


def test_reboot_drops_prestaged_image_and_it_is_staged_again() -> None:
    node, pulls = at_rest(B)
    node.process = None
    node.world.reboot()
    assert node.world.staged == ""
    node.settle()
    assert reported(node.world) == ("Done", B.image, "")
    assert (node.world.staged, pulls.count) == (B.digest, 2)


@pytest.mark.parametrize("image", ["", "registry.example.com/os/node:latest"])
def test_prestage_image_without_digest_is_rejected(image: str) -> None:
    node, pulls = at_rest(Target(B.config, image))
    assert reported(node.world) == ("Done", "", "")
    assert pulls.count == 0


def test_prestage_pull_ends_when_no_longer_requested() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    request_prestage(world, B)

    def forget() -> None:
        request_prestage(world, None)
        node.process.cluster.see()

    world.on_wait = forget
    node.settle()
    assert world.staged == ""
    assert reported(world) == ("Done", "", "")


def test_prestage_pull_continues_when_it_becomes_the_target() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    pulls = Pulls(world)
    request_prestage(world, B)

    def move() -> None:
        request_prestage(world, None)
        world.request_target(B)
        node.process.cluster.see()

    world.on_wait = move
    node.settle()
    assert_at_rest(world, B)
    assert pulls.count == 1


@walk_budget.exhaustive
def test_prestage_killed_at_any_effect_still_stages_and_drops() -> None:
    def stage_and_drop(node: Node) -> None:
        world = node.world
        request_prestage(world, B)
        node.settle()
        assert reported(world) == ("Done", B.image, "")
        assert world.staged == B.digest
        request_prestage(world, None)
        node.settle()
        assert_at_rest(world, A)

    def settled_node() -> Node:
        node = Node(world_at(A))
        node.settle()
        return node

    effects: list[str] = []
    node = settled_node()
    node.world.fault_point = effects.append
    stage_and_drop(node)
    for index in walk_budget.sample(range(len(effects))):
        node = settled_node()
        left = strike(node.world, Killed, after=index)
        stage_and_drop(node)
        assert next(left, None) is None, f"effect {index} did not happen"


class ChaosAhead(Chaos):
    """The same faults, and sometimes another image to pre-stage."""

    def __init__(self, node: Node, seed: int) -> None:
        super().__init__(node, seed)
        self._choice = random.Random(seed)
        self._world = node.world

    def step(self) -> None:
        if self._choice.random() < 0.15:
            request_prestage(self._world, self._choice.choice([None, A, B, C]))
        super().step()


@walk_budget.walk
def test_walk_with_prestage_ends_at_target_with_image_staged(part: int) -> None:
    for seed in walk_budget.seeds(part):
        world = world_at(A)
        node = Node(world)
        chaos = ChaosAhead(node, seed)
        world.fault_point, world.on_wait = chaos.fault_point, chaos.on_wait
        for _ in range(40):
            chaos.step()
            node.turn()
        world.fault_point = lambda _: None
        world.on_wait = lambda: None
        world.api_up, world.loses_answers, world.request = True, 0, None
        world.unschedulable = world.annotations.get(key.LAST_APPLIED_DRAIN, "").startswith("drain-")
        target = Target("rendered-worker-a", A.image)
        request_prestage(world, B)
        for each in (C, target):
            # A quarantined target is tried again after another target.
            world.request_target(each)
            node.settle()
        assert world.violations == [], seed
        assert reported(world) == ("Done", B.image, ""), (seed, world.annotations, world.ledger)
        assert (world.staged, world.locked, world.booted) == (B.digest, True, A.digest), seed
        request_prestage(world, None)
        node.settle()
        assert_at_rest(world, A)
