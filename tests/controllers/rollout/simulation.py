"""A pool of nodes in virtual time: agents take a while, fail on bad targets, become unreachable."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from tests.controllers.rollout.builders import OLD, decide_rollout, node, proceed
from treenail.api.decode import Json
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.pools.node_facts import NodeFacts, RolloutTarget
from treenail.controllers.pools.rollout_record import RolloutRecord
from treenail.controllers.rollout.decide import RolloutDecision

REACTION_S = 1.0


class Simulation:
    """Nodes with agents, and a controller whose only memory is the record on the pool."""

    def __init__(self, names: Sequence[str], *, takes_s: float = 480.0, now: float = 0.0) -> None:
        self.nodes: dict[str, NodeFacts] = {name: node(name) for name in names}
        self.now = now
        self.takes_s = takes_s
        self.bad: Collection[RolloutTarget] = ()
        self.stays_cordoned = True
        self.ever_given: dict[RolloutTarget, set[str]] = {}
        self.given_at: dict[str, float] = {}
        self.most_unavailable = 0
        self.turns: list[RolloutDecision] = []
        self._record: Json | None = None

    def turn(self, pool: MachineConfigPool, target: RolloutTarget) -> RolloutDecision:
        """Decide and apply the assignments."""
        record = None if self._record is None else RolloutRecord.from_json(self._record)
        found = decide_rollout(
            pool, tuple(self.nodes.values()), proceed(target), record, now=self.now
        )
        self._record = None if found.record is None else found.record.to_json()
        for name in found.nodes_to_assign:
            self.give(name, target)
        self.turns.append(found)
        self.most_unavailable = max(self.most_unavailable, self.out_of_service())
        return found

    def out_of_service(self) -> int:
        """Count nodes out of service, or soon to be, without the code under test."""
        return sum(
            not each.is_healthy or each.unschedulable or self._at_work(each)
            for each in self.nodes.values()
        )

    def _at_work(self, each: NodeFacts) -> bool:
        wanted = (each.desired_config, each.desired_image)
        behind = (each.current_config, each.current_image) != wanted
        answered = self.now - self.given_at.get(each.name, 0.0) >= REACTION_S
        return behind and not (each.state == "Degraded" and answered)

    def give(self, name: str, target: RolloutTarget) -> None:
        self.nodes[name] = self.nodes[name].with_target(target, self.now)
        self.given_at[name] = self.now
        self.ever_given.setdefault(target, set()).add(name)

    def pass_time(self, seconds: float) -> None:
        """Let every agent continue. Each reacts after a second and finishes after a while."""
        self.now += seconds
        for name, each in self.nodes.items():
            self.nodes[name] = self._later(each)

    def run(
        self, pool: MachineConfigPool, target: RolloutTarget, *, until: float, step_s: float = 60.0
    ) -> RolloutDecision:
        """Reconcile until that time, or until every node is updated."""
        found = self.turn(pool, target)
        while self.now < until and not all(
            each.is_updated_to(target) for each in self.nodes.values()
        ):
            wait_s = step_s if found.requeue_after_s is None else min(step_s, found.requeue_after_s)
            self.pass_time(max(wait_s, REACTION_S))
            found = self.turn(pool, target)
        return found

    def flap(self, name: str, *, healthy: bool) -> None:
        self.nodes[name] = replace(self.nodes[name], is_healthy=healthy, ready_changed_at=self.now)

    def _later(self, each: NodeFacts) -> NodeFacts:
        target = RolloutTarget(each.desired_config, each.desired_image)
        given_at = self.given_at.get(each.name)
        if given_at is None or (each.is_done and not each.unschedulable):
            return each
        since_s = self.now - given_at
        if since_s < REACTION_S:
            return each
        if since_s < self.takes_s:
            return replace(each, state="Working", reason="", unschedulable=True)
        if target in self.bad:
            return replace(
                each,
                state="Degraded",
                reason="the image does not boot",
                unschedulable=self.stays_cordoned,
            )
        back_at = given_at + self.takes_s
        return replace(
            each,
            state="Done",
            current_config=target.config,
            current_image=target.image,
            unschedulable=False,
            ready_changed_at=max(back_at, each.ready_changed_at or 0.0),
        )


def fleet(count: int) -> Simulation:
    return Simulation([f"n{number:03}" for number in range(count)])


def all_have(simulation: Simulation, target: RolloutTarget = OLD) -> bool:
    return all(each.is_updated_to(target) for each in simulation.nodes.values())
