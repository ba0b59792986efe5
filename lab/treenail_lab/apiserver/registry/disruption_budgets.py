"""The disruption controller: it computes the status of PodDisruptionBudgets."""

import math
from collections.abc import Iterator, Sequence

from treenail_lab.apiserver.access.authentication import MASTERS, ApiUser
from treenail_lab.apiserver.objects import (
    Json,
    find_value,
    is_deleting,
    read_labels,
    read_owner_references,
)
from treenail_lab.apiserver.registry.registry import ObjectRegistry, WriteContext
from treenail_lab.apiserver.schema.kinds import StorageKey
from treenail_lab.apiserver.schema.selectors import compile_selector
from treenail_lab.apiserver.storage.store import Store, StoreEvent

BUDGETS: StorageKey = ("policy", "poddisruptionbudgets")
PODS: StorageKey = ("", "pods")
_WORKLOADS: dict[str, StorageKey] = {
    "Deployment": ("apps", "deployments"),
    "ReplicaSet": ("apps", "replicasets"),
}
_COUNTED = frozenset({BUDGETS, PODS, *_WORKLOADS.values()})
_WRITE_CONTEXT = WriteContext(
    ApiUser("system:serviceaccount:kube-system:disruption-controller", (MASTERS,)),
    "kube-controller-manager",
)


def find_budgets(store: Store, pod: Json) -> list[Json]:
    """Return the budgets whose selector matches the pod."""
    namespace = pod["metadata"]["namespace"]
    return [
        budget
        for budget in store.list_objects(BUDGETS, namespace)
        if compile_selector(find_value(budget, "spec", "selector"))(read_labels(pod))
    ]


def is_ready(pod: Json) -> bool:
    return any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in find_value(pod, "status", "conditions") or []
    )


class DisruptionController:
    """Writes the status of every budget."""

    def __init__(self, registry: ObjectRegistry) -> None:
        self._registry = registry
        self._dirty: set[str] = set()

    def note_event(self, storage: StorageKey, event: StoreEvent) -> bool:
        """Record the namespace of a change to budgets or pods; return whether it is one."""
        if storage not in _COUNTED:
            return False
        self._dirty.add(event.object["metadata"]["namespace"])
        return True

    def reload(self) -> None:
        """Record the namespaces of all budgets, after the store was loaded."""
        self._dirty = {budget["metadata"]["namespace"] for budget in self._list_budgets("")}

    def sync(self) -> None:
        """Write each status that differs."""
        kind = self._registry.kinds.find_kind(BUDGETS[0], "v1", BUDGETS[1])
        for namespace in sorted(self._dirty):
            for budget in self._list_budgets(namespace):
                status = _compute_status(self._registry, budget)
                if status != budget.get("status"):
                    name = budget["metadata"]["name"]

                    def change(old: Json, status: Json = status) -> Json:
                        return old | {"status": status}

                    self._registry.update_object(
                        kind, namespace, name, change, _WRITE_CONTEXT, "status"
                    )
        self._dirty.clear()

    def _list_budgets(self, namespace: str) -> Sequence[Json]:
        return self._registry.store.list_objects(BUDGETS, namespace)


def _compute_status(registry: ObjectRegistry, budget: Json) -> Json:
    namespace = budget["metadata"]["namespace"]
    matches = compile_selector(find_value(budget, "spec", "selector"))
    pods = [
        pod for pod in registry.store.list_objects(PODS, namespace) if matches(read_labels(pod))
    ]
    old = budget.get("status") or {}
    alive = {pod["metadata"]["name"] for pod in pods if not is_deleting(pod)}
    disrupted = {
        name: since for name, since in (old.get("disruptedPods") or {}).items() if name in alive
    }
    healthy = sum(
        is_ready(pod) and not is_deleting(pod) and pod["metadata"]["name"] not in disrupted
        for pod in pods
    )
    expected, desired = _compute_expected(registry.store, budget, pods)
    allowed = max(healthy - desired, 0) if expected > 0 else 0
    status: Json = {
        "observedGeneration": budget["metadata"].get("generation", 1),
        "disruptionsAllowed": allowed,
        "currentHealthy": healthy,
        "desiredHealthy": desired,
        "expectedPods": expected,
        "conditions": [_build_condition(registry, budget, allowed)],
    }
    return status | ({"disruptedPods": disrupted} if disrupted else {})


def _compute_expected(store: Store, budget: Json, pods: Sequence[Json]) -> tuple[int, int]:
    """Return the number of expected pods, and how many of them must stay healthy."""
    spec = budget.get("spec") or {}
    max_unavailable, min_available = spec.get("maxUnavailable"), spec.get("minAvailable")
    if max_unavailable is not None:
        expected = sum(_list_replicas(store, pods))
        return expected, max(expected - _compute_share(max_unavailable, expected), 0)
    if isinstance(min_available, str):
        expected = sum(_list_replicas(store, pods))
        return expected, _compute_share(min_available, expected)
    return len(pods), 1 if min_available is None else int(min_available)


def _compute_share(value: int | str, total: int) -> int:
    if isinstance(value, str):
        return math.ceil(int(value.rstrip("%")) * total / 100)
    return value


def _list_replicas(store: Store, pods: Sequence[Json]) -> Iterator[int]:
    """Yield the replica count of each controller that owns one of the pods."""
    seen = set()
    for pod in pods:
        for owner in read_owner_references(pod):
            storage = _WORKLOADS.get(owner["kind"])
            if not owner.get("controller") or storage is None or owner["uid"] in seen:
                continue
            seen.add(owner["uid"])
            found = store.find_object(storage, (pod["metadata"]["namespace"], owner["name"]))
            if found is not None:
                yield int(find_value(found, "spec", "replicas") or 1)


def _build_condition(registry: ObjectRegistry, budget: Json, allowed: int) -> Json:
    status = "True" if allowed else "False"
    old: Json = next(iter(find_value(budget, "status", "conditions") or []), {})
    same = old.get("status") == status
    return {
        "type": "DisruptionAllowed",
        "status": status,
        "reason": "SufficientPods" if allowed else "InsufficientPods",
        "message": "",
        "observedGeneration": budget["metadata"].get("generation", 1),
        "lastTransitionTime": old["lastTransitionTime"] if same else registry.now,
    }
