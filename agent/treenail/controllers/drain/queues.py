"""Order of drains: slots for running drains, and a queue for each PodDisruptionBudget.

Several drains may wait for the same budget. If all retried at the same rate, its disruptions would
be spread over all nodes and every drain would end late. So the drain that began first retries at
once when the budget allows a disruption. The others retry less often, so none starves.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from treenail.kube import eviction

FIRST_RETRY_S = 5.0
OTHERS_RETRY_S = 30.0


class DrainSlots:
    """Slots for at most ``limit`` running drains, first come, first served. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._taken: set[str] = set()
        # Ordered by arrival; a dict, because nodes also leave from the middle.
        self._waiting: dict[str, None] = {}

    def try_acquire(self, node: str) -> bool:
        """Take a slot and return True; without a free slot, queue the node and return False.

        `release_slot` and `yield_slot` return the node that should try again.
        """
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
        """Give the slot back and return the node that may take one now, or None."""
        with self._lock:
            self._waiting.pop(node, None)
            self._taken.discard(node)
            return self._find_next()

    def yield_slot(self, node: str) -> str | None:
        """Pass the slot to the node that waits longest, and wait; None if no node waits."""
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
        has_free = len(self._taken) < self._limit
        return next(iter(self._waiting), None) if has_free else None


@dataclass(frozen=True, slots=True)
class _QueueEntry:
    began_at: float
    pods_by_budget: Mapping[str, int]
    """Number of pods that wait for each budget."""


class BudgetQueue:
    """Nodes that wait for PodDisruptionBudgets. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, _QueueEntry] = {}

    def set_waiting(self, node: str, began_at: float, blockers: Iterable[eviction.Blocker]) -> None:
        """Set the blockers of a node's drain, which began at ``began_at``."""
        pods = Counter(budget for blocker in blockers if (budget := _find_budget(blocker)))
        with self._lock:
            if pods:
                self._entries[node] = _QueueEntry(began_at, pods)
            else:
                self._entries.pop(node, None)

    def remove_node(self, node: str) -> None:
        """Remove a node that waits for no budget."""
        with self._lock:
            self._entries.pop(node, None)

    def compute_retry_s(self, node: str, began_at: float, blocker: eviction.Blocker) -> float:
        """Compute after how many seconds to retry the eviction of a pod."""
        budget = _find_budget(blocker)
        with self._lock:
            is_behind = any(
                (entry.began_at, other) < (began_at, node) and budget in entry.pods_by_budget
                for other, entry in self._entries.items()
                if other != node
            )
        return OTHERS_RETRY_S if is_behind else FIRST_RETRY_S

    def find_next_nodes(self, budget: str, allowed: int) -> list[str]:
        """Find the nodes that may use the allowed disruptions, the oldest drain first."""
        with self._lock:
            waiting = sorted(
                (entry.began_at, node, entry.pods_by_budget[budget])
                for node, entry in self._entries.items()
                if budget in entry.pods_by_budget
            )
        nodes: list[str] = []
        for _, node, pods in waiting:
            if allowed <= 0:
                break
            nodes.append(node)
            allowed -= pods
        return nodes


def _find_budget(blocker: eviction.Blocker) -> str:
    """Return the budget that a pod waits for, as ``namespace/name``, or empty.

    The eviction API rejects pods with several budgets, so such a pod waits for a user.
    """
    if blocker.reason is not eviction.BlockerReason.BUDGET or len(blocker.budgets) != 1:
        return ""
    return f"{blocker.pod.partition('/')[0]}/{blocker.budgets[0].name}"
