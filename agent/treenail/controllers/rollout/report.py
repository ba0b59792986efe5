"""When a pool's status is worth a write."""

import re
from dataclasses import replace

from treenail.api.decode import Fields
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.meta import Condition, merge_conditions
from treenail.controllers.rollout.status import (
    DEGRADED,
    RECONCILING,
    STALLED,
    PoolCounts,
    PoolProblem,
    PoolStatus,
)

COUNTS_INTERVAL_S = 5.0
"""Counts alone are written no more often: many nodes that are through at once are one write."""

_ESTIMATE = re.compile(r"; \d+ of \d+ nodes are updated, [^;]*$")


def read_reported_status(pool: MachineConfigPool) -> PoolStatus:
    """What the pool's status says now."""
    fields = Fields.from_json(pool.status, "status")
    return PoolStatus(
        PoolCounts(
            total=fields.get_optional_integer("machineCount") or 0,
            updated=fields.get_optional_integer("updatedMachineCount") or 0,
            ready=fields.get_optional_integer("readyMachineCount") or 0,
            unavailable=fields.get_optional_integer("unavailableMachineCount") or 0,
            degraded=fields.get_optional_integer("degradedMachineCount") or 0,
        ),
        pool.status_configuration,
        pool.conditions,
        fields.get_optional_integer("observedGeneration") or 0,
    )


def compute_write_delay_s(
    pool: MachineConfigPool, desired: PoolStatus, since_last_s: float
) -> float | None:
    """How long the write of the status can wait, None when there is nothing to write.

    Another estimate alone is no news: it would be one every minute.
    """
    present = read_reported_status(pool)
    if _strip_estimate(present) == _strip_estimate(desired):
        return None
    if _extract_significant(present) != _extract_significant(desired):
        return 0.0
    return max(0.0, COUNTS_INTERVAL_S - since_last_s)


def build_unusable_status(pool: MachineConfigPool, problem: PoolProblem, *, now: str) -> PoolStatus:
    """The status of a pool that can't be used: what is counted stays, and it says why."""
    found = [
        Condition(DEGRADED, "True", problem.reason, problem.message),
        Condition(RECONCILING, "False", problem.reason, problem.message),
        Condition(STALLED, "True", problem.reason, problem.message),
    ]
    return replace(
        read_reported_status(pool),
        conditions=merge_conditions(pool.conditions, found, now=now),
        observed_generation=pool.metadata.generation,
    )


def _strip_estimate(status: PoolStatus) -> PoolStatus:
    conditions = tuple(
        replace(found, message=_ESTIMATE.sub("", found.message)) for found in status.conditions
    )
    return replace(status, conditions=conditions)


def _extract_significant(status: PoolStatus) -> tuple[object, ...]:
    said = [(found.type, found.status, found.reason) for found in status.conditions]
    return (
        said,
        status.configuration,
        status.observed_generation,
        _find_degraded_messages(status.conditions),
    )


def _find_degraded_messages(conditions: tuple[Condition, ...]) -> list[str]:
    return [found.message for found in conditions if found.type == DEGRADED]
