"""Which nodes a drain would wait at: those with pods that no budget lets go just now."""

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from treenail.api.decode import Fields, Json
from treenail.api.meta import ObjectMeta
from treenail.clock import Clock
from treenail.controllers.runtime.informers import Informers, InformerView
from treenail.errors import ClusterError
from treenail.kube.client import Listing, Params
from treenail.kube.resources import PODDISRUPTIONBUDGETS, PODS, Resource
from treenail.kube.watch import WatchScope
from treenail.label_selector import LabelSelector, parse_optional_selector

log = logging.getLogger(__name__)

MAX_BUDGETS = 20
"""Budgets whose pods are looked up; where more are exhausted, the order is the least concern."""
CACHE_S = 10.0
_FINISHED_PHASES = ("Succeeded", "Failed")


class PodLister(Protocol):
    """The verb of a `Client` that it needs."""

    def list(self, resource: Resource, *, namespace: str, params: Params) -> Listing: ...


@dataclass(frozen=True, slots=True)
class ExhaustedBudget:
    """A budget that lets none of its pods go now."""

    namespace: str
    selector: LabelSelector

    @classmethod
    def from_json(cls, document: Json) -> "ExhaustedBudget | None":
        """The budget in a PodDisruptionBudget, None for one that lets pods go, or has none."""
        fields = Fields.from_json(document, "PodDisruptionBudget")
        status = fields.get_object("status")
        selector = parse_optional_selector(
            fields.get_object("spec").values.get("selector"), "PodDisruptionBudget.spec.selector"
        )
        free = status.get_optional_integer("disruptionsAllowed") or 0
        if free > 0 or not status.get_optional_integer("expectedPods") or selector is None:
            return None
        meta = ObjectMeta.from_fields(fields.get_object("metadata"))
        return cls(meta.namespace, selector)


class BudgetWatcher:
    """Watches the budgets, and looks up the pods of those that are exhausted. Thread-safe."""

    def __init__(self, api: PodLister, clock: Clock) -> None:
        self._api = api
        self._clock = clock
        self._exhausted: InformerView[ExhaustedBudget] | None = None
        self._lock = threading.Lock()
        self._blocked_nodes: frozenset[str] = frozenset()
        self._valid_until = float("-inf")

    def watch_budgets(self, informers: Informers) -> None:
        """Watch the budgets; a cluster need not have the kind."""
        scope = WatchScope(PODDISRUPTIONBUDGETS)
        self._exhausted = informers.add_view(scope, ExhaustedBudget.from_json, optional=True)

    def find_blocked_nodes(self) -> frozenset[str]:
        """The nodes that have such pods, as of a moment ago; none where that can't be told."""
        with self._lock:
            if self._clock.monotonic() >= self._valid_until:
                self._blocked_nodes = frozenset(self._list_blocked_nodes())
                self._valid_until = self._clock.monotonic() + CACHE_S
            return self._blocked_nodes

    def _list_blocked_nodes(self) -> Iterator[str]:
        found = {} if self._exhausted is None else self._exhausted.get_all()
        for _, budget in sorted(found.items())[:MAX_BUDGETS]:
            params = {"labelSelector": budget.selector.query}
            try:
                pods = self._api.list(PODS, namespace=budget.namespace, params=params).items
            except ClusterError as error:
                log.info("the pods of a budget can't be looked up: %s", error)
                return
            for pod in pods:
                fields = Fields.from_json(pod, "Pod")
                node = fields.get_object("spec").get_text("nodeName")
                if node and fields.get_object("status").get_text("phase") not in _FINISHED_PHASES:
                    yield node
