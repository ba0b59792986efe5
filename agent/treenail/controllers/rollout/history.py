"""The last rollouts of a pool, for tables and pages. No decision depends on them."""

from dataclasses import dataclass
from enum import StrEnum

from treenail.api.decode import Fields, Json

MAX_PAST_ROLLOUTS = 5
"""Rollouts that the status of a pool keeps: at most 3 KB."""
_REASON_LIMIT = 200


class PastOutcome(StrEnum):
    """How a rollout ended."""

    COMPLETE = "Complete"
    HALTED = "Halted"
    """Another target came while a failure halted it."""
    REPLACED = "Replaced"
    """Another target came before all nodes were updated."""


@dataclass(frozen=True, slots=True)
class PastRollout:
    """A rollout that another one followed."""

    config: str
    image: str | None
    began_at: float
    ended_at: float
    outcome: PastOutcome
    reason: str = ""
    """Node and reason of the failure that halted it."""

    @classmethod
    def from_fields(cls, fields: Fields) -> "PastRollout":
        """Parse one entry; raises `ConfigError`. An unknown outcome counts as replaced."""
        outcome = fields.get_text("outcome")
        return cls(
            fields.get_text("config"),
            fields.get_optional_text("image"),
            float(fields.get_optional_integer("beganAt") or 0),
            float(fields.get_optional_integer("endedAt") or 0),
            PastOutcome(outcome) if outcome in list(PastOutcome) else PastOutcome.REPLACED,
            fields.get_text("reason"),
        )

    def to_json(self) -> Json:
        """Format the entry for the status of the pool."""
        document: Json = {
            "config": self.config,
            "beganAt": int(self.began_at),
            "endedAt": int(self.ended_at),
            "outcome": str(self.outcome),
        }
        if self.image is not None:
            document["image"] = self.image
        if self.reason:
            document["reason"] = self.reason[:_REASON_LIMIT]
        return document


def add_past_rollout(
    history: tuple[PastRollout, ...], past: PastRollout
) -> tuple[PastRollout, ...]:
    """Return the history with the rollout in front, without the oldest ones."""
    return (past, *history)[:MAX_PAST_ROLLOUTS]
