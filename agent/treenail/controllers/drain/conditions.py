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
from treenail.api.meta import Condition, renewed
from treenail.clock import Clock, rfc3339
from treenail.errors import ClusterError, ConfigError, NotFound
from treenail.kube.client import Client, PatchKind
from treenail.kube.resources import MACHINECONFIGNODES

log = logging.getLogger(__name__)

FIELD_MANAGER = "treenail-drain"
_AGAIN_S = 30.0
_MESSAGE_CHARS = 2000
_CORDONED, _DRAINED, _UNCORDONED = (
    ConditionType.CORDONED,
    ConditionType.DRAINED,
    ConditionType.UNCORDONED,
)


class Stage(StrEnum):
    """How far a request is."""

    DRAINING = "draining"
    DRAINED = "drained"
    UNCORDONED = "uncordoned"
    LEFT_CORDONED = "left cordoned"


def conditions(stage: Stage, request: str, blocked: str = "") -> tuple[Condition, ...]:
    """The three conditions, without times; reasons are the Machine Config Operator's."""
    before = Condition(
        _UNCORDONED,
        "False",
        machineconfignode.NOT_YET_OCCURRED,
        "This node has not yet entered the Uncordoned phase",
    )
    cordoned = Condition(_CORDONED, "True", "UpdateExecutedCordoned", f"Cordoned for {request}")
    match stage:
        case Stage.DRAINING if blocked:
            message = f"Held up by {blocked}"[:_MESSAGE_CHARS]
            return (cordoned, Condition(_DRAINED, "Unknown", "DrainBlocked", message), before)
        case Stage.DRAINING:
            message = f"Draining for {request}"
            drained = Condition(_DRAINED, "Unknown", "UpdateExecutedDrained", message)
            return (cordoned, drained, before)
        case Stage.DRAINED:
            message = f"Drained for {request}"
            drained = Condition(_DRAINED, "True", "UpdateExecutedDrained", message)
            return (cordoned, drained, before)
        case Stage.UNCORDONED:
            reason, message = "UpdateCompleteUncordoned", f"Uncordoned for {request}"
            return (
                Condition(_CORDONED, "False", reason, message),
                Condition(_DRAINED, "False", reason, message),
                Condition(_UNCORDONED, "True", reason, message),
            )
        case Stage.LEFT_CORDONED:
            reason, message = "CordonedByOther", "Was cordoned before the update, and stays so"
            return (
                Condition(_CORDONED, "True", reason, message),
                Condition(_DRAINED, "False", reason, message),
                Condition(_UNCORDONED, "False", reason, message),
            )


@dataclass(slots=True)
class _Report:
    """What is known of the conditions of one node."""

    said: tuple[Condition, ...] = ()
    """What was told last, without times."""
    written: tuple[Condition, ...] | None = None
    """As they are there; None before they were read, or when there is nowhere to write."""
    owed: bool = False
    not_before: float = float("-inf")


class Reporter:
    """Writes the conditions, by server-side apply under a field manager of their own.

    One thread at a time is concerned with a node.
    """

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._reports: dict[str, _Report] = {}

    def promise(self, node: str, news: tuple[Condition, ...]) -> None:
        """Write them with `keep` if they differ from what was told before."""
        report = self._reports.setdefault(node, _Report())
        if report.said != news:
            report.said, report.owed = news, True

    def keep(self, node: str) -> float | None:
        """Write what is promised; after how many seconds to try again, None if that is not needed.

        Never raises.
        """
        report = self._reports.get(node)
        if report is None or not report.owed:
            return None
        if self._clock.monotonic() < report.not_before:
            return _AGAIN_S
        report.owed = not self._write(node, report)
        return _AGAIN_S if report.owed else None

    def tell(self, node: str, news: tuple[Condition, ...]) -> None:
        """Promise, and keep it now if possible."""
        self.promise(node, news)
        self.keep(node)

    def forget(self, node: str) -> None:
        """There is no such node any more."""
        self._reports.pop(node, None)

    def _write(self, node: str, report: _Report) -> bool:
        """Write them; False if that has to be tried again."""
        try:
            before = self._read(node) if report.written is None else report.written
            merged = renewed(before, report.said, now=rfc3339(self._clock.now()))
            self._client.patch(
                MACHINECONFIGNODES,
                node,
                _document(node, merged),
                PatchKind.APPLY,
                subresource="status",
                params={"fieldManager": FIELD_MANAGER},
            )
        except NotFound:
            report.written = None
            return True
        except (ClusterError, ConfigError) as error:
            log.info("can't write the conditions of MachineConfigNode %s: %s", node, error)
            report.not_before = self._clock.monotonic() + _AGAIN_S
            return False
        report.written = merged
        return True

    def _read(self, node: str) -> tuple[Condition, ...]:
        found = MachineConfigNode.from_json(self._client.get(MACHINECONFIGNODES, node))
        ours = (_CORDONED, _DRAINED, _UNCORDONED)
        return tuple(each for each in found.conditions if each.type in ours)


def _document(node: str, conditions: tuple[Condition, ...]) -> Json:
    return {
        "apiVersion": machineconfignode.API_VERSION,
        "kind": machineconfignode.KIND,
        "metadata": {"name": node},
        "status": {"conditions": [each.to_json() for each in conditions]},
    }
