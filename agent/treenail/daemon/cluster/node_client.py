"""The API server as this node sees it: one cached Node, reads by name, writes of differences."""

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from treenail.api import machineconfignode
from treenail.api.disruptionpolicy import DEFAULTS, ClusterPolicy
from treenail.api.machineconfig import MachineConfig
from treenail.api.machineconfignode import MachineConfigNode
from treenail.api.meta import Condition, renewed
from treenail.api.node import Node
from treenail.clock import Clock, rfc3339
from treenail.daemon.reconcile.observe import seen
from treenail.errors import ClusterError, NotFound, Unreachable
from treenail.kube.client import Client, PatchKind
from treenail.kube.events import Regarding
from treenail.kube.resources import (
    MACHINECONFIGNODES,
    MACHINECONFIGS,
    MACHINECONFIGURATIONS,
    NODES,
)
from treenail.update.status import CONDITIONS_OF_THE_AGENT, Event, Report, Verdict

log = logging.getLogger(__name__)

Json = dict[str, object]

_CLUSTER = "cluster"
"""The name of the one MachineConfiguration."""


class Recorder(Protocol):
    """Where Events go; keeps those that can't be delivered yet, and never raises."""

    def normal(self, regarding: Regarding, reason: str, message: str) -> None: ...
    def warning(self, regarding: Regarding, reason: str, message: str) -> None: ...
    def flush(self) -> None: ...


