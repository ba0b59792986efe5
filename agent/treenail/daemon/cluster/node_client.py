"""The API server as this node uses it: one cached Node, reads by name, writes of differences."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from treenail import clocks, errors
from treenail.api import (
    annotations,
    disruptionpolicy,
    machineconfig,
    machineconfignode,
    object_meta,
)
from treenail.api import annotations as key
from treenail.api.node import Node
from treenail.kube import api_client, event_recorder, resources
from treenail.kube.resource_version import RecentResponses, RequestToken
from treenail.update import status
from treenail.update.decision import node_state

log = logging.getLogger(__name__)

Json = dict[str, object]

_RBAC_REMEDY = (
    "let the group system:nodes read it; the permissions that the agent needs are printed by: "
    "treenail-controller manifests"
)
_CLUSTER_POLICY_NAME = "cluster"
"""The MachineConfiguration is a singleton of this name."""


class NodeClient:
    """Our Node, the MachineConfigs it names and our MachineConfigNode.

    `accept_node` and `handle_list` may be called from any thread, the other methods only from the
    main thread.
    """

    def __init__(
        self,
        client: api_client.Client,
        recorder: event_recorder.EventRecorder,
        *,
        node_name: str,
        clock: clocks.Clock,
        on_change: Callable[[], None],
    ) -> None:
        self._client = client
        self._recorder = recorder
        self._name = node_name
        self._clock = clock
        self._on_change = on_change
        self._lock = threading.Lock()
        self._watched: Node | None = None
        """The Node by the watch."""
        self._responses = RecentResponses[Node]()
        self._conditions = _WrittenConditions()
        self._last_event: status.NodeEvent | None = None

    def accept_node(self, document: Json) -> None:
        """Store our Node from the watch, and wake the loop when a decision could change."""
        node = self._decode_node(document)
        before = self.get_cached_node()
        with self._lock:
            self._watched = node
        self._notify_of_change(before)

    def handle_list(self) -> None:
        """Prefer the Node that the watch just listed to all earlier responses.

        After an etcd restore the MachineConfigNode may lack what was written to it, so the next
        report writes it again.
        """
        self._conditions.request_load()
        if self._responses.handle_list():
            self._on_change()

    def get_cached_node(self) -> Node | None:
        with self._lock:
            if self._watched is None:
                return self._responses.find(self._name)
            return self._responses.select_latest(self._name, self._watched)

    def _decode_node(self, document: Json) -> Node:
        """Read the Node, with the annotations in the spelling of decisions."""
        return Node.from_json(document)

    def _encode_annotations(self, changes: Mapping[str, str | None]) -> Json:
        """Return the annotations in the spelling of the Node."""
        return dict(changes)

    def _begin_request(self) -> RequestToken:
        with self._lock:
            return self._responses.begin_request(self._watched)

    def _notify_of_change(self, before: Node | None) -> None:
        after = self.get_cached_node()
        if after is not None and (
            before is None or node_state.summarize_node(before) != node_state.summarize_node(after)
        ):
            self._on_change()

    def refresh_node(self) -> None:
        """Read our Node from the API server; wake the loop when a decision could change.

        The watch reports the same version later and finds no change. A pass that
        read its facts before this would wait for the next resync.
        """
        known = self.get_cached_node()
        token = self._begin_request()
        node = self._decode_node(self._client.get(resources.NODES, self._name))
        self._responses.store_response(self._name, node, token)
        self._notify_of_change(known)

    def fetch_machine_config(self, name: str) -> machineconfig.MachineConfig:
        try:
            document = self._client.get(resources.MACHINECONFIGS, name)
        except errors.NotFoundError as error:
            raise errors.ConfigMissingError(
                f"cannot read MachineConfig {name}: it does not exist",
                remedy="create it, or set the Node's desiredConfig to one that exists",
            ) from error
        except errors.ForbiddenError as error:
            raise errors.ConfigRejectedError(
                f"cannot read MachineConfig {name}: {error}", remedy=error.remedy or _RBAC_REMEDY
            ) from error
        except errors.InvalidError as error:
            raise errors.ConfigRejectedError(
                f"cannot read MachineConfig {name}: {error}",
                remedy="set the Node's desiredConfig to another MachineConfig",
            ) from error
        try:
            return machineconfig.MachineConfig.from_json(document)
        except errors.ConfigError as error:
            raise errors.ConfigError(
                f"cannot read MachineConfig {name}: {error}",
                remedy=error.remedy or "correct the MachineConfigs that it is rendered from",
            ) from error

    def find_unnamed_config(self) -> machineconfig.MachineConfig | None:
        """Return the config of a machine whose Node names none; None if there is none."""
        return None

    def fetch_disruption_policy(self) -> disruptionpolicy.ClusterDisruptionPolicy:
        try:
            return disruptionpolicy.ClusterDisruptionPolicy.from_json(
                self._client.get(resources.MACHINECONFIGURATIONS, _CLUSTER_POLICY_NAME)
            )
        except errors.NotFoundError:
            # A cluster without the Machine Config Operator has neither kind nor object.
            return disruptionpolicy.ClusterDisruptionPolicy(disruptionpolicy.DEFAULT_POLICY)

    def write_report(self, report: status.StatusReport) -> None:
        """Write what differs from the Node and the MachineConfigNode, then flush Events."""
        node = self.get_cached_node()
        if node is None:
            return
        changes = {
            name: value
            for name, value in report.annotations.items()
            if node.annotations.get(name) != value
        }
        if changes:
            self._write_annotations(node, changes)
        self._recorder.flush_pending()
        is_written = False
        try:
            is_written = self._write_conditions(report)
        except errors.UnreachableError:
            raise
        except errors.ClusterError:
            # The API server rejected the conditions. Record the Event all the more.
            self._record_report_event(report, has_written_conditions=is_written)
            raise
        self._record_report_event(report, has_written_conditions=is_written)

    def _write_annotations(self, node: Node, changes: Mapping[str, str | None]) -> None:
        """Write the annotations; request a drain only of the Node that was decided on.

        It may request another target now, and a cached Node does not show it: a drain would take
        the node out of service in vain.
        """
        if not node_state.is_drain_token(changes.get(key.DESIRED_DRAIN) or ""):
            self._patch_annotations(changes)
            return
        try:
            self._patch_annotations(changes, node.resource_version)
        except errors.ConflictError:
            self.refresh_node()
            latest = self.get_cached_node()
            if latest is None or node_state.summarize_node(latest) != node_state.summarize_node(
                node
            ):
                log.debug("the Node changed before the drain was requested; deciding again")
                return
            # The kubelet wrote its status.
            self._patch_annotations(changes, latest.resource_version)

    def _patch_annotations(
        self, changes: Mapping[str, str | None], resource_version: str = ""
    ) -> None:
        before = self.get_cached_node()
        metadata: Json = {"annotations": self._encode_annotations(changes)}
        if resource_version:
            metadata["resourceVersion"] = resource_version
        token = self._begin_request()
        patched = self._decode_node(
            self._client.patch(resources.NODES, self._name, {"metadata": metadata})
        )
        self._responses.store_response(self._name, patched, token)
        if before is not None:
            self._notify_of_change(before)
        log.debug("wrote %s", ", ".join(f"{name}={value}" for name, value in changes.items()))

    def write_progress(self, percent: int) -> None:
        """Write how far the running transaction is; the next report removes it."""
        node = self.get_cached_node()
        value = f"{percent}%"
        if node is not None and node.annotations.get(key.PROGRESS) != value:
            self._write_annotations(node, {key.PROGRESS: value})

    def record_event(self, event: status.NodeEvent) -> None:
        """Record the Event, unless it is the one recorded last."""
        if event != self._last_event:
            self._last_event = event
            # The kubelet sets the Node's name as involvedObject.uid in its Events, and
            # `kubectl describe node` searches for that.
            node = event_recorder.ObjectReference("Node", self._name, uid=self._name)
            record = (
                self._recorder.record_warning
                if event.type == "Warning"
                else self._recorder.record_normal
            )
            record(node, event.reason, event.message)

    def _record_report_event(
        self, report: status.StatusReport, *, has_written_conditions: bool
    ) -> None:
        """Record the report's Event, unless it is Normal and written conditions contain it.

        A Warning is recorded in any case: users look for the cause in the Events of the Node.
        """
        if report.event is None:
            return
        is_normal = report.event.type == "Normal"
        if not (is_normal and has_written_conditions and report.event.is_in_conditions):
            self.record_event(report.event)

    def _write_conditions(self, report: status.StatusReport) -> bool:
        """Write the conditions; return whether this node has a MachineConfigNode."""
        is_working = report.annotations.get(key.STATE) == annotations.NodeState.WORKING
        if not report.conditions and is_working and self._conditions.is_degraded:
            # The next action has no progress to report, but the failure is over. The pool's
            # status quotes this condition.
            report = replace(report, conditions=(status.NOT_DEGRADED,))
        if not report.conditions or not self._conditions.needs_write(report.conditions):
            return self._conditions.has_object
        try:
            if not self._conditions.is_loaded:
                # The response to an empty patch is the object. Agents may not get
                # MachineConfigNodes: the admission policy that restricts each node to its own
                # applies to writes only.
                self._conditions.load_existing(
                    self._client.patch(
                        resources.MACHINECONFIGNODES, self._name, {}, subresource="status"
                    )
                )
            merged = self._conditions.merge_verdicts(
                report.conditions, clocks.format_rfc3339(self._clock.now())
            )
            self._write_status(report, merged)
        except errors.NotFoundError:
            # Either the cluster lacks the kind, or this node has no object of it.
            self._conditions.mark_absent(report.conditions)
        else:
            self._conditions.mark_written(report.conditions, merged)
        return self._conditions.has_object

    def _write_status(
        self, report: status.StatusReport, conditions: tuple[object_meta.Condition, ...]
    ) -> None:
        """Apply conditions, configs and images; without images where the CRD has no such field."""
        current, desired = report.current.image, report.desired.image
        if self._conditions.can_write_images and (current or desired):
            try:
                self._apply_status(report, conditions, current, desired)
            except errors.UnreachableError:
                raise
            except errors.ClusterError as error:
                if machineconfignode.CONFIG_IMAGE_FIELD not in str(error):
                    raise
                log.info("writing conditions without images from now on: %s", error)
                self._conditions.can_write_images = False
            else:
                self._conditions.has_images = True
                return
        if self._conditions.has_images:
            # Leaving an owned field out of an apply sets it to null, which the API server rejects.
            # Remove the field with a merge patch first.
            body: Json = {"status": {machineconfignode.CONFIG_IMAGE_FIELD: None}}
            self._client.patch(resources.MACHINECONFIGNODES, self._name, body, subresource="status")
            self._conditions.has_images = False
        self._apply_status(report, conditions)

    def _apply_status(
        self,
        report: status.StatusReport,
        conditions: tuple[object_meta.Condition, ...],
        current_image: str = "",
        desired_image: str = "",
    ) -> None:
        body = machineconfignode.build_status_apply(
            self._name,
            conditions,
            current_config=report.current.config,
            desired_config=report.desired.config,
            current_image=current_image,
            desired_image=desired_image,
        )
        self._client.patch(
            resources.MACHINECONFIGNODES,
            self._name,
            body,
            api_client.PatchType.APPLY,
            subresource="status",
        )


class _WrittenConditions:
    """The conditions as last written, so that transition times change only with the status."""

    def __init__(self) -> None:
        self.is_loaded = False
        self.has_object = False
        self.can_write_images = True
        """False once the API server rejected an image field."""
        self.has_images = False
        """True while the MachineConfigNode's status contains images."""
        self._needs_load = False
        self._written: tuple[object_meta.Condition, ...] = ()
        self._reported: tuple[status.ReportedCondition, ...] = ()

    @property
    def is_degraded(self) -> bool:
        return any(
            condition.type == status.NOT_DEGRADED.type and condition.status == "True"
            for condition in self._written
        )

    def request_load(self) -> None:
        """Let the next report read the object again; any thread may call it."""
        self._needs_load = True

    def needs_write(self, conditions: tuple[status.ReportedCondition, ...]) -> bool:
        if self._needs_load:
            self._needs_load = self.is_loaded = False
            self._reported = ()
        return conditions != self._reported

    def load_existing(self, document: Json) -> None:
        node = machineconfignode.MachineConfigNode.from_json(document)
        self.has_images = node.has_status_images
        self._written = tuple(
            condition for condition in node.conditions if condition.type in status.AGENT_CONDITIONS
        )
        self.is_loaded = True

    def merge_verdicts(
        self, conditions: tuple[status.ReportedCondition, ...], now: str
    ) -> tuple[object_meta.Condition, ...]:
        new_conditions = [
            object_meta.Condition(
                condition.type, condition.status, condition.reason, condition.message
            )
            for condition in conditions
        ]
        return object_meta.merge_conditions(self._written, new_conditions, now=now)

    def mark_written(
        self,
        conditions: tuple[status.ReportedCondition, ...],
        merged: tuple[object_meta.Condition, ...],
    ) -> None:
        self._reported = conditions
        self._written = merged
        self.has_object = True

    def mark_absent(self, conditions: tuple[status.ReportedCondition, ...]) -> None:
        self._reported = conditions
        self.is_loaded = self.has_object = False
