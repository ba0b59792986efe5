"""An image that is staged while the node serves, before it is asked to move there."""

import random

import pytest

from tests.daemon.nodes import Node, assert_at_rest
from tests.daemon.reconcile.test_walks import WALKS, Chaos, recorded, world_at
from tests.fakes.world import Killed, World
from tests.update.build import A, B, C
from treenail.api import annotations as key
from treenail.update.state.record import Target


def ask_ahead(world: World, target: Target | None) -> None:
    """As the rollout controller does."""
    for name in (key.PRESTAGE_CONFIG, key.PRESTAGE_IMAGE):
        world.annotations.pop(name, None)
    if target is not None:
        world.annotations[key.PRESTAGE_CONFIG] = target.config
        world.annotations[key.PRESTAGE_IMAGE] = target.image


def said(world: World) -> tuple[str, str, str]:
    """The state, what is staged ahead and why nothing is."""
    notes = world.annotations
    return notes[key.STATE], notes.get(key.PRESTAGED, ""), notes.get(key.PRESTAGE_ERROR, "")


class Pulls:
    """A fate that counts how often an image is pulled."""

    def __init__(self, world: World) -> None:
        self.count = 0
        world.fate = self

    def __call__(self, step: str) -> None:
        self.count += step == "stage begins"


def at_rest(ahead: Target | None = None) -> tuple[Node, Pulls]:
    world = world_at(A)
    node = Node(world)
    node.settle()
    pulls = Pulls(world)
    ask_ahead(world, ahead)
    node.settle()
    return node, pulls


def test_node_stages_ahead_in_service_and_says_so() -> None:
    node, pulls = at_rest(B)
    world = node.world
    assert said(world) == ("Done", B.image, "")
    assert (world.staged, world.locked, world.booted) == (B.digest, True, A.digest)
    assert (world.unschedulable, pulls.count) == (False, 1)
    assert recorded(world).update is None
    assert key.DESIRED_DRAIN not in world.annotations


def test_node_that_has_staged_ahead_asks_for_nothing_more() -> None:
    node, pulls = at_rest(B)
    writes = len(node.world.writes)
    node.settle()
    assert (len(node.world.writes), pulls.count) == (writes, 1)


def test_update_to_it_pulls_nothing() -> None:
    node, pulls = at_rest(B)
    ask_ahead(node.world, None)
    node.world.ask_for(B)
    node.settle()
    assert_at_rest(node.world, B)
    assert said(node.world) == ("Done", "", "")
    assert pulls.count == 1
    assert recorded(node.world).prestaged is None


def test_what_is_not_asked_for_any_more_is_dropped() -> None:
    node, _ = at_rest(B)
    ask_ahead(node.world, None)
    node.settle()
    assert_at_rest(node.world, A)
    assert said(node.world) == ("Done", "", "")


def test_another_image_takes_its_place() -> None:
    node, pulls = at_rest(B)
    ask_ahead(node.world, C)
    node.settle()
    assert said(node.world) == ("Done", C.image, "")
    assert (node.world.staged, pulls.count) == (C.digest, 2)


def test_update_to_another_image_drops_it_first() -> None:
    node, _ = at_rest(B)
    node.world.ask_for(C)
    ask_ahead(node.world, None)
    node.settle()
    assert_at_rest(node.world, C)


def test_same_image_of_another_config_stays() -> None:
    node, pulls = at_rest(B)
    ask_ahead(node.world, Target(C.config, B.image))
    node.settle()
    assert said(node.world) == ("Done", B.image, "")
    assert pulls.count == 1


def test_failure_is_told_beside_the_state_and_tried_again() -> None:
    missing = Target("rendered-worker-x", B.image)
    node, pulls = at_rest(missing)
    state, staged, error = said(node.world)
    assert (state, staged, pulls.count) == ("Done", "", 0)
    assert error.startswith(f"{B.image}: ")
    assert "MachineConfig rendered-worker-x does not exist" in error
    assert node.world.annotations[key.REASON] == ""
    node.world.configs["rendered-worker-x"] = node.world.configs[B.config]
    node.settle()
    assert said(node.world) == ("Done", B.image, "")


