"""Drain a node: choose pods, evict them, and report the pods that block the drain."""

import logging
import queue
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import StrEnum
from typing import ParamSpec, Self, TypeVar

from treenail import clocks, errors, label_selector, memory
from treenail.kube import api_client, resources
from treenail.kube.pods import DaemonSetCache, NodePods, Pod

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

MAX_BLOCKERS = 10
_MAX_LOGGED = 30
# kubectl drain retries a rejected eviction every 5 s (k8s.io/kubectl/pkg/drain). A terminating pod
# gets 15 s more than its grace period before it counts as stuck.
_RETRY_S = 5.0
_TERMINATION_SLACK_S = 15.0
# A pod with a longer grace period blocks from its eviction on.
_LONG_GRACE_S = 30
_MAX_RETURNS = 3
"""How many new pods of an owner are evicted whose pods this drain evicted before."""
# With a slow API server one round evicts only some of the pods.
_ROUND_LIMIT_S = 10.0
_MAX_IN_FLIGHT = 4
"""Evictions of one node that wait for an answer, so that no node uses all threads."""
_WAIT_S = 1.0
"""How long a round waits for an answer. Later answers count in the next round."""
_SLOW_S = 10.0
_UNANSWERED_RETRY_S = 30.0
_MAX_SELECTOR_BYTES = 64 * 1024


class BlockerReason(StrEnum):
    """Cause that keeps a pod on a node that is drained."""

    BUDGET = "pdb"
    FINALIZER = "finalizer"
    WEBHOOK = "webhook"
    TERMINATION = "termination"
    VOLUME = "volume"
    OVERLOAD = "overload"
    REFUSED = "refused"
    UNANSWERED = "unanswered"


@dataclass(frozen=True, slots=True)
class DisruptionBudget:
    """A PodDisruptionBudget of a pod, and the disruptions that it allows now."""

    name: str
    disruptions_allowed: int


@dataclass(frozen=True, slots=True)
class Blocker:
    """One pod that blocks the drain.

    ``message`` comes from the API server or describes the wait. ``since`` is the first time that
    the pod blocked, in seconds since the epoch.
    """

    pod: str
    reason: BlockerReason
    message: str
    budgets: tuple[DisruptionBudget, ...]
    since: float

    @property
    def summary(self) -> str:
        """The blocker in one line."""
        budgets = ", ".join(f"{one.name} allows {one.disruptions_allowed}" for one in self.budgets)
        return f"{self.pod}: {self.message}{f' ({budgets})' if budgets else ''}"


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """Progress of a drain: the remaining pods and those that block.

    ``blockers`` holds at most ten, the oldest first; ``blocked_count`` counts all. Call
    ``evict_pods`` again after ``retry_s``, or when ``notify`` is called.
    """

    remaining: tuple[str, ...]
    blockers: tuple[Blocker, ...]
    blocked_count: int
    retry_s: float

    @property
    def is_drained(self) -> bool:
        """True when no pod is left to evict."""
        return not self.remaining


def should_evict(pod: Pod, daemonsets: Collection[str]) -> bool:
    """Return True when a drain evicts the pod; ``daemonsets`` are the keys of existing ones.

    The rule is that of ``kubectl drain --ignore-daemonsets --force --delete-emptydir-data``: all
    pods except mirror pods and pods of an existing DaemonSet that have not finished.
    """
    # An eviction would remove only the mirror pod; the kubelet would create it again.
    if pod.is_mirror:
        return False
    is_restarted = bool(pod.daemonset) and f"{pod.namespace}/{pod.daemonset}" in daemonsets
    return pod.is_finished or not is_restarted


def is_overdue(pod: Pod, now: float) -> bool:
    """Return True when a terminating pod exists after its grace period."""
    return pod.terminates_at is not None and now >= pod.terminates_at + _TERMINATION_SLACK_S


def find_long_wait(pod: Pod) -> Blocker | None:
    """Return the blocker for a pod that may take long to terminate."""
    if pod.terminates_at is None or pod.grace_s <= _LONG_GRACE_S:
        return None
    end = clocks.format_rfc3339(pod.terminates_at)
    message = f"terminates until {end}: its grace period is {pod.grace_s} s"
    since = pod.terminates_at - pod.grace_s
    return Blocker(pod.key, BlockerReason.TERMINATION, message, (), since)


