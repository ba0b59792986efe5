"""Decides from the conditions of a pool whether its rollout is complete, blocked or in progress."""

from dataclasses import dataclass
from enum import StrEnum

from treenail.api.decode import Fields
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.rollout.status import read_reported_counts


class RolloutOutcome(StrEnum):
    """Outcome of a rollout."""

    COMPLETE = "complete"
    BLOCKED = "blocked"
    """It does not continue before a user acts."""
    IN_PROGRESS = "in progress"


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """Outcome of a pool's rollout, and the message of the condition that says so."""

    pool: str
    outcome: RolloutOutcome
    message: str
    updated: int | None
    """None if unknown, as ``total``."""
    total: int | None

    def __str__(self) -> str:
        counts = "number of updated nodes unknown"
        if self.updated is not None:
            counts = f"{self.updated} of {self.total} nodes updated"
        return f"{self.pool}: {self.outcome}, {counts}: {self.message}"


def compute_rollout_result(pool: MachineConfigPool) -> RolloutResult:
    """Return the outcome of the pool's rollout.

    It is in progress while the rollout controller has not observed the pool's last change.
    """
    status = Fields.from_json(pool.status, "status")
    counts = read_reported_counts(pool)
    conditions = {each.type: each for each in pool.conditions}
    stuck = [
        found
        for name in ("Degraded", "Stalled")
        if (found := conditions.get(name)) is not None and found.status == "True"
    ]
    updated, updating = conditions.get("Updated"), conditions.get("Updating")
    observed = status.get_optional_integer("observedGeneration") or 0
    if observed < pool.metadata.generation:
        outcome, message = RolloutOutcome.IN_PROGRESS, "the controller has not seen the change yet"
    elif stuck:
        outcome, message = RolloutOutcome.BLOCKED, stuck[0].message or stuck[0].reason
    elif pool.paused and not (updated and updated.status == "True"):
        outcome, message = RolloutOutcome.BLOCKED, "the pool is paused"
    elif updated is not None and updated.status == "True":
        outcome, message = RolloutOutcome.COMPLETE, updated.message
    else:
        message = updating.message if updating is not None else "no status yet"
        outcome = RolloutOutcome.IN_PROGRESS
    return RolloutResult(
        pool.name,
        outcome,
        message,
        None if counts is None else counts.updated,
        None if counts is None else counts.total,
    )