def test_foreign_deployment_is_named_and_left_alone() -> None:
    node, _ = at_rest(C)
    foreign = node.world.staging
    assert foreign is not None
    node.world.ledger = None
    node.process = None
    ask_ahead(node.world, B)
    node.settle()
    state, staged, error = said(node.world)
    assert (state, staged) == ("Done", "")
    assert f"deployment {foreign.id} is staged on this machine, and not by treenail" in error
    assert node.world.staging == foreign


def test_reboot_takes_it_away_and_it_is_staged_again() -> None:
    node, pulls = at_rest(B)
    node.process = None
    node.world.reboot()
    assert node.world.staged == ""
    node.settle()
    assert said(node.world) == ("Done", B.image, "")
    assert (node.world.staged, pulls.count) == (B.digest, 2)


@pytest.mark.parametrize("image", ["", "registry.example.com/os/node:latest"])
def test_what_is_no_image_by_digest_is_not_staged(image: str) -> None:
    node, pulls = at_rest(Target(B.config, image))
    assert said(node.world) == ("Done", "", "")
    assert pulls.count == 0


def test_pull_ends_when_it_is_not_asked_for_any_more() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    ask_ahead(world, B)

    def forget() -> None:
        ask_ahead(world, None)
        assert node.process is not None
        node.process.cluster.see()

    world.meanwhile = forget
    node.settle()
    assert world.staged == ""
    assert said(world) == ("Done", "", "")


def test_pull_goes_on_when_the_node_is_asked_to_move_there() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    pulls = Pulls(world)
    ask_ahead(world, B)

    def move() -> None:
        ask_ahead(world, None)
        world.ask_for(B)
        assert node.process is not None
        node.process.cluster.see()

    world.meanwhile = move
    node.settle()
    assert_at_rest(world, B)
    assert pulls.count == 1


def test_process_killed_at_any_effect_stages_and_drops_all_the_same() -> None:
    killed = 0
    while True:
        world = world_at(A)
        node = Node(world)
        node.settle()
        left = killed

        def fate(_step: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed

        world.fate = fate
        ask_ahead(world, B)
        node.settle()
        assert said(world) == ("Done", B.image, ""), killed
        assert world.staged == B.digest
        ask_ahead(world, None)
        node.settle()
        assert_at_rest(world, A)
        if left > 0:
            return
        killed += 1


class ChaosAhead(Chaos):
    """The same misfortunes, and now and then another image that is to be staged ahead."""

    def __init__(self, node: Node, seed: int) -> None:
        super().__init__(node, seed)
        self._choice = random.Random(seed)
        self._world = node.world

    def step(self) -> None:
        if self._choice.random() < 0.15:
            ask_ahead(self._world, self._choice.choice([None, A, B, C]))
        super().step()


@pytest.mark.limit(300.0)
@pytest.mark.parametrize("start", range(0, WALKS // 2, 100))
def test_every_walk_ends_at_the_target_with_what_is_asked_ahead_at_hand(start: int) -> None:
    for seed in range(start, start + 100):
        world = world_at(A)
        node = Node(world)
        chaos = ChaosAhead(node, seed)
        world.fate, world.meanwhile = chaos.fate, chaos.meanwhile
        for _ in range(40):
            chaos.step()
            node.turn()
        world.fate = lambda _: None
        world.meanwhile = lambda: None
        world.api_up, world.loses_answers, world.request = True, 0, None
        world.unschedulable = world.annotations.get(key.LAST_APPLIED_DRAIN, "").startswith("drain-")
        target = Target("rendered-worker-a", A.image)
        ask_ahead(world, B)
        for each in (C, target):
            # One that was refused is tried again once another one was asked for.
            world.ask_for(each)
            node.settle()
        assert world.violations == [], seed
        assert said(world) == ("Done", B.image, ""), (seed, world.annotations, world.ledger)
        assert (world.staged, world.locked, world.booted) == (B.digest, True, A.digest), seed
        ask_ahead(world, None)
        node.settle()
        assert_at_rest(world, A)
