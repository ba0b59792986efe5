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
from treenail.clock import Clock, rfc3339
from treenail.controllers.drain.blocked import (
    NAMED_AFTER_S,
    RENAMED_AFTER_S,
    Blocked,
    blocked,
    keys_of,
)
from treenail.controllers.drain.conditions import Reporter, Stage, conditions
from treenail.controllers.drain.decide import (
    Cordon,
    Disown,
    Empty,
    NodeSeen,
    Record,
    Refuse,
    Rest,
    Uncordon,
    decide,
)
from treenail.controllers.drain.nodes import Nodes
from treenail.controllers.drain.order import Line, Slots
from treenail.controllers.runtime.informers import Informers
from treenail.controllers.runtime.metrics import SLOW_S, Metrics
from treenail.controllers.runtime.workers import LookAt
from treenail.errors import Conflict, Forbidden, Invalid
from treenail.kube.client import Client
from treenail.kube.events import Regarding
from treenail.kube.eviction import Drain
from treenail.kube.resources import NODES, PODDISRUPTIONBUDGETS
from treenail.kube.watch import Scope

log = logging.getLogger(__name__)

_AT_ONCE = 50
_LISTED_WITHIN_S = 2.0
_CONFLICTS = 3
_CONFLICT_S = 1.0
_SLOT_S = 30.0
_HELD_S = 60.0
"""How long a drain that is held up keeps its slot while others wait for one."""
_REMIND_S = 600.0
_ALL = 1_000_000


class Events(Protocol):
    """Where people are told."""

    def warning(self, regarding: Regarding, reason: str, message: str) -> None: ...


class Measured:
    """What is measured of drains."""

    def __init__(self, metrics: Metrics) -> None:
        self.took = metrics.histogram(
            "drain_duration_seconds",
            "From the cordon to the acknowledgement of a drain.",
            buckets=SLOW_S,
        )
        self.drains = metrics.gauge("drains", "Nodes to be drained, by state.", ("state",))
        self.longest = metrics.gauge(
            "longest_drain_seconds", "For how long the longest drain is under way."
        )


@dataclass(slots=True)
class _Running:
    """A drain under way in this process; nothing in it has to outlive the process."""

    drain: Drain
    ended: ExitStack
    record: Record
    since: float
    """When it got its slot, monotonic."""
    held_up: bool = False
    """Nothing goes by itself any more."""
    named: str = ""
    """What was said last to be in the way."""
    named_at: float = float("-inf")
    told_at: float = float("-inf")


