"""The conditions of a MachineConfigNode that tell of a drain, for those who watch an update.

They are a report: a drain neither waits for them nor fails with them. What could not be written is
kept and written later. Not every cluster has the kind, and not every node an object of it.
"""

import logging
from dataclasses import dataclass
from enum import StrEnum

from treenail.api import machineconfignode
from treenail.api.decode import Json
from treenail.api.machineconfignode import ConditionType, MachineConfigNode
from treenail.api.meta import Condition, merge_conditions
from treenail.clock import Clock, format_rfc3339
from treenail.errors import ClusterError, ConfigError, NotFoundError
from treenail.kube.client import Client, PatchType
from treenail.kube.resources import MACHINECONFIGNODES

log = logging.getLogger(__name__)

FIELD_MANAGER = "treenail-drain"
_RETRY_S = 30.0
_MESSAGE_CHARS = 2000
_CORDONED, _DRAINED, _UNCORDONED = (
    ConditionType.CORDONED,
    ConditionType.DRAINED,
    ConditionType.UNCORDONED,
)


class DrainStage(StrEnum):
    """How far a request is."""

    DRAINING = "draining"
    DRAINED = "drained"
    UNCORDONED = "uncordoned"
    LEFT_CORDONED = "left cordoned"


def build_drain_conditions(
    stage: DrainStage, request: str, blockers: str = ""
) -> tuple[Condition, ...]:
    """The three conditions, without times; reasons are the Machine Config Operator's."""
    before = Condition(
        _UNCORDONED,
        "False",
        machineconfignode.NOT_YET_OCCURRED,
        "This node has not yet entered the Uncordoned phase",
    )
    cordoned = Condition(_CORDONED, "True", "UpdateExecutedCordoned", f"Cordoned for {request}")
    match stage:
        case DrainStage.DRAINING if blockers:
            message = f"Held up by {blockers}"[:_MESSAGE_CHARS]
            return (cordoned, Condition(_DRAINED, "Unknown", "DrainBlocked", message), before)
        case DrainStage.DRAINING:
            message = f"Draining for {request}"
            drained = Condition(_DRAINED, "Unknown", "UpdateExecutedDrained", message)
            return (cordoned, drained, before)
        case DrainStage.DRAINED:
            message = f"Drained for {request}"
            drained = Condition(_DRAINED, "True", "UpdateExecutedDrained", message)
            return (cordoned, drained, before)
        case DrainStage.UNCORDONED:
            reason, message = "UpdateCompleteUncordoned", f"Uncordoned for {request}"
            return (
                Condition(_CORDONED, "False", reason, message),
                Condition(_DRAINED, "False", reason, message),
                Condition(_UNCORDONED, "True", reason, message),
            )
        case DrainStage.LEFT_CORDONED:
            reason, message = "CordonedByOther", "Was cordoned before the update, and stays so"
            return (
                Condition(_CORDONED, "True", reason, message),
                Condition(_DRAINED, "False", reason, message),
                Condition(_UNCORDONED, "False", reason, message),
            )


@dataclass(slots=True)
class _PendingConditions:
    """What is known of the conditions of one node."""

    latest: tuple[Condition, ...] = ()
    """What was told last, without times."""
    written: tuple[Condition, ...] | None = None
    """As they are there; None before they were read, or when there is nowhere to write."""
    is_pending: bool = False
    not_before: float = float("-inf")


class DrainConditionWriter:
    """Writes the conditions, by server-side apply under a field manager of their own.

    One thread at a time is concerned with a node.
    """

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._pending: dict[str, _PendingConditions] = {}

    def queue_conditions(self, node: str, conditions: tuple[Condition, ...]) -> None:
        """Write them with `flush_conditions` if they differ from what was told before."""
        report = self._pending.setdefault(node, _PendingConditions())
        if report.latest != conditions:
            report.latest, report.is_pending = conditions, True

    def flush_conditions(self, node: str) -> float | None:
        """Write what is promised; after how many seconds to try again, None if that is not needed.

        Never raises.
        """
        report = self._pending.get(node)
        if report is None or not report.is_pending:
            return None
        if self._clock.monotonic() < report.not_before:
            return _RETRY_S
        report.is_pending = not self._apply_conditions(node, report)
        return _RETRY_S if report.is_pending else None

    def write_conditions(self, node: str, conditions: tuple[Condition, ...]) -> None:
        """Promise, and keep it now if possible."""
        self.queue_conditions(node, conditions)
        self.flush_conditions(node)

    def forget_node(self, node: str) -> None:
        """There is no such node any more."""
        self._pending.pop(node, None)

    def _apply_conditions(self, node: str, pending: _PendingConditions) -> bool:
        """Write them; False if that has to be tried again."""
        try:
            before = self._read_conditions(node) if pending.written is None else pending.written
            merged = merge_conditions(before, pending.latest, now=format_rfc3339(self._clock.now()))
            self._client.patch(
                MACHINECONFIGNODES,
                node,
                _build_apply_body(node, merged),
                PatchType.APPLY,
                subresource="status",
                params={"fieldManager": FIELD_MANAGER},
            )
        except NotFoundError:
            pending.written = None
            return True
        except (ClusterError, ConfigError) as error:
            log.info("can't write the conditions of MachineConfigNode %s: %s", node, error)
            pending.not_before = self._clock.monotonic() + _RETRY_S
            return False
        pending.written = merged
        return True

    def _read_conditions(self, node: str) -> tuple[Condition, ...]:
        found = MachineConfigNode.from_json(self._client.get(MACHINECONFIGNODES, node))
        ours = (_CORDONED, _DRAINED, _UNCORDONED)
        return tuple(each for each in found.conditions if each.type in ours)


def _build_apply_body(node: str, conditions: tuple[Condition, ...]) -> Json:
    return {
        "apiVersion": machineconfignode.API_VERSION,
        "kind": machineconfignode.KIND,
        "metadata": {"name": node},
        "status": {"conditions": [each.to_json() for each in conditions]},
    }
