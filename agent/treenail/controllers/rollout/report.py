"""When a pool's status is worth a write."""

import re
from dataclasses import replace

from treenail.api.decode import Fields
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.meta import Condition, renewed
from treenail.controllers.rollout.status import (
    DEGRADED,
    RECONCILING,
    STALLED,
    Counts,
    PoolStatus,
    Trouble,
)

COUNTS_EVERY_S = 5.0
"""Counts alone are written no more often: many nodes that are through at once are one write."""

_ESTIMATE = re.compile(r"; \d+ of \d+ nodes are updated, [^;]*$")


def reported(pool: MachineConfigPool) -> PoolStatus:
    """What the pool's status says now."""
    fields = Fields.of(pool.status, "status")
    return PoolStatus(
        Counts(
            total=fields.optional_integer("machineCount") or 0,
            updated=fields.optional_integer("updatedMachineCount") or 0,
            ready=fields.optional_integer("readyMachineCount") or 0,
            unavailable=fields.optional_integer("unavailableMachineCount") or 0,
            degraded=fields.optional_integer("degradedMachineCount") or 0,
        ),
        pool.reported,
        pool.conditions,
        fields.optional_integer("observedGeneration") or 0,
    )


def due_in_s(pool: MachineConfigPool, wanted: PoolStatus, since_last_s: float) -> float | None:
    """How long the write of the status can wait, None when there is nothing to write.

    Another estimate alone is no news: it would be one every minute.
    """
    present = reported(pool)
    if _without_estimate(present) == _without_estimate(wanted):
        return None
    if _gist(present) != _gist(wanted):
        return 0.0
    return max(0.0, COUNTS_EVERY_S - since_last_s)


def unusable(pool: MachineConfigPool, trouble: Trouble, *, now: str) -> PoolStatus:
    """The status of a pool that can't be used: what is counted stays, and it says why."""
    found = [
        Condition(DEGRADED, "True", trouble.reason, trouble.message),
        Condition(RECONCILING, "False", trouble.reason, trouble.message),
        Condition(STALLED, "True", trouble.reason, trouble.message),
    ]
    return replace(
        reported(pool),
        conditions=renewed(pool.conditions, found, now=now),
        observed_generation=pool.metadata.generation,
    )


def _without_estimate(status: PoolStatus) -> PoolStatus:
    conditions = tuple(
        replace(found, message=_ESTIMATE.sub("", found.message)) for found in status.conditions
    )
    return replace(status, conditions=conditions)


def _gist(status: PoolStatus) -> tuple[object, ...]:
    said = [(found.type, found.status, found.reason) for found in status.conditions]
    return said, status.configuration, status.observed_generation, _degraded(status.conditions)


def _degraded(conditions: tuple[Condition, ...]) -> list[str]:
    return [found.message for found in conditions if found.type == DEGRADED]
