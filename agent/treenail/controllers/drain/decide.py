"""Decide the next step of a drain request. Start reading here.

The agent writes ``desiredDrain`` with the value ``drain-…`` or ``uncordon-…``. The text after the
dash is opaque, as in the Machine Config Operator (drain_controller.go). When the request is done,
the controller copies the value to ``lastAppliedDrain``. All state in between is in the drain
record, an annotation of the Node that is written together with the cordon.
"""

import json
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import decode, object_meta
from treenail.controllers.pools import node_facts
from treenail.encoding import codec

_DRAIN_PREFIX = "drain-"
_UNCORDON_PREFIX = "uncordon-"


@dataclass(frozen=True, slots=True)
class DrainKeys:
    """Annotations of a Node: the agent's request, and the last one that was applied."""

    request: str = key.DESIRED_DRAIN
    applied: str = key.LAST_APPLIED_DRAIN


USUAL_KEYS = DrainKeys()


class CordonOwner(StrEnum):
    """Owner of the cordon on a node."""

    DRAIN_CONTROLLER = "drain-controller"
    OTHER = "other"
    """A user or another program, before the drain request. Only they may uncordon it."""


@dataclass(frozen=True, slots=True)
class DrainRecord(codec.JsonObject):
    """Record of a drain that has begun."""

    request: codec.NonEmptyText
    """The value of ``desiredDrain``."""
    began_at: Annotated[object_meta.Timestamp, codec.Key("began")]
    """Whole seconds since the epoch."""
    cordon_owner: Annotated[CordonOwner, codec.Key("cordonedBy")]

    @classmethod
    def from_text(cls, text: str) -> "DrainRecord":
        """Parse the annotation; raises `ConfigError`."""
        return cls.from_json(decode.load_json(text, where=f"annotation {key.DRAIN}"))

    def to_text(self) -> str:
        """Format the record for the annotation."""
        return json.dumps(self.to_json())


@dataclass(frozen=True, slots=True)
class DrainNode:
    """Facts about a Node that a drain needs."""

    name: str
    desired_drain: str = ""
    last_applied_drain: str = ""
    unschedulable: bool = False
    record: DrainRecord | None = None
    drain_blocked: str = ""
    """The annotation with the reported blockers."""
    uid: str = field(default="", compare=False)
    resource_version: str = field(default="", compare=False)
    """Condition of every write; excluded from comparisons."""
    is_unreachable: bool = False
    """The kubelet no longer reports, so that no pod of the node can end."""

    @classmethod
    def from_json(cls, document: object, drain_keys: DrainKeys = USUAL_KEYS) -> "DrainNode":
        """Parse a Node; raises `ConfigError`. An invalid record counts as none."""
        fields = decode.Fields.from_json(document, "Node")
        meta = fields.get_object("metadata").read(object_meta.ObjectMeta)
        annotations = node_facts.read_annotations(meta)
        conditions = fields.get_object("status").read_list("conditions", object_meta.Condition)
        return cls(
            name=meta.name,
            desired_drain=annotations.get(drain_keys.request, ""),
            last_applied_drain=annotations.get(drain_keys.applied, ""),
            unschedulable=fields.get_object("spec").get_bool("unschedulable"),
            record=_parse_record(annotations.get(key.DRAIN)),
            drain_blocked=annotations.get(key.DRAIN_BLOCKED, ""),
            is_unreachable=("Ready", "Unknown") in {(at.type, at.status) for at in conditions},
            uid=meta.uid,
            resource_version=meta.resource_version,
        )


@dataclass(frozen=True, slots=True)
class IdleDecision:
    """Do nothing, except remove stale blockers from the Node."""

    has_stale_blockers: bool = False


@dataclass(frozen=True, slots=True)
class DisownCordonDecision:
    """Write this record: a user uncordoned after the drain, so the next cordon is theirs."""

    record: DrainRecord


@dataclass(frozen=True, slots=True)
class RejectDecision:
    """Reject an unknown request."""

    request: str


@dataclass(frozen=True, slots=True)
class CordonDecision:
    """Cordon the node and write the record; ``is_repeated`` after an uncordon during the drain."""

    record: DrainRecord
    is_repeated: bool = False


@dataclass(frozen=True, slots=True)
class EvictDecision:
    """Evict the remaining pods from the cordoned node, then acknowledge the request."""

    record: DrainRecord


@dataclass(frozen=True, slots=True)
class UncordonDecision:
    """Acknowledge the request; ``should_uncordon`` is False for the cordon of a user."""

    request: str
    should_uncordon: bool


DrainDecision = (
    IdleDecision
    | DisownCordonDecision
    | RejectDecision
    | CordonDecision
    | EvictDecision
    | UncordonDecision
)


def decide_drain(node: DrainNode, now: float) -> DrainDecision:
    """Decide the next step for a node."""
    record = node.record
    # An acknowledged uncordon removes the record. With one, a drain began after it and was
    # cancelled with the same request.
    is_applied = node.desired_drain == node.last_applied_drain and not (
        is_uncordoned(node) and record is not None
    )
    if not node.desired_drain or is_applied:
        if (
            record is not None
            and record.cordon_owner is CordonOwner.DRAIN_CONTROLLER
            and not node.unschedulable
        ):
            return DisownCordonDecision(replace(record, cordon_owner=CordonOwner.OTHER))
        return IdleDecision(has_stale_blockers=node.drain_blocked != "")
    if node.desired_drain.startswith(_UNCORDON_PREFIX):
        return UncordonDecision(
            node.desired_drain,
            should_uncordon=node.unschedulable and not _is_cordoned_by_other(node),
        )
    if not node.desired_drain.startswith(_DRAIN_PREFIX):
        return RejectDecision(node.desired_drain)
    if record is None or record.request != node.desired_drain:
        cordon_owner = (
            CordonOwner.OTHER if _is_cordoned_by_other(node) else CordonOwner.DRAIN_CONTROLLER
        )
        return CordonDecision(DrainRecord(node.desired_drain, float(int(now)), cordon_owner))
    if not node.unschedulable:
        # A user who uncordons during a drain gives up their earlier cordon too.
        return CordonDecision(
            replace(record, cordon_owner=CordonOwner.DRAIN_CONTROLLER), is_repeated=True
        )
    return EvictDecision(record)


def is_uncordoned(node: DrainNode) -> bool:
    """Return whether the last request of the agent was an uncordon, and is acknowledged."""
    request = node.desired_drain
    return request.startswith(_UNCORDON_PREFIX) and request == node.last_applied_drain


def format_outage(began_at: float, ended_at: float) -> str:
    """Format the time out of service for the annotation, as an interval of ISO 8601."""
    return f"{clocks.format_rfc3339(began_at)}/{clocks.format_rfc3339(max(began_at, ended_at))}"


def _is_cordoned_by_other(node: DrainNode) -> bool:
    """True when a user or another program cordoned the node before the request."""
    if not node.unschedulable:
        return False
    if node.record is not None:
        return node.record.cordon_owner is CordonOwner.OTHER
    # Without a record, an acknowledged drain was that of another controller, such as the MCO's.
    return not node.last_applied_drain.startswith(_DRAIN_PREFIX)


def _parse_record(text: str | None) -> DrainRecord | None:
    if text is None:
        return None
    try:
        return DrainRecord.from_text(text)
    except errors.ConfigError:
        return None
