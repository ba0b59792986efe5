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
from treenail.api.moment import moment
from treenail.clock import rfc3339
from treenail.errors import ConfigError

_DRAIN = "drain-"
_UNCORDON = "uncordon-"


class Cordoner(StrEnum):
    """Who made the node unschedulable."""

    US = "drain-controller"
    OTHER = "other"
    """Somebody, before the drain was asked for: theirs to take back."""


@dataclass(frozen=True, slots=True)
class Record:
    """A drain that has begun."""

    request: str
    """The ``desiredDrain`` that asked for it."""
    began: float
    """In seconds since the epoch, whole ones."""
    cordoner: Cordoner

    @classmethod
    def from_text(cls, text: str) -> "Record":
        """The record in an annotation; raises `ConfigError`."""
        fields = Fields.of(load_json(text, where=f"annotation {key.DRAIN}"), "")
        began = moment(fields.required_text("began"))
        if began is None:
            raise fields.refuse("began", "an RFC 3339 time")
        try:
            cordoner = Cordoner(fields.text("cordonedBy"))
        except ValueError as error:
            raise fields.refuse("cordonedBy", f"one of {', '.join(Cordoner)}") from error
        return cls(fields.required_text("request"), began, cordoner)

    def to_text(self) -> str:
        """What `from_text` reads."""
        return json.dumps(
            {
                "request": self.request,
                "began": rfc3339(self.began),
                "cordonedBy": str(self.cordoner),
            }
        )


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """One look at a Node, as far as draining is concerned."""

    name: str
    asked: str = ""
    applied: str = ""
    unschedulable: bool = False
    record: Record | None = None
    blocked: str = ""
    """The annotation that names what is in the way."""
    resource_version: str = field(default="", compare=False)
    """What a write is conditional on; another version alone is no other node."""

    @classmethod
    def from_json(cls, document: object) -> "NodeSeen":
        """The Node in an API object; raises `ConfigError`, but not for a spoilt record."""
        fields = Fields.of(document, "Node")
        meta = ObjectMeta.from_fields(fields.nested("metadata"))
        return cls(
            name=meta.name,
            asked=meta.annotations.get(key.DESIRED_DRAIN, ""),
            applied=meta.annotations.get(key.LAST_APPLIED_DRAIN, ""),
            unschedulable=fields.nested("spec").flag("unschedulable"),
            record=_record(meta.annotations.get(key.DRAIN)),
            blocked=meta.annotations.get(key.DRAIN_BLOCKED, ""),
            resource_version=meta.resource_version,
        )


@dataclass(frozen=True, slots=True)
class Rest:
    """Nothing to do. ``stale`` when what is in the way of a drain is still named."""

    stale: bool = False


@dataclass(frozen=True, slots=True)
class Disown:
    """Somebody lifted our cordon after the drain: keep this record, by which the next is theirs."""

    record: Record


@dataclass(frozen=True, slots=True)
class Refuse:
    """Nobody knows what is asked for."""

    request: str


@dataclass(frozen=True, slots=True)
class Cordon:
    """Cordon the node and write the record; ``again`` when somebody uncordoned it meanwhile."""

    record: Record
    again: bool = False


@dataclass(frozen=True, slots=True)
class Empty:
    """Evict what is left on the cordoned node, then acknowledge."""

    record: Record


@dataclass(frozen=True, slots=True)
class Uncordon:
    """Acknowledge; ``lift`` the cordon unless it is somebody else's or there is none."""

    request: str
    lift: bool


Decision = Rest | Disown | Refuse | Cordon | Empty | Uncordon


def decide(node: NodeSeen, now: float) -> Decision:
    """The next step for a node."""
    record = node.record
    if not node.asked or node.asked == node.applied:
        if record is not None and record.cordoner is Cordoner.US and not node.unschedulable:
            return Disown(replace(record, cordoner=Cordoner.OTHER))
        return Rest(stale=node.blocked != "")
    if node.asked.startswith(_UNCORDON):
        return Uncordon(node.asked, lift=node.unschedulable and not _is_anothers(node))
    if not node.asked.startswith(_DRAIN):
        return Refuse(node.asked)
    if record is None or record.request != node.asked:
        cordoner = Cordoner.OTHER if _is_anothers(node) else Cordoner.US
        return Cordon(Record(node.asked, float(int(now)), cordoner))
    if not node.unschedulable:
        # Whoever takes their cordon back during a drain does not want it any more afterwards.
        return Cordon(replace(record, cordoner=Cordoner.US), again=True)
    return Empty(record)


def _is_anothers(node: NodeSeen) -> bool:
    """The node is cordoned, and not by this protocol."""
    if not node.unschedulable:
        return False
    if node.record is not None:
        return node.record.cordoner is Cordoner.OTHER
    # Without a record, a drain that was acknowledged was another drain controller's.
    return not node.applied.startswith(_DRAIN)


def _record(text: str | None) -> Record | None:
    if text is None:
        return None
    try:
        return Record.from_text(text)
    except ConfigError:
        return None
