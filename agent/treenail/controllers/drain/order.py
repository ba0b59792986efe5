"""Which drain goes first: where there are more of them than may run, and where they compete.

Several nodes may wait for the same PodDisruptionBudget. If all asked as often, the disruptions
it allows would be spread over them and all would end late; so the drain that began first asks
as soon as the budget allows something, and ends first. No node waits for ever on behalf of
another: the others ask less often, but they ask.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from treenail.kube.eviction import Blocker, BlockerReason

FIRST_RETRY_S = 5.0
OTHERS_RETRY_S = 30.0


class DrainSlots:
    """Who of the nodes to be drained may be, at most ``limit`` at a time. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._taken: set[str] = set()
        # In the order of asking; a dict, because some leave from the middle.
        self._waiting: dict[str, None] = {}

    def try_acquire(self, node: str) -> bool:
        """Whether the node may be drained now; if not it waits, and is told by `release_slot`."""
        with self._lock:
            if node in self._taken:
                return True
            self._waiting.setdefault(node)
            free = self._limit - len(self._taken)
            if node not in list(self._waiting)[: max(free, 0)]:
                return False
            del self._waiting[node]
            self._taken.add(node)
            return True

    def release_slot(self, node: str) -> str | None:
        """The node needs no slot any more; who may take one now."""
        with self._lock:
            self._waiting.pop(node, None)
            self._taken.discard(node)
            return self._find_next()

    def yield_slot(self, node: str) -> str | None:
        """Let the one that waits longest have the node's slot, and wait; None if nobody waits."""
        with self._lock:
            if not self._waiting:
                return None
            self._taken.discard(node)
            self._waiting[node] = None
            return self._find_next()

    @property
    def taken_count(self) -> int:
        with self._lock:
            return len(self._taken)

    @property
    def waiting_count(self) -> int:
        with self._lock:
            return len(self._waiting)

    def _find_next(self) -> str | None:
        free = len(self._taken) < self._limit
        return next(iter(self._waiting), None) if free else None


@dataclass(frozen=True, slots=True)
class _QueueEntry:
    began_at: float
    pods_by_budget: Mapping[str, int]
    """How many pods wait for each budget."""


class BudgetQueue:
    """Who waits for which budget. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, _QueueEntry] = {}

    def set_waiting(self, node: str, began_at: float, blockers: Iterable[Blocker]) -> None:
        """The drain of a node, which began then, is held up by these."""
        pods = Counter(budget for each in blockers if (budget := _find_budget(each)))
        with self._lock:
            if pods:
                self._entries[node] = _QueueEntry(began_at, pods)
            else:
                self._entries.pop(node, None)

    def remove_node(self, node: str) -> None:
        """The drain of a node waits for nothing."""
        with self._lock:
            self._entries.pop(node, None)

    def compute_retry_s(self, node: str, began_at: float, blocker: Blocker) -> float:
        """After how many seconds the pod of a node is asked again."""
        budget = _find_budget(blocker)
        with self._lock:
            ahead = any(
                (place.began_at, other) < (began_at, node) and budget in place.pods_by_budget
                for other, place in self._entries.items()
                if other != node
            )
        return OTHERS_RETRY_S if ahead else FIRST_RETRY_S

    def find_next_nodes(self, budget: str, allowed: int) -> list[str]:
        """The nodes whose turn it is when a budget allows so many disruptions."""
        with self._lock:
            waiting = sorted(
                (place.began_at, node, place.pods_by_budget[budget])
                for node, place in self._entries.items()
                if budget in place.pods_by_budget
            )
        found: list[str] = []
        for _, node, pods in waiting:
            if allowed <= 0:
                break
            found.append(node)
            allowed -= pods
        return found


def _find_budget(blocker: Blocker) -> str:
    """The budget that a pod waits for, as ``namespace/name``.

    Empty for one that waits for something else; a pod of several budgets waits for a person.
    """
    if blocker.reason is not BlockerReason.BUDGET or len(blocker.budgets) != 1:
        return ""
    return f"{blocker.pod.partition('/')[0]}/{blocker.budgets[0].name}"
