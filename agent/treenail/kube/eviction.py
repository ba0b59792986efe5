"""Emptying a node: which pods go, asking them to, and the names of those that stay and why."""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from treenail.clock import Clock
from treenail.errors import (
    ClusterError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    TooManyRequestsError,
    UnreachableError,
)
from treenail.kube.client import Client, Json
from treenail.kube.informer import Informer
from treenail.kube.pod import Pod, parse_pod
from treenail.kube.resources import DAEMONSETS, NODES, PODDISRUPTIONBUDGETS, PODS
from treenail.kube.watch import WatchScope
from treenail.label_selector import matches_selector

log = logging.getLogger(__name__)

MAX_BLOCKERS = 10
# A refused eviction is asked for again as often as kubectl does; a pod that is on its way out
# gets a little longer than its grace period before it is called stuck.
_RETRY_S = 5.0
_TERMINATION_SLACK_S = 15.0
# A server that takes seconds for each eviction is not asked for all of them in one turn.
_ROUND_LIMIT_S = 10.0


class BlockerReason(StrEnum):
    """What keeps a pod on a node that is to be emptied."""

    BUDGET = "pdb"
    FINALIZER = "finalizer"
    WEBHOOK = "webhook"
    TERMINATION = "termination"
    VOLUME = "volume"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class DisruptionBudget:
    """A PodDisruptionBudget that selects a pod, and how many pods it lets go right now."""

    name: str
    disruptions_allowed: int


@dataclass(frozen=True, slots=True)
class Blocker:
    """One pod that does not go.

    ``message`` is the sentence of whoever refuses; ``since`` is when it was first found to stay,
    in seconds since the epoch.
    """

    pod: str
    reason: BlockerReason
    message: str
    budgets: tuple[DisruptionBudget, ...]
    since: float

    @property
    def summary(self) -> str:
        """All of it in a line for a person."""
        budgets = ", ".join(f"{one.name} allows {one.disruptions_allowed}" for one in self.budgets)
        return f"{self.pod}: {self.message}{f' ({budgets})' if budgets else ''}"


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """How far the node is: the pods still to go, and which of them do not by themselves.

    At most ten ``blockers`` are named, the oldest first; ``blocked_count`` counts all. Look again
    after ``retry_s``, or when a pod changed.
    """

    remaining: tuple[str, ...]
    blockers: tuple[Blocker, ...]
    blocked_count: int
    retry_s: float

    @property
    def is_drained(self) -> bool:
        """Whether nothing is left that has to go."""
        return not self.remaining


def should_evict(pod: Pod, daemonsets: Collection[str]) -> bool:
    """Whether draining removes it; ``daemonsets`` are the keys of those that exist.

    As ``kubectl drain --ignore-daemonsets --force --delete-emptydir-data``: everything but
    what a DaemonSet would start again at once, and what a file on the node starts. A pod of a
    DaemonSet that has finished goes too.
    """
    if pod.is_mirror:
        return False
    kept = pod.daemonset and f"{pod.namespace}/{pod.daemonset}" in daemonsets
    return pod.is_finished or not kept


def find_stuck_reason(pod: Pod, now: float) -> tuple[BlockerReason, str] | None:
    """Why a pod that was asked to go is still there after its time; None if that isn't over."""
    if pod.terminates_at is None or now < pod.terminates_at + _TERMINATION_SLACK_S:
        return None
    # With its last word, a deletion without grace, the kubelet says that the containers ended.
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
    pod: Pod, error: ClusterError, budgets: tuple[DisruptionBudget, ...], since: float
) -> Blocker | None:
    """What a refused eviction says; None if the server only has too much to do right now."""
    said = str(error).partition(": ")[2]
    if "webhook" in said:
        return Blocker(pod.key, BlockerReason.WEBHOOK, said, (), since)
    if isinstance(error, TooManyRequestsError) or len(budgets) > 1:
        # A pod of two budgets is refused with 500: the eviction API does not support it.
        if budgets or "disruption budget" in said:
            return Blocker(pod.key, BlockerReason.BUDGET, said, budgets, since)
        return None
    return Blocker(pod.key, BlockerReason.REFUSED, said, (), since)


def set_cordoned(client: Client, node: str, *, is_cordoned: bool) -> Json:
    """Set or clear ``spec.unschedulable``; the Node as it is then."""
    return client.patch(NODES, node, {"spec": {"unschedulable": is_cordoned or None}})


