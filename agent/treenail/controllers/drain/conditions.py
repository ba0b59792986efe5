"""Drain conditions of a MachineConfigNode: Cordoned, Drained and Uncordoned.

They are only a report: a drain neither waits for them nor fails with them. A failed write is
retried later. Some clusters do not have the kind, and some nodes have no object of it.
"""

import logging
from dataclasses import dataclass
from enum import StrEnum

from treenail import clocks, errors
from treenail.api import decode, machineconfignode, object_meta
from treenail.kube import api_client, resources

log = logging.getLogger(__name__)

FIELD_MANAGER = "treenail-drain"
_RETRY_S = 30.0
_SETTLE_S = 5.0
"""Time in which a watch normally shows a write."""
_MESSAGE_CHARS = 2000
_CORDONED, _DRAINED, _UNCORDONED = (
    machineconfignode.ConditionType.CORDONED,
    machineconfignode.ConditionType.DRAINED,
    machineconfignode.ConditionType.UNCORDONED,
)


class DrainStage(StrEnum):
    """Progress of a drain or uncordon request."""

    DRAINING = "draining"
    DRAINED = "drained"
    UNCORDONED = "uncordoned"
    LEFT_CORDONED = "left cordoned"


def build_drain_conditions(
    stage: DrainStage, request: str, blockers: str = ""
) -> tuple[object_meta.Condition, ...]:
    """Build the three conditions, without times. The reasons are those of the MCO."""
    not_uncordoned = object_meta.Condition(
        _UNCORDONED,
        "False",
        machineconfignode.NOT_YET_OCCURRED,
        "This node has not yet entered the Uncordoned phase",
    )
    cordoned = object_meta.Condition(
        _CORDONED, "True", "UpdateExecutedCordoned", f"Cordoned for {request}"
    )
    match stage:
        case DrainStage.DRAINING if blockers:
            message = f"Blocked by {blockers}"[:_MESSAGE_CHARS]
            return (
                cordoned,
                object_meta.Condition(_DRAINED, "Unknown", "DrainBlocked", message),
                not_uncordoned,
            )
        case DrainStage.DRAINING:
            message = f"Draining for {request}"
            drained = object_meta.Condition(_DRAINED, "Unknown", "UpdateExecutedDrained", message)
            return (cordoned, drained, not_uncordoned)
        case DrainStage.DRAINED:
            message = f"Drained for {request}"
            drained = object_meta.Condition(_DRAINED, "True", "UpdateExecutedDrained", message)
            return (cordoned, drained, not_uncordoned)
        case DrainStage.UNCORDONED:
            reason, message = "UpdateCompleteUncordoned", f"Uncordoned for {request}"
            return (
                object_meta.Condition(_CORDONED, "False", reason, message),
                object_meta.Condition(_DRAINED, "False", reason, message),
                object_meta.Condition(_UNCORDONED, "True", reason, message),
            )
        case DrainStage.LEFT_CORDONED:
            reason, message = (
                "CordonedByOther",
                "The node was cordoned before the update and stays cordoned",
            )
            return (
                object_meta.Condition(_CORDONED, "True", reason, message),
                object_meta.Condition(_DRAINED, "False", reason, message),
                object_meta.Condition(_UNCORDONED, "False", reason, message),
            )


def reports_drain(document: decode.Json) -> bool:
    """Return whether a MachineConfigNode shows its node as draining or drained."""
    conditions = machineconfignode.MachineConfigNode.from_json(document).conditions
    return any(
        condition.type == _DRAINED and condition.status != "False" for condition in conditions
    )


@dataclass(slots=True)
class _PendingConditions:
    """Desired and written conditions of one node."""

    latest: tuple[object_meta.Condition, ...] = ()
    """The desired conditions, without times."""
    written: tuple[object_meta.Condition, ...] | None = None
    """The conditions in the API server; None while unknown."""
    is_pending: bool = False
    not_before: float = float("-inf")
    written_at: float = float("-inf")


class DrainConditionWriter:
    """Writes the conditions by server-side apply under its own field manager.

    Only one thread at a time may call it for the same node.
    """

    def __init__(self, client: api_client.Client, clock: clocks.Clock) -> None:
        self._client = client
        self._clock = clock
        self._pending: dict[str, _PendingConditions] = {}

    def queue_conditions(self, node: str, conditions: tuple[object_meta.Condition, ...]) -> None:
        """Queue the conditions for `flush_conditions` if they changed."""
        pending = self._pending.setdefault(node, _PendingConditions())
        if pending.latest != conditions:
            pending.latest, pending.is_pending = conditions, True

    def correct_conditions(
        self, node: str, conditions: tuple[object_meta.Condition, ...]
    ) -> float | None:
        """Queue the conditions although they were written: the object has others.

        Return after how many seconds to look again, because the write is too recent, or None.
        """
        pending = self._pending.setdefault(node, _PendingConditions())
        settle_s = pending.written_at + _SETTLE_S - self._clock.monotonic()
        if pending.latest == conditions and settle_s > 0:
            return settle_s
        pending.latest, pending.is_pending, pending.written = conditions, True, None
        return None

    def flush_conditions(self, node: str) -> float | None:
        """Write queued conditions and return after how many seconds to retry, or None.

        Never raises.
        """
        pending = self._pending.get(node)
        if pending is None or not pending.is_pending:
            return None
        if self._clock.monotonic() < pending.not_before:
            return _RETRY_S
        pending.is_pending = not self._apply_conditions(node, pending)
        return _RETRY_S if pending.is_pending else None

    def write_conditions(self, node: str, conditions: tuple[object_meta.Condition, ...]) -> None:
        """Queue the conditions and try to write them now."""
        self.queue_conditions(node, conditions)
        self.flush_conditions(node)

    def forget_node(self, node: str) -> None:
        """Forget a deleted node."""
        self._pending.pop(node, None)

    def _apply_conditions(self, node: str, pending: _PendingConditions) -> bool:
        """Write the conditions; False if the write must be retried."""
        try:
            before = self._read_conditions(node) if pending.written is None else pending.written
            merged = object_meta.merge_conditions(
                before, pending.latest, now=clocks.format_rfc3339(self._clock.now())
            )
            self._client.patch(
                resources.MACHINECONFIGNODES,
                node,
                _build_apply_body(node, merged),
                api_client.PatchType.APPLY,
                subresource="status",
                params={"fieldManager": FIELD_MANAGER},
            )
        except errors.NotFoundError:
            pending.written = None
            return True
        except (errors.ClusterError, errors.ConfigError) as error:
            log.info("cannot write the conditions of MachineConfigNode %s: %s", node, error)
            pending.not_before = self._clock.monotonic() + _RETRY_S
            return False
        pending.written = merged
        pending.written_at = self._clock.monotonic()
        return True

    def _read_conditions(self, node: str) -> tuple[object_meta.Condition, ...]:
        machine_config_node = machineconfignode.MachineConfigNode.from_json(
            self._client.get(resources.MACHINECONFIGNODES, node)
        )
        own_types = (_CORDONED, _DRAINED, _UNCORDONED)
        return tuple(
            condition for condition in machine_config_node.conditions if condition.type in own_types
        )


def _build_apply_body(node: str, conditions: tuple[object_meta.Condition, ...]) -> decode.Json:
    # Complete: an apply removes what its field manager owns and the body lacks.
    return {
        "apiVersion": machineconfignode.API_VERSION,
        "kind": machineconfignode.KIND,
        "metadata": {"name": node},
        "status": {"conditions": [condition.to_json() for condition in conditions]},
    }
