"""Random pools: limits, one write for each target at most, and kills between writes."""

import random

import pytest

from tests.controllers.hosted.in_place.world import HASHES, OwnWorld, Watcher


def run_pool(seed: int, *, can_kill: bool) -> tuple[OwnWorld, Watcher]:
    """Update a random pool, with new, bad and refreshed targets on the way."""
    choice = random.Random(seed)
    size, limit = choice.randint(1, 5), choice.randint(1, 3)
    world = OwnWorld(size, seed)
    world.set_limit(limit)
    if choice.random() < 0.5:
        world.services = {f"m{number}" for number in range(size) if choice.random() < 0.5}
        for number in range(size):
            world.set_service(f"m{number}", "boot-1" if f"m{number}" in world.services else None)
    world.sync()
    targets = HASHES[: choice.randint(1, 4)]
    # A refresh of up to ten nodes may come last, when all have the config before.
    refresh = choice.random() < 0.4
    watcher = Watcher(world, limit, can_kill=can_kill)
    world.bad.update(target for target in targets[:-1] if choice.random() < 0.4)
    for target in targets[:-1]:
        world.set_config(target)
        world.turn(choice.randint(1, 12))
    world.set_config(targets[-1])
    world.run(targets[-1], 250)
    if refresh:
        watcher.limit = 10
        world.set_config(HASHES[4], rolls=False)
        world.run(HASHES[4], 250)
    world.turn(3)
    return world, watcher


def check_pools(seeds: range) -> int:
    kills = 0
    for seed in seeds:
        plain, _ = run_pool(seed, can_kill=False)
        killed, watcher = run_pool(seed, can_kill=True)
        kills += watcher.kills
        for world in (plain, killed):
            assert world.list_left() == [], seed
            assert world.conditions()["Updated"]["status"] == "True", seed
            assert world.record()["rollout"]["completedAt"], seed
        assert {node.current_config for node in plain.nodes().values()} == {
            node.current_config for node in killed.nodes().values()
        }
    return kills


def test_random_pools_obey_the_limit_also_when_killed() -> None:
    assert check_pools(range(25)) > 30


@pytest.mark.long
def test_thousand_random_pools_obey_the_limit_also_when_killed() -> None:
    assert check_pools(range(25, 1025)) > 500
