"""Drain controller: applies the ``desiredDrain`` of Nodes and acknowledges it.

A reconciliation never waits for a pod. It evicts pods that are due, reports blockers and returns.
A change of a pod enqueues the node again. Writes of Nodes are conditional.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import assert_never

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import decode
from treenail.controllers.drain import conditions, decide, queues
from treenail.controllers.drain.blockers import (
    REPORT_AFTER_S,
    REPORT_INTERVAL_S,
    ReportedBlockers,
    find_reportable,
    parse_keys,
)
from treenail.controllers.runtime import controller_metrics, informer_set, workers
from treenail.kube import (
    api_client,
    event_recorder,
    eviction,
    pods,
    resource_version,
    resources,
    watch,
)

log = logging.getLogger(__name__)

_MAX_PARALLEL = 50
_EVICTION_THREADS = 32
_LIST_TIMEOUT_S = 2.0
_MAX_CONFLICTS = 3
_CONFLICT_RETRY_S = 1.0
_SLOT_RETRY_S = 30.0
_BLOCKED_SLOT_S = 60.0
"""How long a blocked drain keeps its slot while other nodes wait for one."""
_EVENT_INTERVAL_S = 600.0
_MAX_CORDON_PAUSE_S = 60.0
_NAMED_UNCORDONS = 3
"""After so many uncordons during a drain another program does it, and no user by mistake."""
_MAX_NAMED_GROUPS = 10
_NO_PROGRESS = eviction.DrainProgress((), (), 0, 0.0)
_UNLIMITED = 1_000_000
_MAX_NAMED_PODS = 20


@dataclass(frozen=True, slots=True)
class DrainRules:
    """How drains of a hosted cluster differ."""

    keys: decide.DrainKeys = decide.USUAL_KEYS
    find_limit_s: Callable[[decide.DrainNode], float | None] = lambda _: None
    """Returns how long a drain may last, in seconds; None for no limit."""
    should_skip: Callable[[pods.Pod], bool] = lambda _: False
    """Returns whether a pod stays."""
    report_expired: Callable[[str, str], None] = lambda _node, _message: None
    """Is called with the node and a message that names the pods left, before the drain ends."""


_NO_RULES = DrainRules()


class DrainNodeClient:
    """Reads and writes Nodes.

    Raises `ClusterError`, in particular `ConflictError` when the Node changed meanwhile.
    """

    def __init__(
        self,
        client: api_client.Client,
        view: informer_set.InformerView[decide.DrainNode],
        drain_keys: decide.DrainKeys = decide.USUAL_KEYS,
    ) -> None:
        self._client = client
        self._keys = drain_keys
        self._view = view
        self._responses = resource_version.RecentResponses[decide.DrainNode]()

    def get_latest(self, name: str) -> decide.DrainNode | None:
        """Return the node from the watch or from the last response, whichever is newer."""
        return self._responses.select_latest(name, self._view.find(name))

    def handle_list(self) -> tuple[str, ...]:
        """Prefer the list that was just received to all earlier responses; return their nodes."""
        return self._responses.handle_list()

    def read_node(self, name: str) -> decide.DrainNode | None:
        """Read the node from the API server; None when it does not exist."""
        token = self._responses.begin_request(self._view.find(name))
        try:
            return self._store_response(self._client.get(resources.NODES, name), token)
        except errors.NotFoundError:
            self._responses.forget_response(name)
            return None

    def cordon_node(self, node: decide.DrainNode, record: decide.DrainRecord) -> decide.DrainNode:
        """Cordon the node and write the record."""
        annotations: decode.Json = {key.DRAIN: record.to_text()}
        return self._patch_node(node, annotations, {"unschedulable": True})

    def disown_cordon(self, node: decide.DrainNode, record: decide.DrainRecord) -> decide.DrainNode:
        """Write the record, which gives the cordon to a user."""
        return self._patch_node(node, {key.DRAIN: record.to_text()})

    def write_blockers(self, node: decide.DrainNode, annotation: str) -> decide.DrainNode:
        """Write the annotation with the blockers; an empty text removes it."""
        return self._patch_node(node, {key.DRAIN_BLOCKED: annotation or None})

    def acknowledge_drain(self, node: decide.DrainNode) -> decide.DrainNode:
        """Acknowledge the drain; raises `ConflictError` after an uncordon meanwhile."""
        annotations: decode.Json = {self._keys.applied: node.desired_drain}
        if node.drain_blocked:
            annotations[key.DRAIN_BLOCKED] = None
        return self._patch_node(node, annotations)

    def acknowledge_uncordon(
        self, node: decide.DrainNode, *, should_uncordon: bool, now: float
    ) -> decide.DrainNode:
        """Acknowledge the uncordon, lift the cordon and remove the record, in one write."""
        annotations: decode.Json = {
            self._keys.applied: node.desired_drain,
            key.DRAIN: None,
            key.DRAIN_BLOCKED: None,
        }
        if node.record is not None and should_uncordon:
            annotations[key.LAST_OUTAGE] = decide.format_outage(node.record.began_at, now)
        # A merge patch removes a field by null (RFC 7386), as kubectl uncordon does.
        spec: decode.Json | None = {"unschedulable": None} if should_uncordon else None
        return self._patch_node(node, annotations, spec)

    def _patch_node(
        self, node: decide.DrainNode, annotations: decode.Json, spec: decode.Json | None = None
    ) -> decide.DrainNode:
        # The API server rejects a patch with another resourceVersion than the object has (409).
        body: decode.Json = {
            "metadata": {"resourceVersion": node.resource_version, "annotations": annotations},
            **({} if spec is None else {"spec": spec}),
        }
        token = self._responses.begin_request(self._view.find(node.name))
        return self._store_response(self._client.patch(resources.NODES, node.name, body), token)

    def _store_response(
        self, document: decode.Json, token: resource_version.RequestToken
    ) -> decide.DrainNode:
        node = decide.DrainNode.from_json(document, self._keys)
        self._responses.store_response(node.name, node, token)
        return node


class DrainMetrics:
    """Metrics of drains."""

    def __init__(self, metrics: controller_metrics.ControllerMetrics) -> None:
        self.duration = metrics.add_histogram(
            "drain_duration_seconds",
            "Time from the cordon to the acknowledgement of a drain.",
            buckets=controller_metrics.SLOW_BUCKETS_S,
        )
        self.drains = metrics.add_gauge(
            "drains", "Nodes with a drain request, by state.", ("state",)
        )
        self.longest = metrics.add_gauge(
            "longest_drain_seconds", "Duration of the longest running drain."
        )


@dataclass(slots=True)
class _RunningDrain:
    """A running drain in this process. None of it must survive the process."""

    drain: eviction.NodeDrain
    exit_stack: ExitStack
    record: decide.DrainRecord
    slot_taken_at: float
    """Monotonic time."""
    progress: eviction.DrainProgress = _NO_PROGRESS
    """The result of the last evictions."""
    reported_message: str = ""
    """The blockers in the last report."""
    reported_at: float = float("-inf")
    event_at: float = float("-inf")
    cordons: int = 0
    """How often the node was cordoned again."""
    cordoned_at: float = float("-inf")

    @property
    def is_blocked(self) -> bool:
        """True when all remaining pods have a blocker."""
        progress = self.progress
        return bool(progress.remaining) and progress.blocked_count == len(progress.remaining)

    @property
    def next_cordon_at(self) -> float:
        """Monotonic time; the pause doubles each time, because a program may uncordon each time."""
        pause_s = (
            min(2.0 ** min(self.cordons - 1, 10), _MAX_CORDON_PAUSE_S) if self.cordons else 0.0
        )
        return self.cordoned_at + pause_s

    def format_uncordons(self, node: str) -> str:
        """Return the sentence for a program that uncordons the node each time."""
        return (
            f"another program uncordons the node: {self.cordons} times during "
            f"{self.record.request}; stop it. The audit log of the API server names who changes "
            f"spec.unschedulable of Node {node}"
        )


class DrainController:
    """Cordons, drains and uncordons nodes, at most ``max_parallel`` drains at a time.

    It reports blockers that last longer than ``report_after_s``. ``executor`` sends the evictions.
    """

    name = "drain"

    def __init__(
        self,
        client: api_client.Client,
        events: event_recorder.EventRecorder,
        clock: clocks.Clock,
        metrics: controller_metrics.ControllerMetrics,
        *,
        max_parallel: int = _MAX_PARALLEL,
        report_after_s: float = REPORT_AFTER_S,
        executor: Executor | None = None,
        rules: DrainRules = _NO_RULES,
    ) -> None:
        self._client = client
        self._rules = rules
        self._events = events
        self._clock = clock
        self._metrics = DrainMetrics(metrics)
        self._report_after_s = report_after_s
        self._daemonsets = pods.DaemonSetCache(client, clock)
        self._slots = queues.DrainSlots(max_parallel)
        self._budget_queue = queues.BudgetQueue()
        self._condition_writer = conditions.DrainConditionWriter(client, clock)
        self._executor = executor or ThreadPoolExecutor(
            _EVICTION_THREADS, thread_name_prefix="evictions"
        )
        # One entry for each node. Only the worker that reconciles the node accesses it.
        self._running: dict[str, _RunningDrain] = {}
        self._records: dict[str, decide.DrainRecord] = {}
        self._enqueue: Callable[[str], None] = lambda _: None
        self._register_gauges()

    def register_watches(
        self, informers: informer_set.InformerSet, enqueue: workers.Enqueue
    ) -> None:
        """Watch Nodes, PodDisruptionBudgets and, if the cluster has the kind, MachineConfigNodes.

        Pods are watched only during a drain.
        """
        keys = self._rules.keys
        read = partial(decide.DrainNode.from_json, drain_keys=keys)
        view = informers.add_view(watch.WatchScope(resources.NODES), read)
        view.add_handler(lambda name, _before, _after: enqueue(name))
        informers.add_view(
            # Any user can create large ones. A change only makes the next eviction earlier.
            watch.WatchScope(resources.PODDISRUPTIONBUDGETS),
            _parse_disruptions_allowed,
            required=False,
        ).add_handler(self._on_budget_change)
        self._nodes = DrainNodeClient(self._client, view, keys)
        view.add_list_handler(self._handle_node_list)
        self._drain_reports: informer_set.InformerView[bool] = informers.add_view(
            watch.WatchScope(resources.MACHINECONFIGNODES),
            conditions.reports_drain,
            optional=True,
            required=False,
        )
        self._drain_reports.add_handler(lambda name, _before, _after: enqueue(name))
        self._enqueue = enqueue

    def sync_key(self, key: str) -> float | None:
        """Reconcile the node once and return after how many seconds to do it again, or None."""
        node = self._nodes.get_latest(key)
        for _ in range(_MAX_CONFLICTS):
            if node is None:
                self._end_drain(key)
                self._condition_writer.forget_node(key)
                return None
            try:
                return self._apply_decision(node)
            except errors.ConflictError:
                node = self._nodes.read_node(key)
            except (errors.ForbiddenError, errors.InvalidError, errors.TooLargeError) as error:
                message = f"cannot apply {node.desired_drain}: {error}; {error.remedy}"
                self._emit_warning(key, "DrainFailing", message.removesuffix("; "))
                raise
        return _CONFLICT_RETRY_S

    def close(self) -> None:
        """Stop all watches. Another process continues the drains."""
        for name in list(self._running):
            self._end_drain(name)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _handle_node_list(self) -> None:
        for name in self._nodes.handle_list():
            self._enqueue(name)

    def _apply_decision(self, node: decide.DrainNode) -> float | None:
        match decide.decide_drain(node, self._clock.now()):
            case decide.IdleDecision(has_stale_blockers):
                self._end_drain(node.name)
                if has_stale_blockers:
                    self._nodes.write_blockers(node, "")
                settle_s = self._correct_drain_report(node)
                return self._condition_writer.flush_conditions(node.name) or settle_s
            case decide.DisownCordonDecision(record):
                self._end_drain(node.name)
                self._nodes.disown_cordon(node, record)
                return self._condition_writer.flush_conditions(node.name)
            case decide.RejectDecision(request):
                self._end_drain(node.name)
                message = (
                    f"cannot apply desiredDrain {request!r:.80}: it begins with neither drain- nor "
                    "uncordon-"
                )
                self._emit_warning(node.name, "UnknownDrainRequest", message)
                return None
            case decide.UncordonDecision(request, should_uncordon):
                return self._uncordon_node(node, request, should_uncordon=should_uncordon)
            case decide.CordonDecision(record, is_repeated):
                if not self._slots.try_acquire(node.name):
                    return _SLOT_RETRY_S
                running = self._running.get(node.name)
                now = self._clock.monotonic()
                if is_repeated and running and running.next_cordon_at > now:
                    return min(running.next_cordon_at - now, self._report_drain(node, running))
                cordoned = self._cordon_node(node, record, is_repeated=is_repeated)
                return self._evict_pods(cordoned, record)
            case decide.EvictDecision(record):
                if not self._slots.try_acquire(node.name):
                    return _SLOT_RETRY_S
                return self._evict_pods(node, record)
            case other:
                assert_never(other)

    def _correct_drain_report(self, node: decide.DrainNode) -> float | None:
        """Queue the conditions of an uncordoned node whose MachineConfigNode still shows a drain.

        The process that uncordoned it ended before it wrote them, or etcd was restored. Return
        after how many seconds to look again, or None.
        """
        if not (decide.is_uncordoned(node) and self._drain_reports.find(node.name)):
            return None
        stage = (
            conditions.DrainStage.LEFT_CORDONED
            if node.unschedulable
            else conditions.DrainStage.UNCORDONED
        )
        return self._condition_writer.correct_conditions(
            node.name, conditions.build_drain_conditions(stage, node.last_applied_drain)
        )

    def _uncordon_node(
        self, node: decide.DrainNode, request: str, *, should_uncordon: bool
    ) -> float | None:
        self._end_drain(node.name)
        stays_cordoned = node.unschedulable and not should_uncordon
        stage = (
            conditions.DrainStage.LEFT_CORDONED
            if stays_cordoned
            else conditions.DrainStage.UNCORDONED
        )
        # Queued before the write: it may succeed although its response is lost.
        self._condition_writer.queue_conditions(
            node.name, conditions.build_drain_conditions(stage, request)
        )
        self._nodes.acknowledge_uncordon(
            node, should_uncordon=should_uncordon, now=self._clock.now()
        )
        if stays_cordoned:
            log.info("left %s cordoned for %s: a user cordoned it", node.name, request)
        else:
            log.info("uncordoned %s for %s", node.name, request)
        return self._condition_writer.flush_conditions(node.name)

    def _cordon_node(
        self, node: decide.DrainNode, record: decide.DrainRecord, *, is_repeated: bool
    ) -> decide.DrainNode:
        node = self._nodes.cordon_node(node, record)
        log.info("cordoned %s for %s", node.name, record.request)
        # List the pods again: new ones may have been scheduled before the cordon.
        before = self._close_drain(node.name)
        running = self._start_drain(node.name, record, before if is_repeated else None)
        if is_repeated:
            running.cordons += 1
            running.cordoned_at = self._clock.monotonic()
            message = f"cordoned again: the node was uncordoned during {record.request}"
            if running.cordons >= _NAMED_UNCORDONS:
                message = running.format_uncordons(node.name)
                log.warning("drain of %s is blocked: %s", node.name, message)
            self._emit_warning(node.name, "CordonedAgain", message)
        return node

    def _evict_pods(self, node: decide.DrainNode, record: decide.DrainRecord) -> float | None:
        record = self._time_record(node.name, record)
        running = self._running.get(node.name) or self._start_drain(node.name, record)
        progress = running.drain.evict_pods()
        if progress.is_drained:
            return self._finish_drain(node, record)
        limit_s = self._rules.find_limit_s(node)
        left_s = float("inf") if limit_s is None else record.began_at + limit_s - self._clock.now()
        if left_s <= 0:
            self._report_expired(node.name, limit_s or 0.0, progress)
            return self._finish_drain(node, record)
        self._budget_queue.set_waiting(node.name, record.began_at, progress.blockers)
        running.progress = progress
        report_s = self._report_drain(node, running)
        if self._yield_slot(node.name, running):
            return min(_SLOT_RETRY_S, left_s)
        return min(progress.retry_s, report_s, left_s)

    def _report_expired(self, name: str, limit_s: float, progress: eviction.DrainProgress) -> None:
        left = progress.remaining
        named = ", ".join(left[:_MAX_NAMED_PODS])
        if len(left) > _MAX_NAMED_PODS:
            named += f" and {len(left) - _MAX_NAMED_PODS} more"
        message = (
            f"the drain ended after {limit_s:.0f} s, and the update ends the pods left: {named}"
        )
        log.warning("%s: %s", name, message)
        self._rules.report_expired(name, message)

    def _report_drain(self, node: decide.DrainNode, running: _RunningDrain) -> float:
        """Report what blocks the drain; return the delay until the next report."""
        now = self._clock.now()
        blockers = find_reportable(
            running.progress, node.drain_blocked, now, report_after_s=self._report_after_s
        )
        report_s = self._report_blockers(node, running, blockers)
        message = blockers.message
        if running.cordons >= _NAMED_UNCORDONS:
            message = "; ".join(filter(None, (running.format_uncordons(node.name), message)))
        self._condition_writer.write_conditions(
            node.name,
            conditions.build_drain_conditions(
                conditions.DrainStage.DRAINING, running.record.request, message
            ),
        )
        return report_s

    def _time_record(self, name: str, record: decide.DrainRecord) -> decide.DrainRecord:
        """Return the record with the time at which this process first saw it.

        A node can write the record, and with an old time its drain would be the first of all.
        """
        known = self._records.get(name)
        if known is None or known.request != record.request:
            known = replace(record, began_at=float(int(self._clock.now())))
            self._records[name] = known
        return known

    def _finish_drain(self, node: decide.DrainNode, record: decide.DrainRecord) -> float | None:
        # Before the acknowledgement, after which no event enqueues the node again.
        self._condition_writer.write_conditions(
            node.name,
            conditions.build_drain_conditions(conditions.DrainStage.DRAINED, record.request),
        )
        self._nodes.acknowledge_drain(node)
        self._report_returned(node.name)
        self._end_drain(node.name)
        duration_s = self._clock.now() - record.began_at
        self._metrics.duration.observe(duration_s)
        log.info("drained %s for %s in %.0f s", node.name, record.request, duration_s)
        return self._condition_writer.flush_conditions(node.name)

    def _report_blockers(
        self, node: decide.DrainNode, running: _RunningDrain, blockers: ReportedBlockers
    ) -> float:
        """Report blockers on the Node and in an Event; return the delay until the next report."""
        now = self._clock.monotonic()
        known = parse_keys(node.drain_blocked)
        if blockers.keys != known:
            wait_s = running.reported_at + REPORT_INTERVAL_S - now
            if wait_s > 0:
                return wait_s
            self._nodes.write_blockers(node, blockers.annotation)
            running.reported_at = now
        if blockers.keys != known or not running.reported_message:
            running.reported_message, running.event_at = blockers.message, float("-inf")
        if running.reported_message and now - running.event_at >= _EVENT_INTERVAL_S:
            running.event_at = now
            request, started_at = (
                running.record.request,
                clocks.format_rfc3339(running.record.began_at),
            )
            message = (
                f"{request}, started at {started_at}, is blocked by {running.reported_message}"
            )
            self._emit_warning(node.name, "DrainBlocked", message)
            log.warning("drain of %s is blocked: %s", node.name, message)
        return REPORT_INTERVAL_S if blockers.next_report_in_s is None else blockers.next_report_in_s

    def _report_returned(self, name: str) -> None:
        """Name the owners whose pods run on the node although it is drained."""
        running = self._running.get(name)
        if running is None or not (groups := running.drain.returned_groups):
            return
        names = ", ".join(groups[:_MAX_NAMED_GROUPS])
        if len(groups) > _MAX_NAMED_GROUPS:
            names += f" and {len(groups) - _MAX_NAMED_GROUPS} more"
        message = (
            f"drained, but new pods came to the cordoned node each time: {names}; the reboot ends "
            "them. Remove spec.nodeName, or the toleration of node.kubernetes.io/unschedulable"
        )
        self._emit_warning(name, "PodsReturned", message)
        log.warning("%s: %s", name, message)

    def _on_budget_change(self, budget: str, _before: int | None, allowed: int | None) -> None:
        # A deleted budget allows all evictions.
        for name in self._budget_queue.find_next_nodes(
            budget, _UNLIMITED if allowed is None else allowed
        ):
            if (running := self._running.get(name)) is not None:
                running.drain.retry_budget(budget)
                self._enqueue(name)

    def _yield_slot(self, name: str, running: _RunningDrain) -> bool:
        """Pass the slot of a blocked drain to another node. The cordon and the report stay."""
        if (
            not running.is_blocked
            or self._clock.monotonic() - running.slot_taken_at < _BLOCKED_SLOT_S
        ):
            return False
        other = self._slots.yield_slot(name)
        if other is None:
            return False
        log.info("suspended the blocked drain of %s in favor of %s", name, other)
        self._close_drain(name)
        self._enqueue(other)
        return True

    def _start_drain(
        self, name: str, record: decide.DrainRecord, before: _RunningDrain | None = None
    ) -> _RunningDrain:
        """Start a drain; one whose node was uncordoned goes on with its blockers and reports."""
        drain = eviction.NodeDrain(
            self._client,
            name,
            self._clock,
            notify=lambda: self._enqueue(name),
            limit_s=_LIST_TIMEOUT_S,
            choose_retry_s=lambda blocker: self._budget_queue.compute_retry_s(
                name, record.began_at, blocker
            ),
            executor=self._executor,
            daemonsets=self._daemonsets,
        )
        drain.should_skip = self._rules.should_skip
        exit_stack = ExitStack()
        exit_stack.enter_context(drain)
        running = _RunningDrain(drain, exit_stack, record, self._clock.monotonic())
        if before is not None:
            drain.attempts = before.drain.attempts
            running = replace(before, drain=drain, exit_stack=exit_stack, record=record)
        self._running[name] = running
        return running

    def _end_drain(self, name: str) -> None:
        """End the drain of a node without a pending request, and pass its slot on."""
        self._close_drain(name)
        self._records.pop(name, None)
        other = self._slots.release_slot(name)
        if other is not None:
            self._enqueue(other)

    def _close_drain(self, name: str) -> _RunningDrain | None:
        self._budget_queue.remove_node(name)
        if (running := self._running.pop(name, None)) is not None:
            running.exit_stack.close()
        return running

    def _emit_warning(self, node: str, reason: str, message: str) -> None:
        # The kubelet uses the node name as the uid in its Events, and "kubectl describe node" finds
        # these.
        self._events.record_warning(
            event_recorder.ObjectReference("Node", node, uid=node), reason, message
        )

    def _register_gauges(self) -> None:
        def count_blocked() -> int:
            return sum(drain.is_blocked for drain in list(self._running.values()))

        def compute_longest_s() -> float:
            starts = [drain.record.began_at for drain in list(self._running.values())]
            return self._clock.now() - min(starts) if starts else 0.0

        drains = self._metrics.drains
        drains.set_function("running", by=lambda: float(self._slots.taken_count - count_blocked()))
        drains.set_function("blocked", by=lambda: float(count_blocked()))
        drains.set_function("waiting", by=lambda: float(self._slots.waiting_count))
        self._metrics.longest.set_function(by=compute_longest_s)


def _parse_disruptions_allowed(document: decode.Json) -> int:
    """Parse how many disruptions a PodDisruptionBudget allows now."""
    status = document.get("status")
    allowed = status.get("disruptionsAllowed") if isinstance(status, dict) else None
    return allowed if isinstance(allowed, int) else 0
