"""Which nodes a drain would wait at: those with pods that no budget lets go just now."""

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from treenail.api.decode import Fields, Json
from treenail.api.meta import ObjectMeta
from treenail.api.selector import LabelSelector, optional_selector
from treenail.clock import Clock
from treenail.controllers.runtime.informers import Informers, View
from treenail.errors import ClusterError
from treenail.kube.client import Listing, Params
from treenail.kube.resources import PODDISRUPTIONBUDGETS, PODS, Resource
from treenail.kube.watch import Scope

log = logging.getLogger(__name__)

ASKED_AT_MOST = 20
"""Budgets whose pods are looked up; where more are exhausted, the order is the least concern."""
TRUE_FOR_S = 10.0
_OVER = ("Succeeded", "Failed")


class Api(Protocol):
    """The verb of a `Client` that it needs."""

    def list(self, resource: Resource, *, namespace: str, params: Params) -> Listing: ...


@dataclass(frozen=True, slots=True)
class Exhausted:
    """A budget that lets none of its pods go now."""

    namespace: str
    selector: LabelSelector

    @classmethod
    def from_json(cls, document: Json) -> "Exhausted | None":
        """The budget in a PodDisruptionBudget, None for one that lets pods go, or has none."""
        fields = Fields.of(document, "PodDisruptionBudget")
        status = fields.nested("status")
        selector = optional_selector(fields.nested("spec"), "selector")
        free = status.optional_integer("disruptionsAllowed") or 0
        if free > 0 or not status.optional_integer("expectedPods") or selector is None:
            return None
        meta = ObjectMeta.from_fields(fields.nested("metadata"))
        return cls(meta.namespace, selector)


class Budgets:
    """Watches the budgets, and looks up the pods of those that are exhausted. Thread-safe."""

    def __init__(self, api: Api, clock: Clock) -> None:
        self._api = api
        self._clock = clock
        self._exhausted: View[Exhausted] | None = None
        self._lock = threading.Lock()
        self._known: frozenset[str] = frozenset()
        self._known_until = float("-inf")

    def watch(self, informers: Informers) -> None:
        """Watch the budgets; a cluster need not have the kind."""
        scope = Scope(PODDISRUPTIONBUDGETS)
        self._exhausted = informers.view(scope, Exhausted.from_json, optional=True)

    def blocked(self) -> frozenset[str]:
        """The nodes that have such pods, as of a moment ago; none where that can't be told."""
        with self._lock:
            if self._clock.monotonic() >= self._known_until:
                self._known = frozenset(self._look())
                self._known_until = self._clock.monotonic() + TRUE_FOR_S
            return self._known

    def _look(self) -> Iterator[str]:
        found = {} if self._exhausted is None else self._exhausted.all()
        for _, budget in sorted(found.items())[:ASKED_AT_MOST]:
            params = {"labelSelector": budget.selector.query}
            try:
                pods = self._api.list(PODS, namespace=budget.namespace, params=params).items
            except ClusterError as error:
                log.info("the pods of a budget can't be looked up: %s", error)
                return
            for pod in pods:
                fields = Fields.of(pod, "Pod")
                node = fields.nested("spec").text("nodeName")
                if node and fields.nested("status").text("phase") not in _OVER:
                    yield node
