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
    Conflict,
    Forbidden,
    NotFound,
    TooManyRequests,
    Unreachable,
)
from treenail.kube.client import Client, Json
from treenail.kube.informer import Informer
from treenail.kube.pod import Pod, pod_from_json
from treenail.kube.resources import DAEMONSETS, NODES, PODDISRUPTIONBUDGETS, PODS
from treenail.kube.selector import selects
from treenail.kube.watch import Scope

log = logging.getLogger(__name__)

MOST_NAMED = 10
# A refused eviction is asked for again as often as kubectl does; a pod that is on its way out
# gets a little longer than its grace period before it is called stuck.
_AGAIN_S = 5.0
_SLACK_S = 15.0
# A server that takes seconds for each eviction is not asked for all of them in one turn.
_TURN_S = 10.0


class Reason(StrEnum):
    """What keeps a pod on a node that is to be emptied."""

    BUDGET = "pdb"
    FINALIZER = "finalizer"
    WEBHOOK = "webhook"
    TERMINATION = "termination"
    VOLUME = "volume"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Budget:
    """A PodDisruptionBudget that selects a pod, and how many pods it lets go right now."""

    name: str
    disruptions_allowed: int


@dataclass(frozen=True, slots=True)
class Blocker:
    """One pod that does not go.

    ``said`` is the sentence of whoever refuses; ``since`` is when it was first found to stay,
    in seconds since the epoch.
    """

    pod: str
    reason: Reason
    said: str
    budgets: tuple[Budget, ...]
    since: float

    @property
    def sentence(self) -> str:
        """All of it in a line for a person."""
        budgets = ", ".join(f"{one.name} allows {one.disruptions_allowed}" for one in self.budgets)
        return f"{self.pod}: {self.said}{f' ({budgets})' if budgets else ''}"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the node is: the pods still to go, and which of them do not by themselves.

    At most ten ``blockers`` are named, the oldest first; ``blocked`` counts all. Look again
    after ``again_s``, or when a pod changed.
    """

    remaining: tuple[str, ...]
    blockers: tuple[Blocker, ...]
    blocked: int
    again_s: float

    @property
    def empty(self) -> bool:
        """Whether nothing is left that has to go."""
        return not self.remaining


def has_to_go(pod: Pod, daemonsets: Collection[str]) -> bool:
    """Whether draining removes it; ``daemonsets`` are the keys of those that exist.

    As ``kubectl drain --ignore-daemonsets --force --delete-emptydir-data``: everything but
    what a DaemonSet would start again at once, and what a file on the node starts. A pod of a
    DaemonSet that has finished goes too.
    """
    if pod.mirror:
        return False
    kept = pod.daemonset and f"{pod.namespace}/{pod.daemonset}" in daemonsets
    return pod.finished or not kept


def stuck(pod: Pod, now: float) -> tuple[Reason, str] | None:
    """Why a pod that was asked to go is still there after its time; None if that isn't over."""
    if pod.terminates_at is None or now < pod.terminates_at + _SLACK_S:
        return None
    # With its last word, a deletion without grace, the kubelet says that the containers ended.
    if pod.running and pod.grace_s:
        return Reason.TERMINATION, f"still runs after its grace period of {pod.grace_s} s"
    if pod.finalizers:
        return Reason.FINALIZER, f"waits for {', '.join(pod.finalizers)}"
    if pod.claims:
        return Reason.VOLUME, f"its containers ended; it may wait for {', '.join(pod.claims)}"
    return Reason.TERMINATION, "its containers ended, but the kubelet does not remove it"


def refusal(
    pod: Pod, error: ClusterError, budgets: tuple[Budget, ...], since: float
) -> Blocker | None:
    """What a refused eviction says; None if the server only has too much to do right now."""
    said = str(error).partition(": ")[2]
    if "webhook" in said:
        return Blocker(pod.key, Reason.WEBHOOK, said, (), since)
    if isinstance(error, TooManyRequests) or len(budgets) > 1:
        # A pod of two budgets is refused with 500: the eviction API does not support it.
        if budgets or "disruption budget" in said:
            return Blocker(pod.key, Reason.BUDGET, said, budgets, since)
        return None
    return Blocker(pod.key, Reason.REFUSED, said, (), since)


def cordon(client: Client, node: str, *, cordoned: bool) -> Json:
    """Set or clear ``spec.unschedulable``; the Node as it is then."""
    return client.patch(NODES, node, {"spec": {"unschedulable": cordoned or None}})


