"""PodDisruptionBudgets that block drains: exhausted ones, and those that allow no eviction."""

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from treenail import clocks, errors, label_selector
from treenail.api import decode
from treenail.controllers.pools import node_selection
from treenail.controllers.runtime import informer_set
from treenail.encoding import codec
from treenail.kube import api_client, resources, watch

log = logging.getLogger(__name__)

MAX_BUDGETS = 20
"""Exhausted budgets whose pods are listed. Each costs a request, for the order of nodes alone."""
MAX_QUERY = 4096
"""Characters of a label selector in a URL. Any user can write one of 1 MB."""
CACHE_S = 10.0
_FINISHED_PHASES = ("Succeeded", "Failed")


class _BudgetFields(codec.Shape, where="PodDisruptionBudget"):
    name: Annotated[str, codec.Key("metadata.name")] = ""
    namespace: Annotated[str, codec.Key("metadata.namespace")] = ""
    selector: Annotated[label_selector.SelectorField | None, codec.Key("spec.selector")] = None
    max_unavailable: Annotated[object, codec.Key("spec.maxUnavailable")] = None
    min_available: Annotated[object, codec.Key("spec.minAvailable")] = None
    disruptions_allowed: Annotated[int, codec.Key("status.disruptionsAllowed")] = 0
    expected_pods: Annotated[int, codec.Key("status.expectedPods")] = 0


class _PodFields(codec.Shape, where="Pod"):
    labels: Annotated[Mapping[str, str], codec.Key("metadata.labels")]
    node: Annotated[str, codec.Key("spec.nodeName")] = ""
    phase: Annotated[str, codec.Key("status.phase")] = ""


@dataclass(frozen=True, slots=True)
class ExhaustedBudget:
    """A PodDisruptionBudget that allows no disruption now."""

    namespace: str
    selector: label_selector.LabelSelector

    @classmethod
    def from_json(cls, document: decode.Json) -> "ExhaustedBudget | None":
        """Parse a budget; None if it allows disruptions, selects no pod, or has a long selector."""
        budget = _BudgetFields.from_json(document)
        if budget.disruptions_allowed > 0 or not budget.expected_pods or budget.selector is None:
            return None
        is_long = len(budget.selector.query) > MAX_QUERY
        return None if is_long else cls(budget.namespace, budget.selector)


class BudgetWatcher:
    """Watches the budgets and lists the pods of exhausted ones. Thread-safe."""

    def __init__(self, client: api_client.Client, clock: clocks.Clock) -> None:
        self._client = client
        self._clock = clock
        self._exhausted: informer_set.InformerView[ExhaustedBudget] | None = None
        self._lock = threading.Lock()
        self._blocked_nodes: frozenset[str] = frozenset()
        self._valid_until = float("-inf")

    def watch_budgets(self, informers: informer_set.InformerSet) -> None:
        """Watch the budgets, if the cluster has the kind; only the order of nodes needs them."""
        scope = watch.WatchScope(resources.PODDISRUPTIONBUDGETS)
        self._exhausted = informers.add_view(
            scope, ExhaustedBudget.from_json, optional=True, required=False
        )

    def find_blocked_nodes(self) -> frozenset[str]:
        """Return the nodes with such pods, at most `CACHE_S` old; none when the list fails."""
        with self._lock:
            if self._clock.monotonic() >= self._valid_until:
                self._blocked_nodes = frozenset(self._list_blocked_nodes())
                self._valid_until = self._clock.monotonic() + CACHE_S
            return self._blocked_nodes

    def _list_blocked_nodes(self) -> Iterator[str]:
        exhausted = {} if self._exhausted is None else self._exhausted.get_all()
        for _, budget in sorted(exhausted.items())[:MAX_BUDGETS]:
            params = {"labelSelector": budget.selector.query}
            try:
                for page in self._client.list_pages(
                    resources.PODS, namespace=budget.namespace, params=params
                ):
                    for pod in map(_PodFields.from_json, page.items):
                        if pod.node and pod.phase not in _FINISHED_PHASES:
                            yield pod.node
            except errors.ClusterError as error:
                log.info("cannot list the pods of a PodDisruptionBudget: %s", error)
                return


@dataclass(frozen=True, slots=True)
class BlockingBudget:
    """A budget that never allows an eviction, and the nodes of its pods."""

    name: str
    """``namespace/name``."""
    reason: str
    nodes: tuple[str, ...] = ()

    def blocks(self, nodes: Iterable[str]) -> bool:
        """Return True when a pod of the budget is on one of the nodes."""
        return not frozenset(self.nodes).isdisjoint(nodes)


def find_blocking_reason(budget: decode.Json) -> str:
    """Return why the budget allows no eviction with all pods healthy; empty when it does."""
    try:
        fields = _BudgetFields.from_json(budget)
    except errors.ConfigError as error:
        return str(error)
    expected, most, least = fields.expected_pods, fields.max_unavailable, fields.min_available
    if most in (0, "0", "0%"):
        return f"maxUnavailable is {most}"
    if isinstance(least, str) and (percent := node_selection.PERCENTAGE.fullmatch(least)):
        # The disruption controller rounds up (GetScaledValueFromIntOrPercent with roundUp).
        needed = -(-expected * int(percent[1]) // 100)
    elif isinstance(least, int):
        needed = least
    else:
        return ""
    if expected and needed >= expected:
        return f"minAvailable is {least} with {expected} pods"
    return ""


def find_blocking_budget(
    budget: decode.Json, pods: Sequence[Mapping[str, object]]
) -> BlockingBudget | None:
    """Return the budget with the nodes of its pods; None when it can pass or has no pod.

    ``pods`` are the pods of its namespace.
    """
    why = find_blocking_reason(budget)
    try:
        fields = _BudgetFields.from_json(budget)
    except errors.ConfigError:
        return None
    if not why:
        return None
    nodes = set()
    for pod in pods:
        placed = _PodFields.from_json(pod)
        node = placed.node
        if node and fields.selector is not None and fields.selector.matches(placed.labels):
            nodes.add(node)
    return (
        BlockingBudget(f"{fields.namespace}/{fields.name}", why, tuple(sorted(nodes)))
        if nodes
        else None
    )
