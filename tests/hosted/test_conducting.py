"""treenail conducts the rollouts of an unchanged HyperShift, whose real upgrader does the rest.

Random pools: the upgrader and its drainer act only on nodes that treenail selected, in the order
of the pool's policy, also when treenail is killed in between. ``TREENAIL_TEST_HOSTED_POOLS`` is
the number of pools, ``TREENAIL_TEST_HOSTED_SEED`` the first seed.
"""

import random
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.hosted import conductor, programs, random_pools
from tests.hosted.clusters import HostedClusters, InPlacePool, clear_state, run_upgrader
from tests.hosted.daemons import NodeChange, NodeDaemons
from tests.mco.programs import name_seeds, read_count, split_seeds
from tests.waiting import wait_until
from treenail.api import annotations as key

pytestmark = [pytest.mark.integration, pytest.mark.limit(3600)]

LIMIT_S = 300.0
FIRST_SEED = read_count("TREENAIL_TEST_HOSTED_SEED", 1)
POOLS = read_count("TREENAIL_TEST_HOSTED_POOLS", 20)
_POOLS_OF_A_RUN = 100
_KILLS = 3


@pytest.fixture(autouse=True)
def find_upgrader() -> None:
    programs.find_program("inplace")


@pytest.fixture
def conducted(clusters: HostedClusters) -> HostedClusters:
    """Both clusters with what treenail reads beside the pools."""
    conductor.create_objects(clusters)
    return clusters


class ConductedPool:
    """A pool of a plan, and the steps of the test."""

    def __init__(self, clusters: HostedClusters, plan: random_pools.PoolPlan) -> None:
        self._clusters, self.plan = clusters, plan
        self.pool = InPlacePool(clusters, plan.name, plan.zones)

    def create(self) -> None:
        self.pool.create()
        for node, zone in self.plan.zones.items():
            self.pool.label(node, {random_pools.ZONE: zone})
        conductor.create_pool(
            self._clusters,
            self.plan.name,
            "InPlace",
            self.plan.limit,
            self.plan.spec,
            management={"inPlace": {"maxUnavailable": -1}},
            replicas=len(self.plan.zones),
        )

    def is_at_rest(self) -> bool:
        """Whether HyperShift says that all nodes have the last target."""
        return self.pool.read_machine_set().current_hash == self.plan.targets[-1]

    def step(self, daemons: NodeDaemons) -> bool:
        """Do what is due; return whether the pool is complete."""
        plan = self.plan
        nodes = [daemons.get_node(name) for name in plan.zones]
        if plan.target != plan.targets[-1]:
            wanted = plan.target in plan.bad
            is_due = (
                any(random_pools.is_failed(node, plan.target) for node in nodes)
                if wanted
                else any(node.desired == plan.target for node in nodes)
            )
            if is_due:
                plan.step += 1
                self.pool.set_target(plan.target)
            return False
        for node in nodes:
            if node.state == key.NodeState.DEGRADED:
                clear_state(self._clusters, node.name)
        return all(random_pools.is_done(node, plan.target) for node in nodes)


@pytest.mark.parametrize("seeds", split_seeds(FIRST_SEED, POOLS, _POOLS_OF_A_RUN), ids=name_seeds)
def test_random_pools_keep_the_order_of_their_policies(
    conducted: HostedClusters, tmp_path: Path, seeds: range
) -> None:
    source = random.Random(seeds.start)
    pools = [ConductedPool(conducted, plan) for plan in random_pools.make_plans(source, len(seeds))]
    with ExitStack() as exits:
        for pool in pools:
            pool.create()
        daemons = NodeDaemons(conducted)
        daemons.failing.update(*(pool.plan.bad for pool in pools))
        exits.enter_context(daemons)
        exits.enter_context(run_upgrader(conducted, tmp_path))
        treenail = exits.enter_context(conductor.run_conductor(conducted, tmp_path))
        for pool in pools:
            pool.pool.set_target(pool.plan.target)
        kills = sorted(source.randrange(len(pools)) for _ in range(_KILLS))
        left = list(pools)

        def is_complete() -> bool:
            left[:] = [pool for pool in left if not pool.step(daemons)]
            while kills and len(pools) - len(left) > kills[0]:
                kills.pop(0)
                treenail.kill()
                treenail.start()
            return not left

        try:
            wait_until(is_complete, limit_s=LIMIT_S)
            for pool in pools:
                wait_until(pool.is_at_rest, limit_s=LIMIT_S)
        finally:
            sys.stdout.write(treenail.read_log()[-20_000:])
    changes: dict[str, list[NodeChange]] = defaultdict(list)
    for change in daemons.changes:
        changes[change.after.name.partition("-")[0]].append(change)
    problems = []
    for pool in pools:
        problems += random_pools.find_problems(pool.plan, changes[pool.plan.name])
        problems += random_pools.find_repeated(pool.plan, daemons.applied)
    selections = daemons.list_selections()
    by_treenail = [each for each in selections if each.after.desired_by == conductor.FIELD_MANAGER]
    sys.stdout.write(
        f"{len(pools)} pools, {sum(len(pool.plan.zones) for pool in pools)} nodes, "
        f"{len(by_treenail)} selections by treenail, {len(selections) - len(by_treenail)} moved "
        f"by HyperShift while updating, {_KILLS - len(kills)} times killed\n"
    )
    assert problems == []