class DrainController:
    """Cordons, empties and uncordons nodes, at most ``at_once`` of them at a time.

    What is in the way for ``named_after_s`` is named.
    """

    name = "drain"

    def __init__(
        self,
        client: Client,
        events: Events,
        clock: Clock,
        metrics: Metrics,
        *,
        at_once: int = _AT_ONCE,
        named_after_s: float = NAMED_AFTER_S,
    ) -> None:
        self._client = client
        self._events = events
        self._clock = clock
        self._measured = Measured(metrics)
        self._named_after_s = named_after_s
        self._slots = Slots(at_once)
        self._line = Line()
        self._reporter = Reporter(client, clock)
        # One entry for each node, touched only by the worker that has the node's turn.
        self._running: dict[str, _Running] = {}
        self._look_at: Callable[[str], None] = lambda _: None
        self._measure()

    def watch(self, informers: Informers, look_at: LookAt) -> None:
        """Look at a node when what it asks for or its cordon becomes another, or a budget it needs.

        Its pods are watched only while it is being drained.
        """
        view = informers.view(Scope(NODES), NodeSeen.from_json)
        view.tell(lambda name, _before, _after: look_at(name))
        informers.view(Scope(PODDISRUPTIONBUDGETS), _allowed).tell(self._budget_moved)
        self._nodes = Nodes(self._client, view)
        self._look_at = look_at

    def sync(self, key: str) -> float | None:
        """One turn for the node of that name."""
        node = self._nodes.newest(key)
        for _ in range(_CONFLICTS):
            if node is None:
                self._end(key)
                self._reporter.forget(key)
                return None
            try:
                return self._turn(node)
            except Conflict:
                node = self._nodes.read(key)
            except (Forbidden, Invalid) as error:
                self._warn(key, "DrainFailing", f"{node.asked} can't be done: {error}")
                raise
        return _CONFLICT_S

    def close(self) -> None:
        """End all watches; another controller goes on where this one stopped."""
        for name in list(self._running):
            self._end(name)

    def _turn(self, node: NodeSeen) -> float | None:
        match decide(node, self._clock.now()):
            case Rest(stale):
                self._end(node.name)
                if stale:
                    self._nodes.name_blockers(node, "")
                return self._reporter.keep(node.name)
            case Disown(record):
                self._end(node.name)
                self._nodes.disown(node, record)
                return self._reporter.keep(node.name)
            case Refuse(request):
                self._end(node.name)
                message = f"desiredDrain {request!r:.80} is neither drain-… nor uncordon-…"
                self._warn(node.name, "UnknownDrainRequest", message)
                return None
            case Uncordon(request, lift):
                return self._uncordon(node, request, lift=lift)
            case Cordon(record, again):
                if not self._slots.take(node.name):
                    return _SLOT_S
                return self._empty(self._cordon(node, record, again=again), record)
            case Empty(record):
                if not self._slots.take(node.name):
                    return _SLOT_S
                return self._empty(node, record)
            case other:
                assert_never(other)

    def _uncordon(self, node: NodeSeen, request: str, *, lift: bool) -> float | None:
        self._end(node.name)
        stays = node.unschedulable and not lift
        stage = Stage.LEFT_CORDONED if stays else Stage.UNCORDONED
        # Promised before, because the write may succeed and its answer be lost.
        self._reporter.promise(node.name, conditions(stage, request))
        self._nodes.uncordoned(node, lift=lift)
        log.info("%s applied on %s", request, node.name)
        return self._reporter.keep(node.name)

    def _cordon(self, node: NodeSeen, record: Record, *, again: bool) -> NodeSeen:
        # What is left is listed anew: pods may have come to it while it was schedulable.
        self._close(node.name)
        node = self._nodes.cordon(node, record)
        log.info("cordoned %s for %s", node.name, record.request)
        if again:
            message = f"Cordoned again: somebody uncordoned the node during {record.request}"
            self._warn(node.name, "CordonedAgain", message)
        return node

    def _empty(self, node: NodeSeen, record: Record) -> float | None:
        running = self._running.get(node.name) or self._start(node.name, record)
        progress = running.drain.turn()
        if progress.empty:
            return self._drained(node, record)
        self._line.wait(node.name, record.began, progress.blockers)
        running.held_up = progress.blocked == len(progress.remaining)
        now = self._clock.now()
        found = blocked(progress, node.blocked, now, after_s=self._named_after_s)
        again_s = self._name(node, running, found)
        self._reporter.tell(node.name, conditions(Stage.DRAINING, record.request, found.sentence))
        if self._gives_way(node.name, running):
            return _SLOT_S
        return min(progress.again_s, again_s)

    def _drained(self, node: NodeSeen, record: Record) -> float | None:
        # Before the acknowledgement, after which nobody would look at the node again.
        self._reporter.tell(node.name, conditions(Stage.DRAINED, record.request))
        self._nodes.drained(node)
        self._end(node.name)
        took_s = self._clock.now() - record.began
        self._measured.took.observe(took_s)
        log.info("%s applied on %s after %.0f s", record.request, node.name, took_s)
        return self._reporter.keep(node.name)

    def _name(self, node: NodeSeen, running: _Running, found: Blocked) -> float:
        """Name on the node, and in an event, what is in the way; when there may be more to say."""
        now = self._clock.monotonic()
        known = keys_of(node.blocked)
        if found.keys != known:
            wait_s = running.named_at + RENAMED_AFTER_S - now
            if wait_s > 0:
                return wait_s
            self._nodes.name_blockers(node, found.text)
            running.named_at = now
        if found.keys != known or not running.named:
            running.named, running.told_at = found.sentence, float("-inf")
        if running.named and now - running.told_at >= _REMIND_S:
            running.told_at = now
            request, began = running.record.request, rfc3339(running.record.began)
            message = f"{request}, begun at {began}, is held up by {running.named}"
            self._warn(node.name, "DrainBlocked", message)
            log.warning("%s: %s", node.name, message)
        return RENAMED_AFTER_S if found.due_in_s is None else found.due_in_s

    def _budget_moved(self, budget: str, _before: int | None, allowed: int | None) -> None:
        # A budget that is gone allows everything.
        for name in self._line.next(budget, _ALL if allowed is None else allowed):
            if (running := self._running.get(name)) is not None:
                running.drain.hurry(budget)
                self._look_at(name)

    def _gives_way(self, name: str, running: _Running) -> bool:
        """Let another node be drained while this one can't be; its cordon and names stay."""
        if not running.held_up or self._clock.monotonic() - running.since < _HELD_S:
            return False
        other = self._slots.give_way(name)
        if other is None:
            return False
        log.info("the drain of %s gives way to the one of %s", name, other)
        self._close(name)
        self._look_at(other)
        return True

    def _start(self, name: str, record: Record) -> _Running:
        drain = Drain(
            self._client,
            name,
            self._clock,
            ring=lambda: self._look_at(name),
            limit_s=_LISTED_WITHIN_S,
            patience=lambda blocker: self._line.patience_s(name, record.began, blocker),
        )
        ended = ExitStack()
        ended.enter_context(drain)
        running = _Running(drain, ended, record, self._clock.monotonic())
        self._running[name] = running
        return running

    def _end(self, name: str) -> None:
        """The node needs no slot: nothing is asked for, or what is asked for is done."""
        self._close(name)
        other = self._slots.leave(name)
        if other is not None:
            self._look_at(other)

    def _close(self, name: str) -> None:
        self._line.leave(name)
        if (running := self._running.pop(name, None)) is not None:
            running.ended.close()

    def _warn(self, node: str, reason: str, message: str) -> None:
        # As the kubelet's events of its Node, which kubectl looks for: the name as the uid.
        self._events.warning(Regarding("Node", node, uid=node), reason, message)

    def _measure(self) -> None:
        def held_up() -> int:
            return sum(each.held_up for each in list(self._running.values()))

        def longest_s() -> float:
            began = [each.record.began for each in list(self._running.values())]
            return self._clock.now() - min(began) if began else 0.0

        drains = self._measured.drains
        drains.read("running", by=lambda: float(self._slots.taken - held_up()))
        drains.read("blocked", by=lambda: float(held_up()))
        drains.read("waiting", by=lambda: float(self._slots.waiting))
        self._measured.longest.read(by=longest_s)


def _allowed(document: Json) -> int:
    """How many pods a PodDisruptionBudget lets go now."""
    status = document.get("status")
    allowed = status.get("disruptionsAllowed") if isinstance(status, dict) else None
    return allowed if isinstance(allowed, int) else 0
