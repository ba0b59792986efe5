"""treenail conducts Replace pools: it deletes Machines, and the real Cluster API replaces them.

Random pools of one hosted cluster, while treenail is killed in between. Its log names the Machines
that it deletes.
"""

import random
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

from tests.fixtures import hosted
from tests.fixtures.controllers import CLOCK
from tests.fixtures.objects import Json
from tests.hosted import capi, conductor, programs, random_pools
from tests.hosted.clusters import HostedClusters
from tests.mco.programs import name_seeds, read_count, split_seeds
from tests.waiting import wait_until
from treenail.kube.informer import Informer
from treenail.kube.resources import MACHINES
from treenail.kube.watch import WatchScope

# In the lab CAPI gets no further than the deletion of the first Machine.
pytestmark = [
    pytest.mark.integration,
    pytest.mark.limit(3600),
    pytest.mark.parametrize("servers", ["real"], indirect=True),
]

LIMIT_S = 600.0
FIRST_SEED = read_count("TREENAIL_TEST_HOSTED_SEED", 1)
POOLS = read_count("TREENAIL_TEST_HOSTED_POOLS", 20)
_POOLS_OF_A_RUN = 50
_KILLS = 3


@dataclass(frozen=True, slots=True)
class MachineState:
    """The fields of a Machine that the test follows."""

    name: str
    pool: str
    secret: str
    is_deleting: bool
    is_healthy: bool

    @classmethod
    def from_json(cls, document: Json) -> Self:
        metadata, status = document["metadata"], document.get("status") or {}
        conditions = {each["type"]: each["status"] for each in status.get("conditions") or []}
        return cls(
            metadata["name"],
            metadata["labels"].get(capi.DEPLOYMENT_NAME, ""),
            document["spec"]["bootstrap"]["dataSecretName"],
            "deletionTimestamp" in metadata,
            bool(status.get("nodeRef")) and conditions.get("NodeHealthy") == "True",
        )


@dataclass(frozen=True, slots=True)
class MachineChange:
    name: str
    after: MachineState | None


def find_problems(
    plan: random_pools.PoolPlan, changes: Iterable[MachineChange], deleted: Collection[str]
) -> list[str]:
    """Return what treenail's deletions did against the policy of a pool; ``deleted`` names them.

    Cluster API deletes Machines, too: while the status of a MachineSet lags, a new template drops
    the replicas that the status does not count yet.
    """
    machines: dict[str, MachineState] = {}
    problems = []
    total, started = len(plan.zones), False
    for change in changes:
        before, after = machines.get(change.name), change.after
        is_new = before is not None and after is not None and after.is_deleting > before.is_deleting
        if is_new and change.name in deleted:
            assert before is not None
            present = [each for each in machines.values() if not each.is_deleting]
            secret = f"user-data-{plan.name}-{plan.targets[-1]}"
            where = f"{plan.name} {plan.spec} limit {plan.limit}: {change.name}"
            if before.secret == secret:
                problems.append(f"{where} has the last template")
            busy = total - sum(each.is_healthy for each in present)
            if before.is_healthy and busy >= plan.limit:
                problems.append(f"{where}: {busy} of {total} are out of service")
            newest = [
                each
                for each in present
                if each.secret != f"user-data-{plan.name}-{hosted.OLD_HASH}"
            ]
            done = sum(each.is_healthy for each in newest)
            assigned = total - (len(present) - len(newest)) + 1
            bounds = [bound for bound in plan.compute_bounds() if bound < assigned]
            if len(plan.targets) == 1 and bounds and done < bounds[-1]:
                problems.append(f"{where}: number {assigned}, {done} of {bounds[-1]} are done")
            started = True
        if after is None:
            machines.pop(change.name, None)
        else:
            machines[change.name] = after
    left = {each.secret for each in machines.values()}
    if left != {f"user-data-{plan.name}-{plan.targets[-1]}"} or len(machines) != total:
        problems.append(f"{plan.name}: {len(machines)} machines of {left}")
    return problems if started else [*problems, f"{plan.name}: nothing was deleted"]


@pytest.fixture(autouse=True)
def find_manager() -> None:
    programs.CAPI_MANAGER.read()
    programs.TREE.read()


