"""A node as the rollout sees it, and what may be said of it.

The predicates are those of the Machine Config Operator, with two deliberate differences.
A node that is Degraded by an image under an unchanged config is *failing* here. There it only
counts as unavailable, keeps the pool's capacity for itself and can never be given the image that
would heal it. A node that was never asked for anything is available: there its first boot gave it
a config, here a pool may be made for nodes that have none yet, and they would wait for ever.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from treenail.api import annotations as key
from treenail.api.annotations import NodeState
from treenail.api.decode import Fields
from treenail.api.meta import Condition, ObjectMeta

ZONE_LABEL = "topology.kubernetes.io/zone"
STARTED_AT = "treenail.io/rollout-started-at"
"""When the node was given its target, RFC 3339; written with the target."""
WAS_DEGRADED = "treenail.io/rollout-was-degraded"
"""Whether the node was degraded when it was given its target; written with the target."""
LOCKED_BY = "treenail.io/fleet-lock"
"""Which lock server lets the node be out of service; written with the target, gone afterwards."""

_DEGRADED_STATES = (NodeState.DEGRADED, NodeState.UNRECONCILABLE)


@dataclass(frozen=True, slots=True)
class RolloutTarget:
    """What the nodes of a pool should have.

    ``image`` None means the image that the config itself names; an empty one is asked for but not
    there yet, so that no node can have it.
    """

    config: str
    image: str | None = None


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One look at a node of a pool; an empty config or state was never written."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    created_at: str = ""
    """RFC 3339, as the API server writes it: such times sort as text."""
    is_healthy: bool = True
    """The node is ready and under no pressure that matters."""
    ready_changed_at: float | None = None
    """When its Ready condition last changed, in seconds since the epoch."""
    unschedulable: bool = False
    current_config: str = ""
    desired_config: str = ""
    current_image: str | None = None
    desired_image: str | None = None
    """None when the node has no such annotation: it runs the image its config names."""
    state: str = ""
    reason: str = ""
    started_at: float | None = None
    prestage_target: RolloutTarget | None = None
    """What the node is asked to stage ahead."""
    prestaged_image: str = ""
    """The image that it staged ahead."""
    prestage_error: str = ""
    """Why it could not stage what it is asked to stage now."""
    was_degraded: bool = False
    """It was degraded when it was given its target, and may still say so of the one before."""
    locked_by: str = ""
    uid: str = field(default="", compare=False)
    resource_version: str = field(default="", compare=False)
    """What a write is conditional on; another version alone is no other node."""

    @classmethod
    def from_json(cls, document: object, *, image_key: str = key.DESIRED_OS_IMAGE) -> "NodeFacts":
        """The facts in a Node; ``image_key`` is the annotation that asks for an image.

        Raises `ConfigError`.
        """
        fields = Fields.from_json(document, "Node")
        meta = ObjectMeta.from_fields(fields.get_object("metadata"))
        found = meta.annotations
        conditions = fields.get_object("status").map_objects("conditions", Condition.from_fields)
        changed = [at.last_transition_time for at in conditions if at.type == "Ready"]
        created = meta.others.get("creationTimestamp")
        return cls(
            name=meta.name,
            labels=meta.labels,
            created_at=created if isinstance(created, str) else "",
            is_healthy=all(map(_is_healthy, conditions)),
            ready_changed_at=parse_time(changed[0]) if changed else None,
            unschedulable=fields.get_object("spec").get_bool("unschedulable"),
            current_config=found.get(key.CURRENT_CONFIG, ""),
            desired_config=found.get(key.DESIRED_CONFIG, ""),
            current_image=found.get(key.IMAGE_SPELLINGS[image_key]),
            desired_image=found.get(image_key),
            state=found.get(key.STATE, ""),
            reason=found.get(key.REASON, ""),
            started_at=parse_time(found.get(STARTED_AT, "")),
            prestage_target=_parse_prestage_target(found),
            prestaged_image=found.get(key.PRESTAGED, ""),
            prestage_error=_parse_prestage_error(found),
            was_degraded=WAS_DEGRADED in found,
            locked_by=found.get(LOCKED_BY, ""),
            uid=meta.uid,
            resource_version=meta.resource_version,
        )

    @property
    def zone(self) -> str:
        """Empty when nobody said."""
        return self.labels.get(ZONE_LABEL, "")

    @property
    def is_in_service(self) -> bool:
        return self.is_healthy and not self.unschedulable

    @property
    def is_managed(self) -> bool:
        """An agent has reported from this node."""
        return self.current_config != ""

    @property
    def has_desired_image(self) -> bool:
        if self.current_image is None and self.desired_image is None:
            return True
        return bool(self.desired_image) and self.current_image == self.desired_image

    @property
    def is_done(self) -> bool:
        """The node has what it is asked to have, and says so."""
        return (
            self.current_config != ""
            and self.current_config == self.desired_config
            and self.has_desired_image
            and self.state == NodeState.DONE
        )

    @property
    def is_degraded(self) -> bool:
        return self.desired_config != "" and self.state in _DEGRADED_STATES

    @property
    def is_failing(self) -> bool:
        """The node can't get what it is asked to have."""
        behind = self.current_config != self.desired_config or not self.has_desired_image
        return behind and self.is_degraded

    @property
    def is_unassigned(self) -> bool:
        """Nobody ever asked the node for anything: it serves, and waits for its first target."""
        return self.current_config == "" and self.desired_config == ""

    @property
    def is_unavailable(self) -> bool:
        """The node counts against ``maxUnavailable``."""
        return not self.is_in_service or not (self.is_done or self.is_failing or self.is_unassigned)

    def is_assigned(self, target: RolloutTarget) -> bool:
        """The node is asked to have the target already."""
        if target.image is None:
            return self.desired_config == target.config and self.desired_image is None
        return (
            target.image != ""
            and self.desired_image == target.image
            and self.desired_config == target.config
        )

    def is_updated_to(self, target: RolloutTarget) -> bool:
        return self.is_done and self.is_assigned(target)

    def with_target(self, target: RolloutTarget, now: float) -> "NodeFacts":
        """The node as it is once the target is written; for what a cache does not show yet."""
        return replace(
            self,
            desired_config=target.config,
            desired_image=target.image,
            started_at=now,
            prestage_target=None,
            was_degraded=self.is_degraded,
        )