class Drain:
    """The pods of one node, watched while they are asked to go; to be used in a ``with``.

    One thread calls ``turn``, any may call ``hurry``; ``ring`` is called from another one when a
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
        ring: Callable[[], None],
        grace_s: int | None = None,
        limit_s: float = 30.0,
        patience: Callable[[Blocker], float] = lambda _: _AGAIN_S,
    ) -> None:
        self._client = client
        self._node = node
        self._clock = clock
        self._grace_s = grace_s
        self._limit_s = limit_s
        self._patience = patience
        self._lost: ClusterError | None = None
        self._pods = Informer(
            client,
            Scope(PODS, field_selector=f"spec.nodeName={node}"),
            clock,
            pod_from_json,
            on_lost=self._lose,
        )
        self._pods.tell(lambda *_: ring())
        self._hurried: deque[str] = deque()
        self._daemonsets: dict[str, bool] = {}
        self._answers: dict[str, _Answer] = {}

    def __enter__(self) -> Self:
        self._pods.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._pods.stop()

    def hurry(self, budget: str) -> None:
        """At the next turn, ask those again that this budget (``namespace/name``) kept."""
        self._hurried.append(budget)

    def turn(self) -> Progress:
        """Ask every pod that has to go and was not asked lately; what is left afterwards.

        ClusterError when the API server can't be asked; what was asked is not forgotten.
        """
        if not self._pods.wait_until_synced(self._limit_s):
            raise self._lost or Unreachable(f"the pods of {self._node} are not known yet")
        pods = list(self._pods.all().values())
        daemonsets = self._existing_daemonsets(pods)
        leaving = [pod for pod in pods if has_to_go(pod, daemonsets)]
        here = {pod.uid for pod in leaving}
        self._answers = {uid: a for uid, a in self._answers.items() if uid in here}
        budgets = _Budgets(self._client)
        hurried = {self._hurried.popleft() for _ in range(len(self._hurried))}
        end = self._clock.monotonic() + _TURN_S
        in_time = True
        for pod in leaving:
            if pod.terminates_at is None:
                self._ask(pod, budgets, hurried)
            if not (in_time := self._clock.monotonic() < end):
                break
        blockers = sorted(
            (blocker for pod in leaving if (blocker := self._blocker(pod))),
            key=lambda blocker: (blocker.since, blocker.pod),
        )
        return Progress(
            remaining=tuple(sorted(pod.key for pod in leaving)),
            blockers=tuple(blockers[:MOST_NAMED]),
            blocked=len(blockers),
            again_s=_AGAIN_S if in_time else 0.0,
        )

    def _ask(self, pod: Pod, budgets: "_Budgets", hurried: Collection[str]) -> None:
        now = self._clock.monotonic()
        before = self._answers.get(pod.uid)
        if before and now < before.again_at and not _is_kept_by(before.refused, hurried):
            return
        refused: Blocker | None = None
        again_s = _AGAIN_S
        try:
            self._client.evict(pod.namespace, pod.name, uid=pod.uid, grace_s=self._grace_s)
            log.info("evicted pod %s from %s", pod.key, self._node)
        except (NotFound, Conflict):
            log.debug("pod %s is gone", pod.key)
        except Unreachable:
            raise
        except ClusterError as error:
            if isinstance(error, TooManyRequests):
                again_s = max(again_s, error.retry_after_s)
            since = before.refused.since if before and before.refused else self._clock.now()
            refused = refusal(pod, error, budgets.of(pod), since)
            if refused is not None:
                again_s = max(again_s, self._patience(refused))
        self._answers[pod.uid] = _Answer(now + again_s, refused)

    def _blocker(self, pod: Pod) -> Blocker | None:
        if pod.terminates_at is None:
            answer = self._answers.get(pod.uid)
            return answer.refused if answer else None
        found = stuck(pod, self._clock.now())
        return Blocker(pod.key, *found, (), pod.terminates_at) if found else None

    def _existing_daemonsets(self, pods: Iterable[Pod]) -> set[str]:
        for pod in pods:
            key = f"{pod.namespace}/{pod.daemonset}"
            if pod.daemonset and key not in self._daemonsets:
                self._daemonsets[key] = self._exists(pod.namespace, pod.daemonset)
        return {key for key, exists in self._daemonsets.items() if exists}

    def _exists(self, namespace: str, daemonset: str) -> bool:
        try:
            self._client.get(DAEMONSETS, daemonset, namespace=namespace)
        except NotFound:
            return False
        except Forbidden as error:
            log.warning("taking the DaemonSet %s/%s as existing: %s", namespace, daemonset, error)
        return True

    def _lose(self, error: ClusterError) -> None:
        self._lost = error


@dataclass(frozen=True, slots=True)
class _Answer:
    """What became of asking a pod to go, and when to ask again."""

    again_at: float
    refused: Blocker | None


def _is_kept_by(refused: Blocker | None, budgets: Collection[str]) -> bool:
    """Whether one of the budgets, by ``namespace/name``, is what the pod was refused for."""
    if refused is None:
        return False
    namespace = refused.pod.partition("/")[0]
    return any(f"{namespace}/{budget.name}" in budgets for budget in refused.budgets)


class _Budgets:
    """The PodDisruptionBudgets, listed once a turn for each namespace where a pod is refused."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._listed: dict[str, Sequence[Json]] = {}

    def of(self, pod: Pod) -> tuple[Budget, ...]:
        if pod.namespace not in self._listed:
            self._listed[pod.namespace] = self._list(pod.namespace)
        return tuple(
            _budget(found)
            for found in self._listed[pod.namespace]
            if selects(_table(found, "spec").get("selector"), pod.labels)
        )

    def _list(self, namespace: str) -> Sequence[Json]:
        try:
            return self._client.list(PODDISRUPTIONBUDGETS, namespace=namespace).items
        except (Forbidden, NotFound) as error:
            log.debug("the budgets of %s are not known: %s", namespace, error)
            return ()


def _budget(found: Json) -> Budget:
    allowed = _table(found, "status").get("disruptionsAllowed")
    name = str(_table(found, "metadata").get("name"))
    return Budget(name, allowed if isinstance(allowed, int) else 0)


def _table(found: Json, key: str) -> Json:
    value = found.get(key)
    return value if isinstance(value, dict) else {}
