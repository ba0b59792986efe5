"""How far a careful rollout got: waves, soak times, failures.

The record is all that can't be read from the nodes. It is kept on the pool, so that another
controller goes on where this one stopped.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from treenail.api.decode import Fields, Json, load_json
from treenail.controllers.rollout.estimate import words
from treenail.controllers.rollout.nodes import NodeFacts, Target
from treenail.controllers.rollout.policy import Policy, Wave

STATE = "treenail.io/rollout-state"
"""Annotation of a pool: the record, written by the rollout controller alone."""

FORGIVEN_AT_MOST = 500
GRACE_S = 60.0
"""How long an agent that was degraded may take to answer to a new target."""

_REASON_LIMIT = 400


@dataclass(frozen=True, slots=True)
class Failure:
    """A node that the rollout harmed, as far as can be told."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Record:
    """One rollout of one target."""

    target: Target
    wave: int = 0
    """How many waves are complete."""
    settled_at: float | None = None
    """Since when all nodes of the current wave run well; None while they do not."""
    halted: Failure | None = None
    """The first failure, when it stopped the rollout."""
    resumed: str = ""
    """The last word of a person that was obeyed."""
    forgiven: tuple[str, ...] = ()
    """Nodes whose failure that person has seen."""

    @classmethod
    def from_text(cls, text: str) -> "Record":
        """The record in an annotation; raises `ConfigError`."""
        fields = Fields.of(load_json(text, where=f"annotation {STATE}"), "")
        halted = fields.nested("halted")
        settled = fields.optional_integer("settledAt")
        return cls(
            target=Target(fields.text("config"), fields.optional_text("image")),
            wave=fields.optional_integer("wave") or 0,
            settled_at=None if settled is None else float(settled),
            halted=Failure(halted.text("node"), halted.text("reason")) if halted.values else None,
            resumed=fields.text("resumed"),
            forgiven=fields.texts("forgiven"),
        )

    def to_text(self) -> str:
        """What `from_text` reads."""
        document: Json = {"config": self.target.config}
        if self.target.image is not None:
            document["image"] = self.target.image
        if self.wave:
            document["wave"] = self.wave
        if self.settled_at is not None:
            document["settledAt"] = int(self.settled_at)
        if self.halted is not None:
            document["halted"] = {"node": self.halted.node, "reason": self.halted.reason}
        if self.resumed:
            document["resumed"] = self.resumed
        if self.forgiven:
            document["forgiven"] = list(self.forgiven)
        return json.dumps(document, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Room:
    """Where the current wave ends."""

    members: int
    """Nodes of the pool that may be in it."""
    size: int
    """How many of them it takes."""
    taken: int
    """How many of them were given the target."""

    @property
    def left(self) -> int:
        return self.size - self.taken


def advance(
    record: Record | None,
    policy: Policy,
    nodes: Sequence[NodeFacts],
    target: Target,
    *,
    now: float,
    resume: str = "",
) -> Record:
    """The record after a look at the nodes.

    Another target is another rollout. ``resume`` is the word of a person: one that was not there
    before ends a halt and forgives the failures there are.
    """
    if record is None or record.target != target:
        record = Record(target, resumed=resume)
    failed = failures(nodes, target, policy, now=now)
    if resume != record.resumed:
        forgiven = tuple(failure.node for failure in failed)[:FORGIVEN_AT_MOST]
        record = replace(record, halted=None, resumed=resume, forgiven=forgiven)
    new = [failure for failure in failed if failure.node not in record.forgiven]
    too_many = policy.max_failures is not None and len(new) > policy.max_failures
    if too_many and record.halted is None:
        record = replace(record, halted=new[0])
    if record.halted is not None:
        return record
    names = {failure.node for failure in failed}
    while record.wave < len(policy.waves):
        wave = policy.waves[record.wave]
        if not _settled(wave, nodes, target, names):
            return replace(record, settled_at=None)
        if record.settled_at is None:
            record = replace(record, settled_at=now)
        if now < soaked_at(record, policy):
            return record
        record = replace(record, wave=record.wave + 1, settled_at=None)
    return record


def room(record: Record, policy: Policy, nodes: Sequence[NodeFacts], target: Target) -> Room:
    """How many more nodes may be given the target before the wave has proved itself."""
    if record.wave >= len(policy.waves):
        taken = sum(node.asked_for(target) for node in nodes)
        return Room(len(nodes), len(nodes), taken)
    return _room(policy.waves[record.wave], nodes, target)


def soaked_at(record: Record, policy: Policy) -> float:
    """When the wave that runs well has done so for long enough."""
    wave = policy.waves[record.wave]
    return (record.settled_at or 0.0) + wave.soak_s


def failures(
    nodes: Iterable[NodeFacts], target: Target, policy: Policy, *, now: float
) -> tuple[Failure, ...]:
    """The nodes that fail on the target, the one that was given it first before the others."""
    found = sorted(
        (node.started_at or 0.0, node.name, reason)
        for node in nodes
        if (reason := _why(node, policy, now, target))
    )
    return tuple(Failure(name, reason) for _at, name, reason in found)


def members(wave: Wave, nodes: Iterable[NodeFacts]) -> list[NodeFacts]:
    """The nodes that may be in the wave."""
    selector = wave.selector
    return [node for node in nodes if selector is None or selector.matches(node.labels)]


def next_look_s(
    record: Record, policy: Policy, nodes: Iterable[NodeFacts], target: Target, *, now: float
) -> float | None:
    """When the mere passing of time makes a failure of a node or completes a wave; None if never.

    Only what is still to come counts: a failure that is seen already changes nothing by waiting.
    """
    times = [
        at
        for node in nodes
        if node.asked_for(target) and (at := _fails_at(node, policy)) is not None and at > now
    ]
    if record.settled_at is not None and record.wave < len(policy.waves):
        times.append(soaked_at(record, policy))
    return max(0.0, min(times) - now) if times else None


def _why(node: NodeFacts, policy: Policy, now: float, target: Target) -> str:
    """Why the node counts as failed on the target; empty when it does not."""
    if not node.asked_for(target):
        if node.stage != target or not node.staging_error:
            return ""
        return f"staging: {node.staging_error}"[:_REASON_LIMIT]
    at = _fails_at(node, policy)
    if at is None or now < at:
        return ""
    if node.degraded:
        return (node.reason or f"it is {node.state} and does not say why")[:_REASON_LIMIT]
    gone_s = now - _gone_since(node)
    allowed_s = policy.reboot_timeout_s or 0.0
    return f"it has not been ready for {words(gone_s)}, {words(allowed_s)} are allowed"


def _fails_at(node: NodeFacts, policy: Policy) -> float | None:
    """From when on the node's present state is a failure, None when it is none."""
    started = node.started_at or 0.0
    if node.degraded:
        # Until the agent has looked at its new target, it still says how the one before went.
        return started + GRACE_S if node.was_degraded else started
    if node.healthy or policy.reboot_timeout_s is None or node.started_at is None:
        return None
    return _gone_since(node) + policy.reboot_timeout_s


def _gone_since(node: NodeFacts) -> float:
    return max(node.started_at or 0.0, node.ready_changed_at or 0.0)


def _room(wave: Wave, nodes: Sequence[NodeFacts], target: Target) -> Room:
    inside = members(wave, nodes)
    size = min(wave.share.of(len(nodes)), len(inside))
    return Room(len(inside), size, sum(node.asked_for(target) for node in inside))


def _settled(wave: Wave, nodes: Sequence[NodeFacts], target: Target, failed: set[str]) -> bool:
    space = _room(wave, nodes, target)
    if space.left > 0 or (space.members == 0 and len(nodes) > 0):
        return False
    return all(
        (node.has(target) and node.healthy) or node.name in failed
        for node in nodes
        if node.asked_for(target)
    )
