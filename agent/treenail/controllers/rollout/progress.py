"""How far a careful rollout got: waves, soak times, failures.

The record is all that can't be read from the nodes. It is kept on the pool, so that another
controller goes on where this one stopped.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from treenail.api.decode import Fields, Json, load_json
from treenail.controllers.rollout.estimate import format_duration
from treenail.controllers.rollout.nodes import NodeFacts, RolloutTarget
from treenail.controllers.rollout.policy import RolloutPolicy, Wave

ROLLOUT_STATE = "treenail.io/rollout-state"
"""Annotation of a pool: the record, written by the rollout controller alone."""

MAX_ACKNOWLEDGED = 500
GRACE_S = 60.0
"""How long an agent that was degraded may take to answer to a new target."""

_REASON_LIMIT = 400


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """A node that the rollout harmed, as far as can be told."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One rollout of one target."""

    target: RolloutTarget
    wave: int = 0
    """How many waves are complete."""
    settled_at: float | None = None
    """Since when all nodes of the current wave run well; None while they do not."""
    halted_by: NodeFailure | None = None
    """The first failure, when it stopped the rollout."""
    resume_value: str = ""
    """The last word of a person that was obeyed."""
    acknowledged: tuple[str, ...] = ()
    """Nodes whose failure that person has seen."""

    @classmethod
    def from_text(cls, text: str) -> "RolloutRecord":
        """The record in an annotation; raises `ConfigError`."""
        fields = Fields.from_json(load_json(text, where=f"annotation {ROLLOUT_STATE}"), "")
        halted = fields.get_object("halted")
        settled = fields.get_optional_integer("settledAt")
        return cls(
            target=RolloutTarget(fields.get_text("config"), fields.get_optional_text("image")),
            wave=fields.get_optional_integer("wave") or 0,
            settled_at=None if settled is None else float(settled),
            halted_by=NodeFailure(halted.get_text("node"), halted.get_text("reason"))
            if halted.values
            else None,
            resume_value=fields.get_text("resumed"),
            acknowledged=fields.get_text_list("forgiven"),
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
        if self.halted_by is not None:
            document["halted"] = {"node": self.halted_by.node, "reason": self.halted_by.reason}
        if self.resume_value:
            document["resumed"] = self.resume_value
        if self.acknowledged:
            document["forgiven"] = list(self.acknowledged)
        return json.dumps(document, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class WaveCapacity:
    """Where the current wave ends."""

    member_count: int
    """Nodes of the pool that may be in it."""
    size: int
    """How many of them it takes."""
    assigned: int
    """How many of them were given the target."""

    @property
    def remaining(self) -> int:
        return self.size - self.assigned


def advance_record(
    record: RolloutRecord | None,
    policy: RolloutPolicy,
    nodes: Sequence[NodeFacts],
    target: RolloutTarget,
    *,
    now: float,
    resume_value: str = "",
) -> RolloutRecord:
    """The record after a look at the nodes.

    Another target is another rollout. ``resume_value`` is the word of a person: one that was not there
    before ends a halt and forgives the failures there are.
    """
    if record is None or record.target != target:
        record = RolloutRecord(target, resume_value=resume_value)
    failed = find_failures(nodes, target, policy, now=now)
    if resume_value != record.resume_value:
        forgiven = tuple(failure.node for failure in failed)[:MAX_ACKNOWLEDGED]
        record = replace(record, halted_by=None, resume_value=resume_value, acknowledged=forgiven)
    new = [failure for failure in failed if failure.node not in record.acknowledged]
    too_many = policy.max_failures is not None and len(new) > policy.max_failures
    if too_many and record.halted_by is None:
        record = replace(record, halted_by=new[0])
    if record.halted_by is not None:
        return record
    names = {failure.node for failure in failed}
    while record.wave < len(policy.waves):
        wave = policy.waves[record.wave]
        if not _is_settled(wave, nodes, target, names):
            return replace(record, settled_at=None)
        if record.settled_at is None:
            record = replace(record, settled_at=now)
        if now < compute_soak_end(record, policy):
            return record
        record = replace(record, wave=record.wave + 1, settled_at=None)
    return record


def compute_wave_capacity(
    record: RolloutRecord, policy: RolloutPolicy, nodes: Sequence[NodeFacts], target: RolloutTarget
) -> WaveCapacity:
    """How many more nodes may be given the target before the wave has proved itself."""
    if record.wave >= len(policy.waves):
        taken = sum(node.is_assigned(target) for node in nodes)
        return WaveCapacity(len(nodes), len(nodes), taken)
    return _compute_capacity(policy.waves[record.wave], nodes, target)


def compute_soak_end(record: RolloutRecord, policy: RolloutPolicy) -> float:
    """When the wave that runs well has done so for long enough."""
    wave = policy.waves[record.wave]
    return (record.settled_at or 0.0) + wave.soak_s


def find_failures(
    nodes: Iterable[NodeFacts], target: RolloutTarget, policy: RolloutPolicy, *, now: float
) -> tuple[NodeFailure, ...]:
    """The nodes that fail on the target, the one that was given it first before the others."""
    found = sorted(
        (node.started_at or 0.0, node.name, reason)
        for node in nodes
        if (reason := _describe_failure(node, policy, now, target))
    )
    return tuple(NodeFailure(name, reason) for _at, name, reason in found)


def find_wave_members(wave: Wave, nodes: Iterable[NodeFacts]) -> list[NodeFacts]:
    """The nodes that may be in the wave."""
    selector = wave.selector
    return [node for node in nodes if selector is None or selector.matches(node.labels)]


def compute_next_check_s(
    record: RolloutRecord,
    policy: RolloutPolicy,
    nodes: Iterable[NodeFacts],
    target: RolloutTarget,
    *,
    now: float,
) -> float | None:
    """When the mere passing of time makes a failure of a node or completes a wave; None if never.

    Only what is still to come counts: a failure that is seen already changes nothing by waiting.
    """
    times = [
        at
        for node in nodes
        if node.is_assigned(target)
        and (at := _compute_failure_time(node, policy)) is not None
        and at > now
    ]
    if record.settled_at is not None and record.wave < len(policy.waves):
        times.append(compute_soak_end(record, policy))
    return max(0.0, min(times) - now) if times else None


def _describe_failure(
    node: NodeFacts, policy: RolloutPolicy, now: float, target: RolloutTarget
) -> str:
    """Why the node counts as failed on the target; empty when it does not."""
    if not node.is_assigned(target):
        if node.prestage_target != target or not node.prestage_error:
            return ""
        return f"staging: {node.prestage_error}"[:_REASON_LIMIT]
    at = _compute_failure_time(node, policy)
    if at is None or now < at:
        return ""
    if node.is_degraded:
        return (node.reason or f"it is {node.state} and does not say why")[:_REASON_LIMIT]
    gone_s = now - _find_unready_since(node)
    allowed_s = policy.reboot_timeout_s or 0.0
    return f"it has not been ready for {format_duration(gone_s)}, {format_duration(allowed_s)} are allowed"


def _compute_failure_time(node: NodeFacts, policy: RolloutPolicy) -> float | None:
    """From when on the node's present state is a failure, None when it is none."""
    started = node.started_at or 0.0
    if node.is_degraded:
        # Until the agent has looked at its new target, it still says how the one before went.
        return started + GRACE_S if node.was_degraded else started
    if node.is_healthy or policy.reboot_timeout_s is None or node.started_at is None:
        return None
    return _find_unready_since(node) + policy.reboot_timeout_s


def _find_unready_since(node: NodeFacts) -> float:
    return max(node.started_at or 0.0, node.ready_changed_at or 0.0)


def _compute_capacity(
    wave: Wave, nodes: Sequence[NodeFacts], target: RolloutTarget
) -> WaveCapacity:
    inside = find_wave_members(wave, nodes)
    size = min(wave.share.compute_count(len(nodes)), len(inside))
    return WaveCapacity(len(inside), size, sum(node.is_assigned(target) for node in inside))


def _is_settled(
    wave: Wave, nodes: Sequence[NodeFacts], target: RolloutTarget, failed: set[str]
) -> bool:
    space = _compute_capacity(wave, nodes, target)
    if space.remaining > 0 or (space.member_count == 0 and len(nodes) > 0):
        return False
    return all(
        (node.is_updated_to(target) and node.is_healthy) or node.name in failed
        for node in nodes
        if node.is_assigned(target)
    )