def overlay_written(
    nodes: Iterable[NodeFacts], written: Mapping[str, tuple[RolloutTarget, float]]
) -> tuple[NodeFacts, ...]:
    """The nodes with the targets that were ``written`` (and when), whether seen yet or not.

    A cache lags behind what was written. Deciding on it alone would give out the same capacity
    twice.
    """
    found = []
    for node in nodes:
        target, at = written.get(node.name, (None, 0.0))
        unseen = target is not None and not node.is_assigned(target)
        found.append(node.with_target(target, at) if target is not None and unseen else node)
    return tuple(found)


def parse_time(text: str) -> float | None:
    """The moment of an RFC 3339 time in seconds since the epoch, None when it is none."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment.timestamp() if moment.tzinfo else None


def _parse_prestage_target(annotations: Mapping[str, str]) -> RolloutTarget | None:
    image = annotations.get(key.PRESTAGE_IMAGE, "")
    return RolloutTarget(annotations.get(key.PRESTAGE_CONFIG, ""), image) if image else None


def _parse_prestage_error(annotations: Mapping[str, str]) -> str:
    """Empty for what it says of an image that it was asked for before."""
    image, colon, reason = annotations.get(key.PRESTAGE_ERROR, "").partition(": ")
    return reason if colon and image == annotations.get(key.PRESTAGE_IMAGE) else ""


def _is_healthy(condition: Condition) -> bool:
    match condition.type:
        case "Ready":
            return condition.status == "True"
        case "DiskPressure" | "NetworkUnavailable":
            return condition.status == "False"
        case _:
            return True
