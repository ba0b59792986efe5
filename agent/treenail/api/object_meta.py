"""Common parts of Kubernetes objects: metadata, owner references, conditions."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from treenail import clocks
from treenail.encoding import codec, json_values

# Kubernetes limits the whole name, not its parts (validation.IsDNS1123Subdomain).
_PART = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_NAME = re.compile(rf"{_PART}(?:\.{_PART})*")
_NAME_LIMIT = 253


def _read_timestamp(text: str) -> float:
    if (seconds := clocks.parse_rfc3339(text)) is None:
        raise json_values.Mismatch("an RFC 3339 time", text)
    return seconds


Timestamp = Annotated[float, codec.Via(_read_timestamp, clocks.format_rfc3339, wire=str)]
"""Seconds since the epoch; a time of RFC 3339 in JSON."""


@dataclass(frozen=True, slots=True)
class OwnerReference(codec.JsonObject):
    """Reference to the owner of an object."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None
    block_owner_deletion: bool | None = None


@dataclass(frozen=True, slots=True)
class ObjectMeta(codec.JsonObject, omits_defaults=True):
    """Metadata of an object; ``others`` keeps unknown fields."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    owner_references: tuple[OwnerReference, ...] = ()
    others: Annotated[codec.Json, codec.REST] = field(default_factory=dict, repr=False)

    @property
    def is_deleting(self) -> bool:
        return self.others.get("deletionTimestamp") is not None

    @property
    def created(self) -> str:
        """Creation time in RFC 3339, to order objects; empty for an object of a file."""
        return str(self.others.get("creationTimestamp") or "")


@dataclass(frozen=True, slots=True)
class Condition(codec.JsonObject):
    """One condition of an object; ``status`` is True, False or Unknown."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str = ""


StatusConditions = Annotated[tuple[Condition, ...], codec.Key("status.conditions")]


class _NameReference(codec.Shape):
    name: str


ObjectNames = Annotated[
    tuple[str, ...],
    codec.Via(
        lambda references: tuple(reference.name for reference in references),
        wire=tuple[_NameReference, ...],
    ),
]
"""Names in a list of references."""


class _DescribedObject(codec.Shape):
    metadata: ObjectMeta


def read_metadata(document: object, where: str = "") -> ObjectMeta:
    """Return the metadata of an object; raise `ConfigError`."""
    return _DescribedObject.from_json(document, where).metadata


def merge_conditions(
    present: Iterable[Condition], news: Iterable[Condition], *, now: str
) -> tuple[Condition, ...]:
    """Replace the present conditions by the new ones of the same type.

    ``now`` (RFC 3339) becomes the transition time of conditions whose status changed. Another
    reason or message alone is no transition.
    """
    merged = {condition.type: condition for condition in present}
    for condition in news:
        before = merged.get(condition.type)
        same = before is not None and before.status == condition.status
        since = before.last_transition_time if before is not None and same else now
        merged[condition.type] = Condition(
            condition.type, condition.status, condition.reason, condition.message, since
        )
    return tuple(merged.values())


def is_object_name(text: str) -> bool:
    """Return whether the text is the name of a Kubernetes object (RFC 1123 subdomain)."""
    return len(text) <= _NAME_LIMIT and _NAME.fullmatch(text) is not None
