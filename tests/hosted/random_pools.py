"""Random InPlace pools with policies, and the check that a rollout kept the order of its policy."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from tests.fixtures.objects import Json
from tests.hosted import conductor
from tests.hosted.daemons import UPGRADER, NodeChange, NodeState
from treenail.api import annotations as key

ZONE = "topology.kubernetes.io/zone"
_ZONES = ("a", "b", "c")
_MAX_NODES = 5


@dataclass(slots=True)
class PoolPlan:
    """A pool, its policy, and what happens during its rollout."""

    name: str
    zones: Mapping[str, str]
    """By node."""
    limit: int
    spec: Json
    """Of its RolloutPolicy."""
    targets: tuple[str, ...]
    """In their order; each but the last is replaced before it is complete."""
    bad: frozenset[str]
    """Targets that no node can apply."""
    step: int = field(default=0)

    @property
    def target(self) -> str:
        return self.targets[self.step]

    def compute_bounds(self) -> list[int]:
        """Return the numbers of updated nodes at which a wave ends, without the last one."""
        total = len(self.zones)
        canary = self.spec.get("canary")
        shares = [*([canary["nodes"]] if canary else []), *self.spec.get("waves", [])]
        return [_count_share(share, total) for share in shares]


def _count_share(share: int | str, total: int) -> int:
    if isinstance(share, int):
        return min(total, share)
    return max(1, total * int(share.removesuffix("%")) // 100)


def make_plans(random: Random, count: int) -> list[PoolPlan]:
    """Make pools with the names ``p1``, ``p2`` and so on; their nodes are ``p1-a`` and so on."""
    return [_make_plan(random, f"p{number}") for number in range(1, count + 1)]


def _make_plan(random: Random, name: str) -> PoolPlan:
    nodes = [f"{name}-{letter}" for letter in "abcde"[: random.randint(1, _MAX_NODES)]]
    spec: Json = {"order": random.choice(["spread", "zones"]), "maxFailures": 0}
    if random.random() < 0.6:
        spec["canary"] = {"nodes": 1}
    if random.random() < 0.6:
        waves: list[list[int | str]] = [[2], [2, 3], [3, 4], ["50%"], ["20%", "60%"]]
        spec["waves"] = random.choice(waves)
    good, other = f"{random.getrandbits(32):08x}", f"{random.getrandbits(32):08x}"
    match random.random():
        case value if value < 0.25:
            targets, bad = (other, good), frozenset({other})
        case value if value < 0.5:
            targets, bad = (other, good), frozenset[str]()
        case _:
            targets, bad = (good,), frozenset[str]()
    zones = {node: random.choice(_ZONES) for node in nodes}
    return PoolPlan(name, zones, random.randint(1, 3), spec, targets, bad)


@dataclass(slots=True)
class _Replay:
    """The nodes of a pool after each change."""

    plan: PoolPlan
    nodes: dict[str, NodeState]
    problems: list[str] = field(default_factory=list)

    def count_done(self, target: str) -> int:
        return sum(is_done(node, target) for node in self.nodes.values())

    def check_selection(self, change: NodeChange) -> None:
        """Check a write of an idle node's desiredConfig, before it is applied to ``nodes``."""
        plan, target = self.plan, change.after.desired
        where = f"{plan.name} {plan.spec} limit {plan.limit}: {change.after.name} to {target}"
        if change.after.desired_by != conductor.FIELD_MANAGER:
            self.problems.append(f"{where}: written by {change.after.desired_by}")
        if target not in plan.targets:
            self.problems.append(f"{where}: expected one of {plan.targets}")
        busy = [
            node.name
            for node in self.nodes.values()
            if not is_idle(node) and not is_done(node, target)
        ]
        if len(busy) >= plan.limit:
            self.problems.append(f"{where}: {busy} are unavailable")
        failed = [node.name for node in self.nodes.values() if is_failed(node, target)]
        if failed:
            self.problems.append(f"{where}: {failed} failed")
        assigned = sum(node.desired == target for node in self.nodes.values()) + 1
        done = self.count_done(target)
        bounds = [bound for bound in plan.compute_bounds() if bound < assigned]
        if bounds and done < bounds[-1]:
            self.problems.append(f"{where}: number {assigned}, {done} of {bounds[-1]} are done")


def is_done(node: NodeState, target: str) -> bool:
    """Return whether HyperShift counts the node as updated.

    A daemon that reads a new ConfigMap before its desiredConfig changes never gets the new one.
    """
    return node.current == target and _is_over(node)


def is_idle(node: NodeState) -> bool:
    return node.current == node.desired and _is_over(node)


def _is_over(node: NodeState) -> bool:
    requested, applied = node.drains
    # The drainer uncordons a node first, and then reports that.
    is_in_service = requested == applied or not node.is_cordoned
    return node.state in {"", key.NodeState.DONE} and is_in_service


def is_failed(node: NodeState, target: str) -> bool:
    return node.state == key.NodeState.DEGRADED and node.desired == target


def find_problems(plan: PoolPlan, changes: Iterable[NodeChange]) -> list[str]:
    """Return what a rollout did against its policy; ``changes`` are those of the pool's nodes."""
    replay = _Replay(plan, {})
    selected: set[str] = set()
    for change in changes:
        before, after = change.before, change.after
        if before is not None and before.desired != after.desired:
            if is_idle(before) or before.current == before.desired:
                replay.check_selection(change)
                selected.add(after.name)
            elif after.desired_by != UPGRADER and after.desired != before.current:
                # HyperShift itself moves the nodes that are updating to a new target.
                replay.problems.append(f"{after.name}: {after.desired_by} moved it while updating")
        replay.nodes[after.name] = after
        was_touched = after.is_cordoned or after.state or any(after.drains)
        if was_touched and after.name not in selected:
            replay.problems.append(f"{after.name} changed without a selection: {after}")
    return replay.problems


def find_repeated(plan: PoolPlan, applied: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the nodes that applied a target twice, or not the last one."""
    found = {name: applied.get(name, []) for name in plan.zones}
    return [
        f"{name}: {hashes}"
        for name, hashes in found.items()
        if len(set(hashes)) != len(hashes) or [*hashes][-1:] != [plan.targets[-1]]
    ]