class NodeCluster:
    """Our Node, the MachineConfigs it names and our MachineConfigNode.

    The watch's thread offers what it sees; everything else is the main thread's.
    """

    def __init__(
        self,
        client: Client,
        recorder: Recorder,
        *,
        node_name: str,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        self._client = client
        self._recorder = recorder
        self._name = node_name
        self._clock = clock
        self._on_change = on_change
        self._lock = threading.Lock()
        self._node: Node | None = None
        self._conditions = _Conditions()
        self._last_event: Event | None = None

    def offer(self, document: Json) -> None:
        """Take a newer look at our Node, from whichever thread; tells of it if it matters."""
        node = Node.from_json(document)
        with self._lock:
            before = self._node
            if before is not None and _older(node, before):
                return
            self._node = node
        if before is None or seen(before) != seen(node):
            self._on_change()

    def node(self) -> Node | None:
        with self._lock:
            return self._node

    def refresh(self) -> None:
        self.offer(self._client.get(NODES, self._name))

    def machine_config(self, name: str) -> MachineConfig:
        try:
            document = self._client.get(MACHINECONFIGS, name)
        except NotFound as error:
            raise NotFound(
                f"MachineConfig {name}, which this node is asked for, does not exist",
                remedy="create it, or set desiredConfig to one that exists",
            ) from error
        return MachineConfig.from_json(document)

    def policy(self) -> ClusterPolicy:
        try:
            return ClusterPolicy.from_json(self._client.get(MACHINECONFIGURATIONS, _CLUSTER))
        except NotFound:
            # Not every cluster has the kind, and the operator makes the object.
            return ClusterPolicy(DEFAULTS)

    def report(self, report: Report) -> None:
        """Write what differs from what the Node and the MachineConfigNode show."""
        node = self.node()
        if node is None:
            return
        changes = {
            name: value
            for name, value in report.annotations.items()
            if node.annotations.get(name) != value
        }
        if changes:
            body: Json = {"metadata": {"annotations": changes}}
            self.offer(self._client.patch(NODES, self._name, body))
            log.debug("wrote %s", ", ".join(f"{name}={value}" for name, value in changes.items()))
        self._recorder.flush()
        told = False
        try:
            told = self._tell_conditions(report)
        except Unreachable:
            raise
        except ClusterError:
            # Whatever is refused of the conditions, what happened is to be known.
            self._tell_event(report, told=told)
            raise
        self._tell_event(report, told=told)

    def tell(self, event: Event) -> None:
        """Record the Event, unless it is the one recorded last."""
        if event != self._last_event:
            self._last_event = event
            # What kubelet writes of its Node has the name as its uid; kubectl looks for that.
            node = Regarding("Node", self._name, uid=self._name)
            record = self._recorder.warning if event.type == "Warning" else self._recorder.normal
            record(node, event.reason, event.message)

    def _tell_event(self, report: Report, *, told: bool) -> None:
        """Record the report's Event, unless the conditions that were told say the same."""
        if report.event is not None and not (told and report.event.in_conditions):
            self.tell(report.event)

    def _tell_conditions(self, report: Report) -> bool:
        """Write the conditions; returns whether there is a MachineConfigNode to write them to."""
        if not report.conditions or not self._conditions.differ(report.conditions):
            return self._conditions.kept
        try:
            if not self._conditions.known:
                self._conditions.learn(self._client.get(MACHINECONFIGNODES, self._name))
            merged = self._conditions.merge(report.conditions, rfc3339(self._clock.now()))
            self._write_status(report, merged)
        except NotFound:
            # Not every cluster has the kind, and not every node an object of it.
            self._conditions.absent(report.conditions)
        else:
            self._conditions.told(report.conditions, merged)
        return self._conditions.kept

    def _write_status(self, report: Report, conditions: tuple[Condition, ...]) -> None:
        """Apply it all, without the images where the cluster's kind does not have them."""
        current, desired = report.current.image, report.desired.image
        if self._conditions.images_known and (current or desired):
            try:
                self._apply_status(report, conditions, current, desired)
            except Unreachable:
                raise
            except ClusterError as error:
                if machineconfignode.IMAGES not in str(error):
                    raise
                log.info("conditions are told without the images from now on: %s", error)
                self._conditions.images_known = False
            else:
                self._conditions.has_images = True
                return
        if self._conditions.has_images:
            # An apply that leaves it out would make it null, which the API server refuses.
            body: Json = {"status": {machineconfignode.IMAGES: None}}
            self._client.patch(MACHINECONFIGNODES, self._name, body, subresource="status")
            self._conditions.has_images = False
        self._apply_status(report, conditions)

    def _apply_status(
        self,
        report: Report,
        conditions: tuple[Condition, ...],
        current_image: str = "",
        desired_image: str = "",
    ) -> None:
        body = machineconfignode.status_apply(
            self._name,
            conditions,
            current_config=report.current.config,
            desired_config=report.desired.config,
            current_image=current_image,
            desired_image=desired_image,
            observed_generation=self._conditions.generation,
        )
        self._client.patch(
            MACHINECONFIGNODES, self._name, body, PatchKind.APPLY, subresource="status"
        )


class _Conditions:
    """The conditions as last written, so that transition times move only with the status."""

    def __init__(self) -> None:
        self.known = False
        self.kept = False
        self.generation = 0
        self.images_known = True
        """Whether the API server takes images, as far as anybody has tried."""
        self.has_images = False
        """Whether the MachineConfigNode says which images."""
        self._written: tuple[Condition, ...] = ()
        self._told: tuple[Verdict, ...] = ()

    def differ(self, verdicts: tuple[Verdict, ...]) -> bool:
        return verdicts != self._told

    def learn(self, document: Json) -> None:
        found = MachineConfigNode.from_json(document)
        self.generation = found.metadata.generation
        self.has_images = found.reports_images
        self._written = tuple(
            each for each in found.conditions if each.type in CONDITIONS_OF_THE_AGENT
        )
        self.known = True

    def merge(self, verdicts: tuple[Verdict, ...], now: str) -> tuple[Condition, ...]:
        news = [Condition(each.type, each.status, each.reason, each.message) for each in verdicts]
        return renewed(self._written, news, now=now)

    def told(self, verdicts: tuple[Verdict, ...], merged: tuple[Condition, ...]) -> None:
        self._told = verdicts
        self._written = merged
        self.kept = True

    def absent(self, verdicts: tuple[Verdict, ...]) -> None:
        self._told = verdicts
        self.known = self.kept = False


def _older(node: Node, than: Node) -> bool:
    """Whether a watch delivers, late, what our own write has already replaced."""
    new, old = node.resource_version, than.resource_version
    return new.isdigit() and old.isdigit() and int(new) < int(old)
