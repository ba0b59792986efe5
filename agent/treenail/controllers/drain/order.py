"""Which drain goes first: where there are more of them than may run, and where they compete.

Several nodes may wait for the same PodDisruptionBudget. If all asked as often, the disruptions
it allows would be spread over them and all would end late; so the drain that began first asks
more often, and ends first. No node waits for ever on behalf of another: the others ask less
often, but they ask.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from treenail.kube.eviction import Blocker, Reason

FIRST_ASKS_S = 5.0
OTHERS_ASK_S = 30.0


class Slots:
    """Who of the nodes to be drained may be, at most ``limit`` at a time. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._taken: set[str] = set()
        # In the order of asking; a dict, because some leave from the middle.
        self._waiting: dict[str, None] = {}

    def take(self, node: str) -> bool:
        """Whether the node may be drained now; if not it waits, and is told by `leave`."""
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

    def leave(self, node: str) -> str | None:
        """The node needs no slot any more; who may take one now."""
        with self._lock:
            self._waiting.pop(node, None)
            self._taken.discard(node)
            return self._next()

    def give_way(self, node: str) -> str | None:
        """Let the one that waits longest have the node's slot, and wait; None if nobody waits."""
        with self._lock:
            if not self._waiting:
                return None
            self._taken.discard(node)
            self._waiting[node] = None
            return self._next()

    @property
    def taken(self) -> int:
        with self._lock:
            return len(self._taken)

    @property
    def waiting(self) -> int:
        with self._lock:
            return len(self._waiting)

    def _next(self) -> str | None:
        free = len(self._taken) < self._limit
        return next(iter(self._waiting), None) if free else None


@dataclass(frozen=True, slots=True)
class _Place:
    began: float
    budgets: frozenset[str]


class Line:
    """Who waits for which budget. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[str, _Place] = {}

    def wait(self, node: str, began: float, blockers: Iterable[Blocker]) -> None:
        """The drain of a node, which began then, is held up by these."""
        budgets = frozenset(budget for each in blockers for budget in _budgets(each))
        with self._lock:
            if budgets:
                self._places[node] = _Place(began, budgets)
            else:
                self._places.pop(node, None)

    def leave(self, node: str) -> None:
        """The drain of a node waits for nothing."""
        with self._lock:
            self._places.pop(node, None)

    def patience_s(self, node: str, began: float, blocker: Blocker) -> float:
        """After how many seconds the pod of a node is asked again."""
        budgets = _budgets(blocker)
        with self._lock:
            ahead = any(
                (place.began, other) < (began, node) and place.budgets & budgets
                for other, place in self._places.items()
                if other != node
            )
        return OTHERS_ASK_S if ahead else FIRST_ASKS_S


def _budgets(blocker: Blocker) -> frozenset[str]:
    """The budget that a pod waits for; a pod of several waits for a person."""
    if blocker.reason is not Reason.BUDGET or len(blocker.budgets) != 1:
        return frozenset()
    namespace = blocker.pod.partition("/")[0]
    return frozenset({f"{namespace}/{blocker.budgets[0].name}"})
