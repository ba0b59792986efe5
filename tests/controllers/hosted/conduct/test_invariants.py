"""Random pools: what treenail acts on, in which order, and what a kill between writes changes."""

import random
from typing import Any

import pytest

from tests.controllers.hosted.conduct.world import NEW, HostedWorld
from tests.controllers.rollout.world import Killed

Json = dict[str, Any]
TURNS = 150


class Watcher:
    """Checks each write of treenail against the state before it, by rules of its own."""

    def __init__(self, world: HostedWorld, limit: int, canaries: int, *, can_kill: bool) -> None:
        self.world, self.limit, self.canaries = world, limit, canaries
        self.acted: list[tuple[str, str]] = []
        self.kills = 0
        for api in (world.management, world.guest):
            api.observe = self.observe
            if can_kill:
                api.before_write = api.after_write = self.kill

    def kill(self) -> None:
        if self.world.random.random() < 0.04:
            self.kills += 1
            raise Killed

    def observe(self, verb: str, plural: str, name: str, body: Json) -> None:
        if plural == "nodes":
            self.check_node(name, body)
        elif verb == "delete":
            assert plural == "machines"
            self.check_machine(name)

    def check_node(self, name: str, body: Json) -> None:
        nodes = self.world.nodes()
        [target] = body["metadata"]["annotations"].values()
        down = {
            node.name for node in nodes.values()
            if node.current_config != node.desired_config or node.unschedulable
        }  # fmt: skip
        assert len(down | {name}) <= max(self.limit, len(down))
        serving = [
            node.name for node in nodes.values()
            if node.current_config == node.desired_config == target and not node.unschedulable
        ]  # fmt: skip
        self.check_order(name, target, len(serving))

    def check_machine(self, name: str) -> None:
        objects = self.world.find_objects()
        assert objects.owner is not None
        target = objects.owner.data_secret
        staying = [machine for machine in objects.machines if not machine.is_deleting]
        [machine] = [machine for machine in staying if machine.name == name]
        assert machine.data_secret != target
        serving = {other.name for other in staying if other.node_name}
        assert self.world.size - len(serving - {name}) <= self.limit or name not in serving
        new = [other for other in staying if other.node_name and other.data_secret == target]
        self.check_order(name, target, len(new))

    def check_order(self, name: str, target: str, serving: int) -> None:
        assert (name, target) not in self.acted, "acted on twice"
        before = sum(of == target for _, of in self.acted)
        # Those that HyperShift redirected count as canaries too, and make fewer necessary.
        assert before < self.canaries or serving >= min(before, self.canaries)
        self.acted.append((name, target))


def run_pool(seed: int, *, can_kill: bool) -> tuple[HostedWorld, Watcher]:
    """Roll a random pool, with new and bad targets on the way, to the last target."""
    choice = random.Random(seed)
    kind, size = choice.choice(["InPlace", "Replace"]), choice.randint(1, 5)
    limit, canaries = choice.randint(1, 3), choice.randint(1, 2)
    world = HostedWorld(kind, size, seed)
    policy: Json = {"canary": {"nodes": canaries}, "maxFailures": 0, "rebootTimeout": "20m"}
    world.set_policy(**policy)
    world.set_pool(str(limit))
    watcher = Watcher(world, limit, canaries, can_kill=can_kill)
    world.turn()
    targets = [NEW, "2c2c2c2c", "3d3d3d3d"][: choice.randint(1, 3)]
    world.bad.update(target for target in targets[:-1] if choice.random() < 0.4)
    for target in targets[:-1]:
        world.set_target(target)
        world.turn(choice.randint(1, 8))
        world.clear_states()
    world.set_target(targets[-1])
    for turn in range(TURNS):
        world.turn()
        if turn % 5 == 0:
            world.clear_states()
        if world.is_finished(targets[-1]):
            break
    world.turn(2)
    assert world.is_finished(targets[-1]), (seed, world.conditions())
    return world, watcher


def check_pools(seeds: range) -> int:
    kills = 0
    for seed in seeds:
        plain, _ = run_pool(seed, can_kill=False)
        killed, watcher = run_pool(seed, can_kill=True)
        kills += watcher.kills
        for world in (plain, killed):
            assert world.conditions()["Updated"]["status"] == "True", seed
            assert world.record()["rollout"]["completedAt"], seed
    return kills


def test_random_pools_obey_policy_and_limit_also_when_killed() -> None:
    assert check_pools(range(60)) > 30


@pytest.mark.long
def test_thousand_random_pools_obey_policy_and_limit_also_when_killed() -> None:
    assert check_pools(range(60, 1060)) > 500
