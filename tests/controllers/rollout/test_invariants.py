"""Invariants of decisions in walks of random events.

Targets change, and some are bad; nodes come and go; writes or their responses are lost; the cache
lags; the controller restarts between any two writes.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.controllers.rollout.builders import decide_rollout, image, pool, proceed
from tests.controllers.rollout.simulation import Simulation, all_have
from treenail.controllers.pools.node_facts import NodeFacts, RolloutTarget, overlay_written
from treenail.controllers.pools.pool_status import PoolStatusInput, compute_status
from treenail.controllers.pools.rollout_record import RolloutRecord

NAMES = [f"n{number}" for number in range(8)]
TARGETS = [
    image("a", "1"),
    image("a", "2"),
    image("b", "2"),
    RolloutTarget("c"),
    RolloutTarget("d"),
]
BAD = {TARGETS[1], TARGETS[3]}
POLICIES: list[Any] = [
    None,
    {"canary": {}, "soak": "5m"},
    {"canary": {}, "waves": ["50%"], "maxFailures": 1, "rebootTimeout": "20m", "order": "spread"},
]

EVENTS = {
    "target": 2, "wait": 12, "away": 2, "back": 3, "lose": 2, "lag": 2, "catch up": 2,
    "restart": 1, "resume": 1,
}  # fmt: skip
WAITS_S = [1, 30, 200, 500, 600, 4000]


def events(seed: int) -> Iterator[tuple[str, int]]:
    """A hundred random events; the same ones for the same seed."""
    chance = random.Random(seed)
    for event in chance.choices(list(EVENTS), weights=list(EVENTS.values()), k=100):
        choices = {"target": range(len(TARGETS)), "wait": WAITS_S}.get(event, range(len(NAMES)))
        yield event, chance.choice(choices)


def annotations(facts: NodeFacts) -> tuple[str | None, ...]:
    """The annotations that must be unchanged for a write to succeed."""
    return (
        facts.current_config,
        facts.desired_config,
        facts.current_image,
        facts.desired_image,
        facts.state,
    )


class Walk(Simulation):
    """A controller with a cache that may lag and writes that may be lost."""

    def __init__(self, policy: Any, limit: int) -> None:
        super().__init__(NAMES)
        self.bad = BAD
        self.policy = policy
        self.limit = limit
        self.target = TARGETS[0]
        self.resume_value = ""
        self.kept: str | None = None
        self.frozen: dict[str, NodeFacts] | None = None
        self.written: dict[str, tuple[RolloutTarget, float]] = {}
        self.lost = False

    def seen(self) -> tuple[NodeFacts, ...]:
        """The nodes from the cache, with later writes applied."""
        cache = self.nodes if self.frozen is None else self.frozen
        if self.frozen is None:
            self.written.clear()
        # Health is never stale here: no decision makes a node unreachable.
        now = {
            name: replace(
                each,
                is_healthy=self.nodes[name].is_healthy,
                ready_changed_at=self.nodes[name].ready_changed_at,
            )
            for name, each in cache.items()
        }
        return overlay_written(now.values(), self.written)

    def step(self) -> None:
        policy = self.policy
        if policy is not None and self.resume_value:
            policy = {**policy, "resume": {"worker": self.resume_value}}
        found = pool(policy, maxUnavailable=self.limit)
        seen = self.seen()
        record = None if self.kept is None else RolloutRecord.from_json(self.kept)
        turn = decide_rollout(found, seen, proceed(self.target), record, now=self.now)
        if turn.record is not None:
            self.kept = turn.record.to_json()
        before = self.out_of_service()
        by_name = {each.name: each for each in seen}
        for name in turn.nodes_to_assign:
            if annotations(by_name[name]) != annotations(self.nodes[name]):
                continue  # the write is conditional, so it fails
            if self.lost:
                self.lost = False
                continue
            self.give(name, self.target)
            self.written[name] = (self.target, self.now)
        after = self.out_of_service()
        assert after <= max(self.limit, before), "more out of service than allowed"
        if self.policy is None and not turn.nodes_to_assign:
            self.could_not(seen)
        status = compute_status(
            PoolStatusInput(
                found, self.target, seen, waiting_reason=turn.waiting_reason, problem=turn.problem
            ),
            now="2026-01-01T00:00:00Z",
        )
        conditions = {each.type: each for each in status.conditions}
        assert conditions["Degraded"].status == "False" or conditions["Degraded"].message
        assert status.counts.total == len(NAMES)

    def could_not(self, seen: tuple[NodeFacts, ...]) -> None:
        """Check that no node could have been assigned."""
        free = self.limit - sum(
            each.is_unavailable or (each.is_failing and each.is_assigned(self.target))
            for each in seen
        )
        able = [each for each in seen if each.is_in_service and not each.is_assigned(self.target)]
        assert free <= 0 or not able, "there was capacity and a candidate"

    def happen(self, event: str, number: int) -> None:
        match event:
            case "target":
                self.target = TARGETS[number]
            case "wait":
                self.pass_time(float(number))
            case "away" | "back":
                self.flap(NAMES[number], healthy=event == "back")
            case "lose":
                self.lost = True
            case "lag":
                self.frozen = dict(self.nodes)
            case "catch up":
                self.frozen = None
            case "restart":
                # A new process lists first and has no memory.
                self.frozen = None
                self.written.clear()
            case "resume":
                self.resume_value += "x"


@pytest.mark.parametrize("seed", range(60))
def test_random_walk_keeps_max_unavailable_and_ends_updated(seed: int) -> None:
    walk = Walk(POLICIES[seed % len(POLICIES)], 1 + seed % 4)
    walk.stays_cordoned = seed % 5 > 1
    walk.step()
    for event, number in events(seed):
        walk.happen(event, number)
        walk.step()
    # At the end all nodes are ready, the target is good, and the user resumed.
    walk.frozen = None
    walk.target = TARGETS[4]
    walk.resume_value += "x"
    for name in NAMES:
        walk.flap(name, healthy=True)
    for _ in range(600):
        walk.step()
        if all_have(walk, walk.target):
            break
        walk.pass_time(100.0)
    assert all_have(walk, walk.target)


@pytest.mark.parametrize("seed", range(60))
def test_bad_target_reaches_only_the_canary_in_random_walk(seed: int) -> None:
    walk = Walk({"canary": {}, "soak": "5m"}, 3)
    walk.step()
    for event, number in events(seed):
        if event == "resume":
            continue
        walk.happen(event, number)
        walk.step()
        for bad in BAD:
            broken = [
                name
                for name, each in walk.nodes.items()
                if each.is_assigned(bad) and each.is_failing
            ]
            assert len(broken) <= 1