class ReturnedPods:
    """The pods that owners bind to the cordoned node again: by nodeName, or by a toleration.

    ``kubectl drain`` evicts the pods that it lists after the cordon, and waits for no later ones.
    A drain evicts later pods, too: the scheduler may bind a pod while the node is cordoned. But it
    would never end if the owner of evicted pods went on.
    """

    def __init__(self) -> None:
        self._evicted_groups: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._known_uids: set[str] = set()
        self._ignored_uids: set[str] = set()

    @property
    def ignored_groups(self) -> tuple[str, ...]:
        """The groups of pods for which the drain does not wait."""
        return tuple(group for group, count in self._counts.items() if count > _MAX_RETURNS)

    def note_evicted(self, pod: Pod) -> None:
        """Note that a pod was evicted: later ones of its group have returned."""
        self._evicted_groups.add(pod.group)

    def drop_ignored(self, pods: Iterable[Pod]) -> list[Pod]:
        """Return the pods that the drain evicts or waits for."""
        known, kept = set(), []
        for pod in pods:
            known.add(pod.uid)
            if pod.uid not in self._known_uids and pod.group in self._evicted_groups:
                self._counts[pod.group] += 1
                if self._counts[pod.group] > _MAX_RETURNS:
                    self._ignored_uids.add(pod.uid)
            if pod.uid not in self._ignored_uids:
                kept.append(pod)
        self._known_uids = known
        self._ignored_uids &= known
        return kept


def find_stuck_reason(pod: Pod, now: float) -> tuple[BlockerReason, str] | None:
    """Return why a terminating pod exists after its grace period; None before its end."""
    if not is_overdue(pod, now):
        return None
    # The kubelet deletes the pod with a grace period of 0 after its containers ended.
    if pod.is_running and pod.grace_s:
        return BlockerReason.TERMINATION, f"still runs after its grace period of {pod.grace_s} s"
    if pod.finalizers:
        return BlockerReason.FINALIZER, f"waits for {', '.join(pod.finalizers)}"
    if pod.claims:
        return (
            BlockerReason.VOLUME,
            f"its containers ended; it may wait for {', '.join(pod.claims)}",
        )
    return BlockerReason.TERMINATION, "its containers ended, but the kubelet does not remove it"


def classify_refusal(
    pod: Pod, error: errors.ClusterError, budgets: tuple[DisruptionBudget, ...], since: float
) -> Blocker:
    """Classify a rejected eviction."""
    message = str(error).partition(": ")[2]
    if "webhook" in message:
        return Blocker(pod.key, BlockerReason.WEBHOOK, message, (), since)
    # 429 has two causes: a budget, or an overloaded API server (API priority and fairness).
    if isinstance(error, errors.TooManyRequestsError) or len(budgets) > 1:
        # The eviction API rejects a pod with two budgets with status 500 (eviction.go).
        if budgets or "disruption budget" in message:
            return Blocker(pod.key, BlockerReason.BUDGET, message, budgets, since)
        overload = f"the API server rejects the eviction for now: {message}"
        return Blocker(pod.key, BlockerReason.OVERLOAD, overload, (), since)
    return Blocker(pod.key, BlockerReason.REFUSED, message, (), since)


