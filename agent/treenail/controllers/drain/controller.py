"""The drain controller: what Nodes ask for by ``desiredDrain``, done and acknowledged.

A turn never waits for a pod: it asks those to go that were not asked lately, says what is in the
way, and returns. A pod that changes rings for the next turn.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, assert_never

from treenail.api.decode import Json
from treenail.clock import Clock, format_rfc3339
from treenail.controllers.drain.blocked import (
    REPORT_AFTER_S,
    REPORT_INTERVAL_S,
    ReportedBlockers,
    find_reportable,
    parse_keys,
)
from treenail.controllers.drain.conditions import (
    DrainConditionWriter,
    DrainStage,
    build_drain_conditions,
)
from treenail.controllers.drain.decide import (
    CordonDecision,
    DisownCordonDecision,
    DrainNode,
    DrainRecord,
    EvictDecision,
    IdleDecision,
    RejectDecision,
    UncordonDecision,
    decide_drain,
)
from treenail.controllers.drain.nodes import DrainNodeClient
from treenail.controllers.drain.order import BudgetQueue, DrainSlots
from treenail.controllers.runtime.informers import Informers
from treenail.controllers.runtime.metrics import SLOW_BUCKETS_S, ControllerMetrics
from treenail.controllers.runtime.workers import Enqueue
from treenail.errors import ConflictError, ForbiddenError, InvalidError
from treenail.kube.client import Client
from treenail.kube.events import ObjectReference
from treenail.kube.eviction import NodeDrain
from treenail.kube.resources import NODES, PODDISRUPTIONBUDGETS
from treenail.kube.watch import WatchScope

log = logging.getLogger(__name__)

_MAX_PARALLEL = 50
_LIST_TIMEOUT_S = 2.0
_MAX_CONFLICTS = 3
_CONFLICT_RETRY_S = 1.0
_SLOT_RETRY_S = 30.0
_BLOCKED_SLOT_S = 60.0
"""How long a drain that is held up keeps its slot while others wait for one."""
_EVENT_INTERVAL_S = 600.0
_UNLIMITED = 1_000_000


class DrainEvents(Protocol):
    """Where people are told."""

    def record_warning(self, regarding: ObjectReference, reason: str, message: str) -> None: ...


class DrainMetrics:
    """What is measured of drains."""

    def __init__(self, metrics: ControllerMetrics) -> None:
        self.duration = metrics.add_histogram(
            "drain_duration_seconds",
            "From the cordon to the acknowledgement of a drain.",
            buckets=SLOW_BUCKETS_S,
        )
        self.drains = metrics.add_gauge("drains", "Nodes to be drained, by state.", ("state",))
        self.longest = metrics.add_gauge(
            "longest_drain_seconds", "For how long the longest drain is under way."
        )


@dataclass(slots=True)
class _RunningDrain:
    """A drain under way in this process; nothing in it has to outlive the process."""

    drain: NodeDrain
    exit_stack: ExitStack
    record: DrainRecord
    slot_taken_at: float
    """When it got its slot, monotonic."""
    is_blocked: bool = False
    """Nothing goes by itself any more."""
    reported_message: str = ""
    """What was said last to be in the way."""
    reported_at: float = float("-inf")
    event_at: float = float("-inf")


class DrainController:
    """Cordons, empties and uncordons nodes, at most ``at_once`` of them at a time.

    What is in the way for ``named_after_s`` is named.
    """

    name = "drain"

    def __init__(
        self,
        client: Client,
        events: DrainEvents,
        clock: Clock,
        metrics: ControllerMetrics,
        *,
        max_parallel: int = _MAX_PARALLEL,
        report_after_s: float = REPORT_AFTER_S,
    ) -> None:
        self._client = client
        self._events = events
        self._clock = clock
        self._metrics = DrainMetrics(metrics)
        self._report_after_s = report_after_s
        self._slots = DrainSlots(max_parallel)
        self._budget_queue = BudgetQueue()
        self._condition_writer = DrainConditionWriter(client, clock)
        # One entry for each node, touched only by the worker that has the node's turn.
        self._running: dict[str, _RunningDrain] = {}
        self._enqueue: Callable[[str], None] = lambda _: None
        self._register_gauges()

    def register_watches(self, informers: Informers, enqueue: Enqueue) -> None:
        """Look at a node when what it asks for or its cordon becomes another, or a budget it needs.

        Its pods are watched only while it is being drained.
        """
        view = informers.add_view(WatchScope(NODES), DrainNode.from_json)
        view.add_handler(lambda name, _before, _after: enqueue(name))
        informers.add_view(
            WatchScope(PODDISRUPTIONBUDGETS), _parse_disruptions_allowed
        ).add_handler(self._on_budget_change)
        self._nodes = DrainNodeClient(self._client, view)
        self._enqueue = enqueue

    def sync_key(self, key: str) -> float | None:
        """One turn for the node of that name."""
        node = self._nodes.get_latest(key)
        for _ in range(_MAX_CONFLICTS):
            if node is None:
                self._end_drain(key)
                self._condition_writer.forget_node(key)
                return None
            try:
                return self._apply_decision(node)
            except ConflictError:
                node = self._nodes.read_node(key)
            except (ForbiddenError, InvalidError) as error:
                self._emit_warning(
                    key, "DrainFailing", f"{node.desired_drain} can't be done: {error}"
                )
                raise
        return _CONFLICT_RETRY_S

    def close(self) -> None:
        """End all watches; another controller goes on where this one stopped."""
        for name in list(self._running):
            self._end_drain(name)

    def _apply_decision(self, node: DrainNode) -> float | None:
        match decide_drain(node, self._clock.now()):
            case IdleDecision(stale):
                self._end_drain(node.name)
                if stale:
                    self._nodes.write_blockers(node, "")
                return self._condition_writer.flush_conditions(node.name)
            case DisownCordonDecision(record):
                self._end_drain(node.name)
                self._nodes.disown_cordon(node, record)
                return self._condition_writer.flush_conditions(node.name)
            case RejectDecision(request):
                self._end_drain(node.name)
                message = f"desiredDrain {request!r:.80} is neither drain-… nor uncordon-…"
                self._emit_warning(node.name, "UnknownDrainRequest", message)
                return None
            case UncordonDecision(request, lift):
                return self._uncordon_node(node, request, should_uncordon=lift)
            case CordonDecision(record, again):
                if not self._slots.try_acquire(node.name):
                    return _SLOT_RETRY_S
                return self._evict_pods(self._cordon_node(node, record, is_repeated=again), record)
            case EvictDecision(record):
                if not self._slots.try_acquire(node.name):
                    return _SLOT_RETRY_S
                return self._evict_pods(node, record)
            case other:
                assert_never(other)

    def _uncordon_node(
        self, node: DrainNode, request: str, *, should_uncordon: bool
    ) -> float | None:
        self._end_drain(node.name)
        stays = node.unschedulable and not should_uncordon
        stage = DrainStage.LEFT_CORDONED if stays else DrainStage.UNCORDONED
        # Promised before, because the write may succeed and its answer be lost.
        self._condition_writer.queue_conditions(node.name, build_drain_conditions(stage, request))
        self._nodes.acknowledge_uncordon(node, should_uncordon=should_uncordon)
        log.info("%s applied on %s", request, node.name)
        return self._condition_writer.flush_conditions(node.name)

    def _cordon_node(self, node: DrainNode, record: DrainRecord, *, is_repeated: bool) -> DrainNode:
        # What is left is listed anew: pods may have come to it while it was schedulable.
        self._close_drain(node.name)
        node = self._nodes.cordon_node(node, record)
        log.info("cordoned %s for %s", node.name, record.request)
        if is_repeated:
            message = f"Cordoned again: somebody uncordoned the node during {record.request}"
            self._emit_warning(node.name, "CordonedAgain", message)
        return node

    def _evict_pods(self, node: DrainNode, record: DrainRecord) -> float | None:
        running = self._running.get(node.name) or self._start_drain(node.name, record)
        progress = running.drain.evict_pods()
        if progress.is_drained:
            return self._finish_drain(node, record)
        self._budget_queue.set_waiting(node.name, record.began_at, progress.blockers)
        running.is_blocked = progress.blocked_count == len(progress.remaining)
        now = self._clock.now()
        found = find_reportable(
            progress, node.drain_blocked, now, report_after_s=self._report_after_s
        )
        again_s = self._report_blockers(node, running, found)
        self._condition_writer.write_conditions(
            node.name, build_drain_conditions(DrainStage.DRAINING, record.request, found.message)
        )
        if self._yield_slot(node.name, running):
            return _SLOT_RETRY_S
        return min(progress.retry_s, again_s)

    def _finish_drain(self, node: DrainNode, record: DrainRecord) -> float | None:
        # Before the acknowledgement, after which nobody would look at the node again.
        self._condition_writer.write_conditions(
            node.name, build_drain_conditions(DrainStage.DRAINED, record.request)
        )
        self._nodes.acknowledge_drain(node)
        self._end_drain(node.name)
        took_s = self._clock.now() - record.began_at
        self._metrics.duration.observe(took_s)
        log.info("%s applied on %s after %.0f s", record.request, node.name, took_s)
        return self._condition_writer.flush_conditions(node.name)

    def _report_blockers(
        self, node: DrainNode, running: _RunningDrain, blockers: ReportedBlockers
    ) -> float:
        """Name on the node, and in an event, what is in the way; when there may be more to say."""
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
            request, began = running.record.request, format_rfc3339(running.record.began_at)
            message = f"{request}, begun at {began}, is held up by {running.reported_message}"
            self._emit_warning(node.name, "DrainBlocked", message)
            log.warning("%s: %s", node.name, message)
        return REPORT_INTERVAL_S if blockers.next_report_in_s is None else blockers.next_report_in_s

    def _on_budget_change(self, budget: str, _before: int | None, allowed: int | None) -> None:
        # A budget that is gone allows everything.
        for name in self._budget_queue.find_next_nodes(
            budget, _UNLIMITED if allowed is None else allowed
        ):
            if (running := self._running.get(name)) is not None:
                running.drain.retry_budget(budget)
                self._enqueue(name)

    def _yield_slot(self, name: str, running: _RunningDrain) -> bool:
        """Let another node be drained while this one can't be; its cordon and names stay."""
        if (
            not running.is_blocked
            or self._clock.monotonic() - running.slot_taken_at < _BLOCKED_SLOT_S
        ):
            return False
        other = self._slots.yield_slot(name)
        if other is None:
            return False
        log.info("the drain of %s gives way to the one of %s", name, other)
        self._close_drain(name)
        self._enqueue(other)
        return True

    def _start_drain(self, name: str, record: DrainRecord) -> _RunningDrain:
        drain = NodeDrain(
            self._client,
            name,
            self._clock,
            notify=lambda: self._enqueue(name),
            limit_s=_LIST_TIMEOUT_S,
            choose_retry_s=lambda blocker: self._budget_queue.compute_retry_s(
                name, record.began_at, blocker
            ),
        )
        ended = ExitStack()
        ended.enter_context(drain)
        running = _RunningDrain(drain, ended, record, self._clock.monotonic())
        self._running[name] = running
        return running

    def _end_drain(self, name: str) -> None:
        """The node needs no slot: nothing is asked for, or what is asked for is done."""
        self._close_drain(name)
        other = self._slots.release_slot(name)
        if other is not None:
            self._enqueue(other)

    def _close_drain(self, name: str) -> None:
        self._budget_queue.remove_node(name)
        if (running := self._running.pop(name, None)) is not None:
            running.exit_stack.close()

    def _emit_warning(self, node: str, reason: str, message: str) -> None:
        # As the kubelet's events of its Node, which kubectl looks for: the name as the uid.
        self._events.record_warning(ObjectReference("Node", node, uid=node), reason, message)

    def _register_gauges(self) -> None:
        def held_up() -> int:
            return sum(each.is_blocked for each in list(self._running.values()))

        def longest_s() -> float:
            began = [each.record.began_at for each in list(self._running.values())]
            return self._clock.now() - min(began) if began else 0.0

        drains = self._metrics.drains
        drains.set_function("running", by=lambda: float(self._slots.taken_count - held_up()))
        drains.set_function("blocked", by=lambda: float(held_up()))
        drains.set_function("waiting", by=lambda: float(self._slots.waiting_count))
        self._metrics.longest.set_function(by=longest_s)


def _parse_disruptions_allowed(document: Json) -> int:
    """How many pods a PodDisruptionBudget lets go now."""
    status = document.get("status")
    allowed = status.get("disruptionsAllowed") if isinstance(status, dict) else None
    return allowed if isinstance(allowed, int) else 0
