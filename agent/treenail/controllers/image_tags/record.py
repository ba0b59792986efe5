"""Record of how the tag of an image was resolved.

Builds and rollouts use the digest in the record, so that neither a restart nor the registry
changes an image. The record is stored in the cluster, and shows users what the tag stood for.
"""

from dataclasses import dataclass

from treenail.api.decode import Fields, Json
from treenail.api.pullspec import parse_pull_spec
from treenail.errors import ConfigError

MAX_EARLIER = 20
"""Images that a record remembers. An older one counts as new when the tag returns to it."""


@dataclass(frozen=True, slots=True)
class TagProblem:
    """Why a tag is not followed: a CamelCase reason and a message with the remedy."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class TagRecord:
    """How a tag was resolved."""

    tag: str
    image: str
    """Pull spec by digest, which is used."""
    resolved_at: str
    """In RFC 3339."""
    earlier: tuple[str, ...] = ()
    """Images that the tag stood for before, oldest first."""
    revision: int = 0
    """Counts resolutions for rebuilds: each one needs a new answer of the registry."""
    is_for_rebuild: bool = False
    """Resolved for the rebuild that is requested now."""
    problem: TagProblem | None = None
    """Why the tag was not followed the last time."""

    @classmethod
    def from_fields(cls, fields: Fields) -> "TagRecord":
        """Read a stored record; raise `ConfigError`."""
        reason = fields.get_text("reason")
        return cls(
            tag=fields.get_required_text("tag"),
            image=str(parse_pull_spec(fields.get_text("image"), where="image")),
            resolved_at=fields.get_text("resolvedAt"),
            earlier=fields.get_text_list("earlier")[-MAX_EARLIER:],
            revision=fields.get_optional_integer("revision") or 0,
            is_for_rebuild=fields.get_bool("forRebuild"),
            problem=TagProblem(reason, fields.get_text("message")) if reason else None,
        )

    def to_json(self) -> Json:
        found: Json = {
            "tag": self.tag,
            "image": self.image,
            "resolvedAt": self.resolved_at,
            "earlier": list(self.earlier),
        }
        if self.revision:
            found["revision"] = self.revision
        if self.is_for_rebuild:
            found["forRebuild"] = True
        if self.problem is not None:
            found |= {"reason": self.problem.reason, "message": self.problem.message}
        return found


@dataclass(frozen=True, slots=True)
class TagChange:
    """A change that users must see: the tag moved, or it is no longer followed."""

    reason: str
    message: str
    is_warning: bool = False


TAG_MOVED = "ImageTagMoved"
"""Reason of a change that is followed."""


def find_tag_change(before: TagRecord | None, after: TagRecord | None) -> TagChange | None:
    """Return what changed between two records of one tag; None for nothing to report."""
    if after is None:
        return None
    is_same = before is not None and before.tag == after.tag
    if after.problem is not None:
        is_known = is_same and before is not None and before.problem == after.problem
        problem = after.problem
        return None if is_known else TagChange(problem.reason, problem.message, is_warning=True)
    if before is None or not is_same or before.image == after.image:
        return None
    return TagChange(TAG_MOVED, f"{after.tag} moved from {before.image} to {after.image}")


def parse_tag_record(fields: Fields) -> TagRecord | None:
    """Read a stored record; None for an unreadable one, so that the tag is resolved again."""
    try:
        return TagRecord.from_fields(fields)
    except ConfigError:
        return None