class NodeDrain:
    """Evicts the pods of one node and watches them; use it as a context manager.

    One thread calls ``evict_pods``; any thread may call ``retry_budget``. ``notify`` runs on
    another thread when a pod is new and when the last one is removed. Cordon the node first.
    ``choose_retry_s`` returns the seconds until a blocked pod is evicted again (default: 5).
    ``executor`` sends the evictions; without one, the calling thread does. An eviction that the API
    server does not answer then blocks neither the other pods nor the caller. ``daemonsets`` may be
    shared by the drains of several nodes.
    """

    def __init__(
        self,
        client: api_client.Client,
        node: str,
        clock: clocks.Clock,
        *,
        notify: Callable[[], None],
        limit_s: float = 30.0,
        choose_retry_s: Callable[[Blocker], float] = lambda _: _RETRY_S,
        executor: Executor | None = None,
        daemonsets: DaemonSetCache | None = None,
    ) -> None:
        self._client = client
        self.should_skip: Callable[[Pod], bool] = lambda _: False
        """Returns whether a pod stays."""
        self._notify = notify
        self._executor = executor or InlineExecutor()
        self._in_flight: dict[str, _PendingEviction] = {}
        self._answers = queue.SimpleQueue[tuple[_PendingEviction, errors.ClusterError | None]]()
        self._node = node
        self._clock = clock
        self._limit_s = limit_s
        self._choose_retry_s = choose_retry_s
        self._pods = NodePods(client, node, clock, notify=notify)
        self._daemonsets = daemonsets or DaemonSetCache(client, clock)
        self._retried_budgets: deque[str] = deque()
        self._evicted: list[str] = []
        self.attempts: dict[str, _EvictionAttempt] = {}
        """The last attempt for each pod, by UID; a later drain of the node may take them over."""
        self._returned = ReturnedPods()

    @property
    def returned_groups(self) -> tuple[str, ...]:
        """The owners, as ``namespace/KIND NAME``, whose pods the drain leaves: they returned."""
        return self._returned.ignored_groups

    def __enter__(self) -> Self:
        self._pods.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._pods.stop()

    def retry_budget(self, budget: str) -> None:
        """Retry the pods that this budget (``namespace/name``) blocks in the next round."""
        self._retried_budgets.append(budget)

    def evict_pods(self) -> DrainProgress:
        """Evict each pod whose retry is due; return the progress.

        Raises ClusterError when the API server is unreachable. Earlier attempts are kept.
        """
        pods = self._pods.read_pods(self._limit_s)
        daemonsets = self._find_daemonsets(pods)
        evictable = self._returned.drop_ignored(
            pod for pod in pods if should_evict(pod, daemonsets) and not self.should_skip(pod)
        )
        current_uids = {pod.uid for pod in evictable}
        self.attempts = {
            uid: attempt for uid, attempt in self.attempts.items() if uid in current_uids
        }
        budgets = _BudgetCache(self._client)
        retried = {self._retried_budgets.popleft() for _ in range(len(self._retried_budgets))}
        is_in_time = self._run_round(evictable, budgets, retried)
        self._log_evicted()
        self._pods.await_removal(pod.key for pod in evictable)
        blockers = sorted(
            (blocker for pod in evictable if (blocker := self._find_blocker(pod))),
            key=lambda blocker: (blocker.since, blocker.pod),
        )
        return DrainProgress(
            remaining=tuple(sorted(pod.key for pod in evictable)),
            blockers=tuple(blockers[:MAX_BLOCKERS]),
            blocked_count=len(blockers),
            retry_s=_RETRY_S if is_in_time else 0.0,
        )

    def _run_round(
        self, pods: Sequence[Pod], budgets: "_BudgetCache", retried: Collection[str]
    ) -> bool:
        """Send the evictions that are due; return False when some are left for another round."""
        end = self._clock.monotonic() + _ROUND_LIMIT_S
        due = deque(self._find_due(pods, retried))
        results: list[errors.ClusterError | None] = []
        while self._clock.monotonic() < end:
            while due and len(self._in_flight) < _MAX_IN_FLIGHT:
                self._send_eviction(due.popleft())
            if not self._in_flight:
                break
            # An eviction that is slow already does not keep the round waiting.
            should_wait = not all(eviction.is_slow for eviction in self._in_flight.values())
            answered = self._collect_answers(budgets, _WAIT_S if should_wait else 0.0)
            if should_wait and not answered:
                for eviction in self._in_flight.values():
                    eviction.is_slow = True
                # An answer that came before the mark calls no `notify`.
                answered = self._collect_answers(budgets, 0.0)
            results += answered
            if not answered and len(self._in_flight) >= _MAX_IN_FLIGHT:
                break
            if not due and all(eviction.is_slow for eviction in self._in_flight.values()):
                break
        if results and all(isinstance(result, errors.UnreachableError) for result in results):
            # One webhook can delay all of them. Raises when the API server itself is unreachable.
            self._client.get(resources.NODES, self._node)
        # With all slots in use, an answer starts the next round.
        return not due or len(self._in_flight) >= _MAX_IN_FLIGHT

    def _find_due(self, pods: Iterable[Pod], retried: Collection[str]) -> list[Pod]:
        """Return the pods to evict now; those without an attempt first, then the oldest attempt."""
        now = self._clock.monotonic()
        due: list[tuple[float, Pod]] = []
        for pod in pods:
            if pod.terminates_at is not None or pod.uid in self._in_flight:
                continue
            before = self.attempts.get(pod.uid)
            if before and now < before.retry_at and not _is_blocked_by(before.blocker, retried):
                continue
            due.append((before.retry_at if before else float("-inf"), pod))
        return [pod for _, pod in sorted(due, key=lambda item: item[0])]

    def _send_eviction(self, pod: Pod) -> None:
        pending = _PendingEviction(pod, self._clock.monotonic(), self._clock.now())
        self._in_flight[pod.uid] = pending
        try:
            self._executor.submit(self._evict_pod, pending)
        except RuntimeError as error:
            # No thread could be started. An executor that has another one evicts the pod later.
            del self._in_flight[pod.uid]
            raise errors.ClusterError(f"cannot evict pod {pod.key}: {error}") from error

    def _evict_pod(self, pending: "_PendingEviction") -> None:
        pod = pending.pod
        answer: errors.ClusterError | None = None
        try:
            # By UID: a StatefulSet gives the next pod the same name.
            self._client.evict(pod.namespace, pod.name, uid=pod.uid)
        except errors.ClusterError as error:
            answer = error
        except Exception as error:
            # Without an answer the pod would count as sent without end. The log has the traceback.
            log.exception("cannot evict pod %s", pod.key)
            answer = errors.ClusterError(
                f"evict: the eviction was not sent: {type(error).__name__}"
            )
        self._answers.put((pending, answer))
        if pending.is_slow:
            self._notify()

    def _collect_answers(
        self, budgets: "_BudgetCache", wait_s: float
    ) -> list[errors.ClusterError | None]:
        """Record the answers that are there; wait up to ``wait_s`` for the first one."""
        answers: list[errors.ClusterError | None] = []
        while True:
            try:
                sent, answer = self._answers.get(timeout=0.0 if answers else wait_s)
            except queue.Empty:
                return answers
            if self._in_flight.get(sent.pod.uid) is not sent:
                continue
            del self._in_flight[sent.pod.uid]
            answers.append(answer)
            self._record_answer(sent, answer, budgets)

    def _record_answer(
        self, sent: "_PendingEviction", error: errors.ClusterError | None, budgets: "_BudgetCache"
    ) -> None:
        pod, retry_s = sent.pod, _RETRY_S
        before = self.attempts.get(pod.uid)
        since = before.blocker.since if before and before.blocker else sent.sent_at
        blocker: Blocker | None = None
        match error:
            case None:
                self._evicted.append(pod.key)
                self._returned.note_evicted(pod)
            case errors.NotFoundError() | errors.ConflictError():
                # A conflict is the precondition: another pod has the name now.
                log.debug("pod %s is gone", pod.key)
            case errors.UnreachableError():
                retry_s = _UNANSWERED_RETRY_S
                blocker = _build_unanswered(pod, since)
            case _:
                if isinstance(error, errors.TooManyRequestsError):
                    retry_s = max(retry_s, error.retry_after_s)
                blocker = classify_refusal(pod, error, budgets.find_budgets(pod), since)
                retry_s = max(retry_s, self._choose_retry_s(blocker))
        self.attempts[pod.uid] = _EvictionAttempt(sent.started_at + retry_s, blocker)

    def _log_evicted(self) -> None:
        # One line for a round: a line for each pod would cost more time than its eviction.
        if evicted := self._evicted:
            self._evicted = []
            more = f" and {len(evicted) - _MAX_LOGGED} more" if len(evicted) > _MAX_LOGGED else ""
            log.info("evicted from %s: %s%s", self._node, ", ".join(evicted[:_MAX_LOGGED]), more)

    def _find_blocker(self, pod: Pod) -> Blocker | None:
        if pod.terminates_at is None:
            attempt = self.attempts.get(pod.uid)
            sent = self._in_flight.get(pod.uid)
            if sent and self._clock.monotonic() - sent.started_at >= _SLOW_S:
                since = attempt.blocker.since if attempt and attempt.blocker else sent.sent_at
                return _build_unanswered(pod, since)
            return attempt.blocker if attempt else None
        now = self._clock.now()
        if not is_overdue(pod, now):
            return find_long_wait(pod)
        stuck_reason = find_stuck_reason(self._pods.read_details(pod), now)
        return Blocker(pod.key, *stuck_reason, (), pod.terminates_at) if stuck_reason else None

    def _find_daemonsets(self, pods: Iterable[Pod]) -> set[str]:
        owners = {(pod.namespace, pod.daemonset) for pod in pods if pod.daemonset}
        return {
            f"{namespace}/{name}"
            for namespace, name in owners
            if self._daemonsets.has_daemonset(namespace, name)
        }