class ConductedPool:
    """A pool of a plan, and the steps of the test."""

    def __init__(self, clusters: HostedClusters, plan: random_pools.PoolPlan) -> None:
        self._clusters, self.plan = clusters, plan
        self.pool = capi.ReplacePool(clusters, plan.name, len(plan.zones))

    def create(self) -> None:
        self.pool.create()
        conductor.create_pool(
            self._clusters,
            self.plan.name,
            "Replace",
            self.plan.limit,
            self.plan.spec,
            management={"replace": {"strategy": "OnDelete"}},
            replicas=len(self.plan.zones),
        )

    def count_at(self, value: str, machines: Iterable[MachineState]) -> int:
        secret = f"user-data-{self.plan.name}-{value}"
        return sum(
            each.secret == secret and each.is_healthy and not each.is_deleting
            for each in machines
            if each.pool == self.plan.name
        )

    def step(self, machines: list[MachineState]) -> bool:
        """Do what is due; return whether the pool is complete."""
        plan = self.plan
        mine = [each for each in machines if each.pool == plan.name]
        if plan.target != plan.targets[-1]:
            if self.count_at(plan.target, mine):
                plan.step += 1
                self.pool.set_target(plan.target)
            return False
        return self.count_at(plan.target, mine) == len(mine) == len(plan.zones)


@pytest.mark.parametrize("seeds", split_seeds(FIRST_SEED, POOLS, _POOLS_OF_A_RUN), ids=name_seeds)
def test_random_pools_are_replaced_in_the_order_of_their_policies(
    servers: HostedClusters, tmp_path: Path, seeds: range
) -> None:
    capi.install_kinds(servers)
    capi.create_cluster(servers)
    conductor.create_objects(servers)
    source = random.Random(seeds.start)
    pools = [ConductedPool(servers, plan) for plan in random_pools.make_plans(source, len(seeds))]
    changes: dict[str, list[MachineChange]] = defaultdict(list)

    def note_change(_: str, before: MachineState | None, after: MachineState | None) -> None:
        known = after or before
        assert known is not None
        changes[known.pool].append(MachineChange(known.name, after))

    scope = WatchScope(MACHINES, namespace=hosted.CONTROL_PLANE)
    watch = Informer(servers.management, scope, CLOCK, MachineState.from_json)
    watch.add_handler(note_change)
    with ExitStack() as exits:
        watch.start()
        exits.callback(watch.stop)
        provider = exits.enter_context(capi.MachineProvider(servers))
        manager = exits.enter_context(capi.run_manager(servers, tmp_path))
        treenail = exits.enter_context(conductor.run_conductor(servers, tmp_path))

        def list_machines() -> list[MachineState]:
            return list(watch.get_all().values())

        def write_logs() -> None:
            for process in (manager, treenail):
                sys.stdout.write(process.read_log()[-10_000:])

        exits.callback(write_logs)
        for pool in pools:
            pool.create()
        for pool in pools:
            wait_until(
                lambda pool=pool: (
                    pool.count_at(hosted.OLD_HASH, list_machines()) == len(pool.plan.zones)
                ),
                limit_s=LIMIT_S,
            )
        for pool in pools:
            pool.pool.set_target(pool.plan.target)
        kills = sorted(source.randrange(len(pools)) for _ in range(_KILLS))
        left = list(pools)

        def is_complete() -> bool:
            machines = list_machines()
            left[:] = [pool for pool in left if not pool.step(machines)]
            while kills and len(pools) - len(left) > kills[0]:
                kills.pop(0)
                treenail.kill()
                treenail.start()
            return not left

        wait_until(is_complete, limit_s=LIMIT_S)
    deleted = set(re.findall(r"assigned \S+ to node (\S+) of pool", treenail.read_log()))
    problems = [
        problem
        for pool in pools
        for problem in find_problems(pool.plan, changes[pool.plan.name], deleted)
    ]
    assert problems == []
    sys.stdout.write(
        f"{len(pools)} pools, {len(provider.created)} machines, {len(provider.deleted)} deleted, "
        f"{_KILLS - len(kills)} times killed\n"
    )
