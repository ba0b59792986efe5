"""What a Node asks the drain controller for, to what is to be done next: start reading here.

The agent writes ``desiredDrain``: ``drain-…`` or ``uncordon-…``, and whatever follows the dash is
its own business. When it is so, the controller copies the whole text to ``lastAppliedDrain``. All
that has to be remembered in between is in the record, which is an annotation of the Node and is
written together with the cordon.
"""

import json
from dataclasses import dataclass, field, replace
from enum import StrEnum

from treenail.api import annotations as key
from treenail.api.decode import Fields, load_json
from treenail.api.meta import ObjectMeta
from treenail.clock import format_rfc3339, parse_rfc3339
from treenail.errors import ConfigError

_DRAIN_PREFIX = "drain-"
_UNCORDON_PREFIX = "uncordon-"


class CordonOwner(StrEnum):
    """Who made the node unschedulable."""

    DRAIN_CONTROLLER = "drain-controller"
    OTHER = "other"
    """Somebody, before the drain was asked for: theirs to take back."""


@dataclass(frozen=True, slots=True)
class DrainRecord:
    """A drain that has begun."""

    request: str
    """The ``desiredDrain`` that asked for it."""
    began_at: float
    """In seconds since the epoch, whole ones."""
    cordon_owner: CordonOwner

    @classmethod
    def from_text(cls, text: str) -> "DrainRecord":
        """The record in an annotation; raises `ConfigError`."""
        fields = Fields.from_json(load_json(text, where=f"annotation {key.DRAIN}"), "")
        began = parse_rfc3339(fields.get_required_text("began"))
        if began is None:
            raise fields.make_error("began", "an RFC 3339 time")
        try:
            cordoner = CordonOwner(fields.get_text("cordonedBy"))
        except ValueError as error:
            raise fields.make_error("cordonedBy", f"one of {', '.join(CordonOwner)}") from error
        return cls(fields.get_required_text("request"), began, cordoner)

    def to_text(self) -> str:
        """What `from_text` reads."""
        return json.dumps(
            {
                "request": self.request,
                "began": format_rfc3339(self.began_at),
                "cordonedBy": str(self.cordon_owner),
            }
        )


@dataclass(frozen=True, slots=True)
class DrainNode:
    """One look at a Node, as far as draining is concerned."""

    name: str
    desired_drain: str = ""
    last_applied_drain: str = ""
    unschedulable: bool = False
    record: DrainRecord | None = None
    drain_blocked: str = ""
    """The annotation that names what is in the way."""
    resource_version: str = field(default="", compare=False)
    """What a write is conditional on; another version alone is no other node."""

    @classmethod
    def from_json(cls, document: object) -> "DrainNode":
        """The Node in an API object; raises `ConfigError`, but not for a spoilt record."""
        fields = Fields.from_json(document, "Node")
        meta = ObjectMeta.from_fields(fields.get_object("metadata"))
        return cls(
            name=meta.name,
            desired_drain=meta.annotations.get(key.DESIRED_DRAIN, ""),
            last_applied_drain=meta.annotations.get(key.LAST_APPLIED_DRAIN, ""),
            unschedulable=fields.get_object("spec").get_bool("unschedulable"),
            record=_parse_record(meta.annotations.get(key.DRAIN)),
            drain_blocked=meta.annotations.get(key.DRAIN_BLOCKED, ""),
            resource_version=meta.resource_version,
        )


@dataclass(frozen=True, slots=True)
class IdleDecision:
    """Nothing to do. ``has_stale_blockers`` when what is in the way of a drain is still named."""

    has_stale_blockers: bool = False


@dataclass(frozen=True, slots=True)
class DisownCordonDecision:
    """Somebody lifted our cordon after the drain: keep this record, by which the next is theirs."""

    record: DrainRecord


@dataclass(frozen=True, slots=True)
class RejectDecision:
    """Nobody knows what is asked for."""

    request: str


@dataclass(frozen=True, slots=True)
class CordonDecision:
    """Cordon the node and write the record; ``is_repeated`` when somebody uncordoned it meanwhile."""

    record: DrainRecord
    is_repeated: bool = False


@dataclass(frozen=True, slots=True)
class EvictDecision:
    """Evict what is left on the cordoned node, then acknowledge."""

    record: DrainRecord


@dataclass(frozen=True, slots=True)
class UncordonDecision:
    """Acknowledge; ``should_uncordon`` the cordon unless it is somebody else's or there is none."""

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
    """The next step for a node."""
    record = node.record
    if not node.desired_drain or node.desired_drain == node.last_applied_drain:
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
        cordoner = (
            CordonOwner.OTHER if _is_cordoned_by_other(node) else CordonOwner.DRAIN_CONTROLLER
        )
        return CordonDecision(DrainRecord(node.desired_drain, float(int(now)), cordoner))
    if not node.unschedulable:
        # Whoever takes their cordon back during a drain does not want it any more afterwards.
        return CordonDecision(
            replace(record, cordon_owner=CordonOwner.DRAIN_CONTROLLER), is_repeated=True
        )
    return EvictDecision(record)


def _is_cordoned_by_other(node: DrainNode) -> bool:
    """The node is cordoned, and not by this protocol."""
    if not node.unschedulable:
        return False
    if node.record is not None:
        return node.record.cordon_owner is CordonOwner.OTHER
    # Without a record, a drain that was acknowledged was another drain controller's.
    return not node.last_applied_drain.startswith(_DRAIN_PREFIX)


def _parse_record(text: str | None) -> DrainRecord | None:
    if text is None:
        return None
    try:
        return DrainRecord.from_text(text)
    except ConfigError:
        return None
