"""Common parts of Kubernetes objects: metadata, owner references, conditions."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from treenail.api import decode

# Kubernetes limits the whole name, not its parts (validation.IsDNS1123Subdomain).
_PART = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_NAME = re.compile(rf"{_PART}(?:\.{_PART})*")
_NAME_LIMIT = 253


@dataclass(frozen=True, slots=True)
class OwnerReference:
    """Reference to the owner of an object."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None
    block_owner_deletion: bool | None = None

    @classmethod
    def from_fields(cls, fields: decode.Fields) -> "OwnerReference":
        return cls(
            api_version=fields.get_text("apiVersion"),
            kind=fields.get_text("kind"),
            name=fields.get_text("name"),
            uid=fields.get_text("uid"),
            controller=fields.get_optional_bool("controller"),
            block_owner_deletion=fields.get_optional_bool("blockOwnerDeletion"),
        )

    def to_json(self) -> decode.Json:
        return {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "name": self.name,
            "uid": self.uid,
            **omit_none(controller=self.controller, blockOwnerDeletion=self.block_owner_deletion),
        }


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """Metadata of an object; ``others`` keeps unknown fields."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    owner_references: tuple[OwnerReference, ...] = ()
    others: decode.Json = field(default_factory=dict, repr=False)

    @property
    def is_deleting(self) -> bool:
        return self.others.get("deletionTimestamp") is not None

    @property
    def created(self) -> str:
        """Creation time in RFC 3339, to order objects; empty for an object of a file."""
        return str(self.others.get("creationTimestamp") or "")

    @classmethod
    def from_fields(cls, fields: decode.Fields) -> "ObjectMeta":
        return cls(
            name=fields.get_text("name"),
            namespace=fields.get_text("namespace"),
            uid=fields.get_text("uid"),
            resource_version=fields.get_text("resourceVersion"),
            generation=fields.get_optional_integer("generation") or 0,
            labels=fields.get_text_map("labels"),
            annotations=fields.get_text_map("annotations"),
            owner_references=fields.map_objects("ownerReferences", OwnerReference.from_fields),
            others=fields.get_other_fields(
                "name", "namespace", "uid", "resourceVersion", "generation", "labels",
                "annotations", "ownerReferences",
            ),
        )  # fmt: skip

    def to_json(self) -> decode.Json:
        """Convert to JSON without empty fields, as Kubernetes does."""
        known = {
            "name": self.name,
            "namespace": self.namespace,
            "uid": self.uid,
            "resourceVersion": self.resource_version,
            "generation": self.generation,
            "labels": dict(self.labels),
            "annotations": dict(self.annotations),
            "ownerReferences": [owner.to_json() for owner in self.owner_references],
        }
        return {**self.others, **{name: value for name, value in known.items() if value}}


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of an object; ``status`` is True, False or Unknown."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str = ""

    @classmethod
    def from_fields(cls, fields: decode.Fields) -> "Condition":
        return cls(
            type=fields.get_text("type"),
            status=fields.get_text("status"),
            reason=fields.get_text("reason"),
            message=fields.get_text("message"),
            last_transition_time=fields.get_text("lastTransitionTime"),
        )

    def to_json(self) -> decode.Json:
        return {
            "type": self.type,
            "status": self.status,
            "reason": self.reason,
            "message": self.message,
            "lastTransitionTime": self.last_transition_time,
        }


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


def omit_none(**fields: object) -> decode.Json:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def is_object_name(text: str) -> bool:
    """Return whether the text is the name of a Kubernetes object (RFC 1123 subdomain)."""
    return len(text) <= _NAME_LIMIT and _NAME.fullmatch(text) is not None
