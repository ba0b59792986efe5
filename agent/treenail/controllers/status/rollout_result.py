"""Decide from the conditions of a pool whether its rollout is complete, blocked or in progress."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from treenail.api import decode, machineconfigpool, object_meta
from treenail.controllers.pools import pool_status
from treenail.controllers.render import render
from treenail.controllers.status import leader_status

_LEADER_LIMIT_S = 300.0


class RolloutOutcome(StrEnum):
    """Outcome of a rollout."""

    COMPLETE = "complete"
    BLOCKED = "blocked"
    """It does not continue before a user acts."""
    IN_PROGRESS = "in progress"
    UNKNOWN = "unknown"
    """The user may not read what decides it."""


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


def needs_render_inputs(result: RolloutResult) -> bool:
    """Return True when the outcome is final only if every MachineConfig was observed."""
    return result.outcome is not RolloutOutcome.IN_PROGRESS


def check_render_inputs(
    result: RolloutResult,
    pool: machineconfigpool.MachineConfigPool,
    configs: Sequence[object_meta.ObjectMeta],
    controller_configs: Sequence[object_meta.ObjectMeta],
    stream_choice: str = "",
) -> RolloutResult:
    """Return the result as in progress if the render controller has not observed a change yet.

    The objects must have been read after the pool. Without the hash of treenail's render
    controller, as under the Machine Config Operator, the names of the sources decide.
    """
    observed = pool.status.get(render.RENDER_INPUTS)
    if observed is not None:
        is_current = observed == render.hash_render_inputs(
            pool, configs, controller_configs, stream_choice
        )
    elif result.outcome is RolloutOutcome.COMPLETE:
        selected = {source.name for source in render.select_sources(pool, configs)}
        is_current = selected == set(pool.configuration.source)
    else:
        is_current = True
    message = "the render controller has not seen the last change of the MachineConfigs yet"
    if is_current:
        return result
    return replace(result, outcome=RolloutOutcome.IN_PROGRESS, message=message)


def mark_unknown(result: RolloutResult, reason: str) -> RolloutResult:
    """Return a complete result as unknown: the render inputs cannot be read.

    A blocked one stays as it is: the pool itself reports that it needs a user.
    """
    if result.outcome is not RolloutOutcome.COMPLETE:
        return result
    message = (
        f"cannot tell whether the last change of the MachineConfigs is rolled out: {reason}; "
        f"last reported: {result.message}"
    )
    return replace(result, outcome=RolloutOutcome.UNKNOWN, message=message)


def check_leader(
    result: RolloutResult, leader: leader_status.LeaderReport, *, now: float
) -> RolloutResult:
    """Return the result as outdated while no controller leads.

    It is in progress for five minutes, so that the nodes of the controllers can reboot.
    """
    if leader.state is not leader_status.LeaderState.NONE:
        return result
    is_new = leader.renewed_at is not None and now - leader.renewed_at < _LEADER_LIMIT_S
    outcome = RolloutOutcome.IN_PROGRESS if is_new else RolloutOutcome.BLOCKED
    message = f"{leader.message}; {leader.remedy}; last reported: {result.message}"
    return replace(result, outcome=outcome, message=message)


def compute_rollout_result(pool: machineconfigpool.MachineConfigPool) -> RolloutResult:
    """Return the outcome of the pool's rollout.

    It is in progress while the rollout controller has not observed the pool's last change.
    `check_render_inputs` compares the MachineConfigs.
    """
    status = decode.Fields.from_json(pool.status, "status")
    counts = pool_status.read_reported_counts(pool)
    conditions = {condition.type: condition for condition in pool.conditions}
    rendering = conditions.get(pool_status.RENDER_DEGRADED)
    is_rendered = rendering is not None and rendering.status == "False"
    stuck = [
        present
        for name in ("Degraded", "Stalled", pool_status.RENDER_DEGRADED)
        if (present := conditions.get(name)) is not None
        and present.status == "True"
        # The rollout controller has not seen yet that the config is rendered again.
        and not (present.reason == pool_status.RENDER_DEGRADED and is_rendered)
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