class NodeDrain:
    """The pods of one node, watched while they are asked to go; to be used in a ``with``.

    One thread calls ``evict_pods``, any may call ``retry_budget``; ``ring`` is called from another one when a
    pod changed. Cordon the node first, so that what is listed here stays all there is.
    ``patience`` says after how many seconds a pod that does not go is asked again, if not after
    five.
    """

    def __init__(
        self,
        client: Client,
        node: str,
        clock: Clock,
        *,
        notify: Callable[[], None],
        grace_s: int | None = None,
        limit_s: float = 30.0,
        choose_retry_s: Callable[[Blocker], float] = lambda _: _RETRY_S,
    ) -> None:
        self._client = client
        self._node = node
        self._clock = clock
        self._grace_s = grace_s
        self._limit_s = limit_s
        self._choose_retry_s = choose_retry_s
        self._last_error: ClusterError | None = None
        self._pods = Informer(
            client,
            WatchScope(PODS, field_selector=f"spec.nodeName={node}"),
            clock,
            parse_pod,
            on_lost=self._record_error,
        )
        self._pods.add_handler(lambda *_: notify())
        self._retried_budgets: deque[str] = deque()
        self._daemonsets: dict[str, bool] = {}
        self._attempts: dict[str, _EvictionAttempt] = {}

    def __enter__(self) -> Self:
        self._pods.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._pods.stop()

    def retry_budget(self, budget: str) -> None:
        """At the next turn, ask those again that this budget (``namespace/name``) kept."""
        self._retried_budgets.append(budget)

    def evict_pods(self) -> DrainProgress:
        """Ask every pod that has to go and was not asked lately; what is left afterwards.

        ClusterError when the API server can't be asked; what was asked is not forgotten.
        """
        if not self._pods.wait_until_synced(self._limit_s):
            raise self._last_error or UnreachableError(
                f"the pods of {self._node} are not known yet"
            )
        pods = list(self._pods.get_all().values())
        daemonsets = self._find_daemonsets(pods)
        leaving = [pod for pod in pods if should_evict(pod, daemonsets)]
        here = {pod.uid for pod in leaving}
        self._attempts = {uid: a for uid, a in self._attempts.items() if uid in here}
        budgets = _BudgetCache(self._client)
        hurried = {self._retried_budgets.popleft() for _ in range(len(self._retried_budgets))}
        end = self._clock.monotonic() + _ROUND_LIMIT_S
        in_time = True
        for pod in leaving:
            if pod.terminates_at is None:
                self._evict_pod(pod, budgets, hurried)
            if not (in_time := self._clock.monotonic() < end):
                break
        blockers = sorted(
            (blocker for pod in leaving if (blocker := self._find_blocker(pod))),
            key=lambda blocker: (blocker.since, blocker.pod),
        )
        return DrainProgress(
            remaining=tuple(sorted(pod.key for pod in leaving)),
            blockers=tuple(blockers[:MAX_BLOCKERS]),
            blocked_count=len(blockers),
            retry_s=_RETRY_S if in_time else 0.0,
        )

    def _evict_pod(self, pod: Pod, budgets: "_BudgetCache", hurried: Collection[str]) -> None:
        now = self._clock.monotonic()
        before = self._attempts.get(pod.uid)
        if before and now < before.retry_at and not _is_blocked_by(before.blocker, hurried):
            return
        refused: Blocker | None = None
        again_s = _RETRY_S
        try:
            self._client.evict(pod.namespace, pod.name, uid=pod.uid, grace_s=self._grace_s)
            log.info("evicted pod %s from %s", pod.key, self._node)
        except (NotFoundError, ConflictError):
            log.debug("pod %s is gone", pod.key)
        except UnreachableError:
            raise
        except ClusterError as error:
            if isinstance(error, TooManyRequestsError):
                again_s = max(again_s, error.retry_after_s)
            since = before.blocker.since if before and before.blocker else self._clock.now()
            refused = classify_refusal(pod, error, budgets.find_budgets(pod), since)
            if refused is not None:
                again_s = max(again_s, self._choose_retry_s(refused))
        self._attempts[pod.uid] = _EvictionAttempt(now + again_s, refused)

    def _find_blocker(self, pod: Pod) -> Blocker | None:
        if pod.terminates_at is None:
            answer = self._attempts.get(pod.uid)
            return answer.blocker if answer else None
        found = find_stuck_reason(pod, self._clock.now())
        return Blocker(pod.key, *found, (), pod.terminates_at) if found else None

    def _find_daemonsets(self, pods: Iterable[Pod]) -> set[str]:
        for pod in pods:
            key = f"{pod.namespace}/{pod.daemonset}"
            if pod.daemonset and key not in self._daemonsets:
                self._daemonsets[key] = self._has_daemonset(pod.namespace, pod.daemonset)
        return {key for key, exists in self._daemonsets.items() if exists}

    def _has_daemonset(self, namespace: str, daemonset: str) -> bool:
        try:
            self._client.get(DAEMONSETS, daemonset, namespace=namespace)
        except NotFoundError:
            return False
        except ForbiddenError as error:
            log.warning("taking the DaemonSet %s/%s as existing: %s", namespace, daemonset, error)
        return True

    def _record_error(self, error: ClusterError) -> None:
        self._last_error = error


@dataclass(frozen=True, slots=True)
class _EvictionAttempt:
    """What became of asking a pod to go, and when to ask again."""

    retry_at: float
    blocker: Blocker | None


def _is_blocked_by(refused: Blocker | None, budgets: Collection[str]) -> bool:
    """Whether one of the budgets, by ``namespace/name``, is what the pod was refused for."""
    if refused is None:
        return False
    namespace = refused.pod.partition("/")[0]
    return any(f"{namespace}/{budget.name}" in budgets for budget in refused.budgets)


class _BudgetCache:
    """The PodDisruptionBudgets, listed once a turn for each namespace where a pod is refused."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._listed: dict[str, Sequence[Json]] = {}

    def find_budgets(self, pod: Pod) -> tuple[DisruptionBudget, ...]:
        if pod.namespace not in self._listed:
            self._listed[pod.namespace] = self._list_budgets(pod.namespace)
        return tuple(
            _parse_budget(found)
            for found in self._listed[pod.namespace]
            if matches_selector(_get_object(found, "spec").get("selector"), pod.labels)
        )

    def _list_budgets(self, namespace: str) -> Sequence[Json]:
        try:
            return self._client.list(PODDISRUPTIONBUDGETS, namespace=namespace).items
        except (ForbiddenError, NotFoundError) as error:
            log.debug("the budgets of %s are not known: %s", namespace, error)
            return ()


def _parse_budget(found: Json) -> DisruptionBudget:
    allowed = _get_object(found, "status").get("disruptionsAllowed")
    name = str(_get_object(found, "metadata").get("name"))
    return DisruptionBudget(name, allowed if isinstance(allowed, int) else 0)


def _get_object(found: Json, key: str) -> Json:
    value = found.get(key)
    return value if isinstance(value, dict) else {}