class InlineExecutor(Executor):
    """Runs each call at once, on the calling thread."""

    def submit(
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> "futures.Future[T]":
        future: futures.Future[T] = futures.Future()
        future.set_result(fn(*args, **kwargs))
        return future


@dataclass(slots=True)
class _PendingEviction:
    """An eviction that was sent; ``started_at`` is monotonic, ``sent_at`` is since the epoch."""

    pod: Pod
    started_at: float
    sent_at: float
    is_slow: bool = False


def _build_unanswered(pod: Pod, since: float) -> Blocker:
    message = (
        "the API server does not answer the eviction; look for a slow admission webhook: kubectl "
        "get validatingwebhookconfigurations"
    )
    return Blocker(pod.key, BlockerReason.UNANSWERED, message, (), since)


@dataclass(frozen=True, slots=True)
class _EvictionAttempt:
    """Result of an eviction, and the monotonic time of the next attempt."""

    retry_at: float
    blocker: Blocker | None


def _is_blocked_by(blocker: Blocker | None, budgets: Collection[str]) -> bool:
    """Return True when one of the budgets (``namespace/name``) blocked the pod."""
    if blocker is None:
        return False
    namespace = blocker.pod.partition("/")[0]
    return any(f"{namespace}/{budget.name}" in budgets for budget in blocker.budgets)


class _BudgetCache:
    """PodDisruptionBudgets, listed once a round for each namespace with a rejected eviction."""

    def __init__(self, client: api_client.Client) -> None:
        self._client = client
        self._listed: dict[str, Sequence[tuple[object, DisruptionBudget]]] = {}

    def find_budgets(self, pod: Pod) -> tuple[DisruptionBudget, ...]:
        if pod.namespace not in self._listed:
            self._listed[pod.namespace] = self._list_budgets(pod.namespace)
        return tuple(
            budget
            for selector, budget in self._listed[pod.namespace]
            if label_selector.matches_selector(selector, pod.labels)
        )

    def _list_budgets(self, namespace: str) -> Sequence[tuple[object, DisruptionBudget]]:
        try:
            return self._client.list_parsed(
                resources.PODDISRUPTIONBUDGETS,
                lambda page: map(_parse_budget, page.items),
                namespace=namespace,
            )
        except (errors.ForbiddenError, errors.NotFoundError, errors.TooLargeError) as error:
            log.debug("cannot list the budgets of %s: %s", namespace, error)
            return ()


def _parse_budget(document: api_client.Json) -> tuple[object, DisruptionBudget]:
    """Return its selector, and the budget; a large selector matches all pods of the namespace."""
    selector = resources.get_object(document, "spec").get("selector")
    if memory.measure_bytes(selector) > _MAX_SELECTOR_BYTES:
        selector = {}
    allowed = resources.get_object(document, "status").get("disruptionsAllowed")
    name = str(resources.get_object(document, "metadata").get("name"))
    return selector, DisruptionBudget(name, allowed if isinstance(allowed, int) else 0)
