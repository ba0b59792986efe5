"""PodDisruptionBudgets: how many of their pods may go now."""

import math
from collections.abc import Iterator, Sequence

from treenail_lab.apiserver.access.authentication import MASTERS, User
from treenail_lab.apiserver.objects import Json, deleting, dig, labels, owners
from treenail_lab.apiserver.registry.registry import Registry, Write
from treenail_lab.apiserver.schema.kinds import Storage
from treenail_lab.apiserver.schema.selectors import selector_matches
from treenail_lab.apiserver.storage.store import Event, Store

BUDGETS: Storage = ("policy", "poddisruptionbudgets")
PODS: Storage = ("", "pods")
_WORKLOADS: dict[str, Storage] = {
    "Deployment": ("apps", "deployments"),
    "ReplicaSet": ("apps", "replicasets"),
}
_COUNTED = frozenset({BUDGETS, PODS, *_WORKLOADS.values()})
_WRITE = Write(User("system:serviceaccount:kube-system:disruption-controller", (MASTERS,)),
               "kube-controller-manager")  # fmt: skip


def budgets_of(store: Store, pod: Json) -> list[Json]:
    """The budgets that a pod counts in."""
    namespace = pod["metadata"]["namespace"]
    return [
        budget
        for budget in store.list(BUDGETS, namespace)
        if selector_matches(dig(budget, "spec", "selector"))(labels(pod))
    ]


def is_ready(pod: Json) -> bool:
    return any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in dig(pod, "status", "conditions") or []
    )


class Disruption:
    """Keeps the status of every budget up to date."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._dirty: set[str] = set()

    def note(self, storage: Storage, event: Event) -> bool:
        """Remember whose budgets a change may concern; whether it is any."""
        if storage not in _COUNTED:
            return False
        self._dirty.add(event.object["metadata"]["namespace"])
        return True

    def reload(self) -> None:
        """Look at all budgets, after the store was loaded."""
        self._dirty = {budget["metadata"]["namespace"] for budget in self._budgets("")}

    def sync(self) -> None:
        """Write what has changed."""
        kind = self._registry.kinds.find(BUDGETS[0], "v1", BUDGETS[1])
        for namespace in sorted(self._dirty):
            for budget in self._budgets(namespace):
                status = _status(self._registry, budget)
                if status != budget.get("status"):
                    name = budget["metadata"]["name"]

                    def change(old: Json, status: Json = status) -> Json:
                        return old | {"status": status}

                    self._registry.update(kind, namespace, name, change, _WRITE, "status")
        self._dirty.clear()

    def _budgets(self, namespace: str) -> Sequence[Json]:
        return self._registry.store.list(BUDGETS, namespace)


def _status(registry: Registry, budget: Json) -> Json:
    namespace = budget["metadata"]["namespace"]
    matches = selector_matches(dig(budget, "spec", "selector"))
    pods = [pod for pod in registry.store.list(PODS, namespace) if matches(labels(pod))]
    old = budget.get("status") or {}
    alive = {pod["metadata"]["name"] for pod in pods if not deleting(pod)}
    disrupted = {
        name: since for name, since in (old.get("disruptedPods") or {}).items() if name in alive
    }
    healthy = sum(
        is_ready(pod) and not deleting(pod) and pod["metadata"]["name"] not in disrupted
        for pod in pods
    )
    expected, desired = _wanted(registry.store, budget, pods)
    allowed = max(healthy - desired, 0) if expected > 0 else 0
    status: Json = {
        "observedGeneration": budget["metadata"].get("generation", 1),
        "disruptionsAllowed": allowed,
        "currentHealthy": healthy,
        "desiredHealthy": desired,
        "expectedPods": expected,
        "conditions": [_condition(registry, budget, allowed)],
    }
    return status | ({"disruptedPods": disrupted} if disrupted else {})


def _wanted(store: Store, budget: Json, pods: Sequence[Json]) -> tuple[int, int]:
    """How many pods there should be, and how many of them have to stay healthy."""
    spec = budget.get("spec") or {}
    most, least = spec.get("maxUnavailable"), spec.get("minAvailable")
    if most is not None:
        expected = sum(_replicas(store, pods))
        return expected, max(expected - _share(most, expected), 0)
    if isinstance(least, str):
        expected = sum(_replicas(store, pods))
        return expected, _share(least, expected)
    return len(pods), 1 if least is None else int(least)


def _share(value: int | str, total: int) -> int:
    if isinstance(value, str):
        return math.ceil(int(value.rstrip("%")) * total / 100)
    return value


def _replicas(store: Store, pods: Sequence[Json]) -> Iterator[int]:
    """What the controllers of the pods want, one number for each of them."""
    seen = set()
    for pod in pods:
        for owner in owners(pod):
            storage = _WORKLOADS.get(owner["kind"])
            if not owner.get("controller") or storage is None or owner["uid"] in seen:
                continue
            seen.add(owner["uid"])
            found = store.get(storage, (pod["metadata"]["namespace"], owner["name"]))
            if found is not None:
                yield int(dig(found, "spec", "replicas") or 1)


def _condition(registry: Registry, budget: Json, allowed: int) -> Json:
    status = "True" if allowed else "False"
    old: Json = next(iter(dig(budget, "status", "conditions") or []), {})
    same = old.get("status") == status
    return {
        "type": "DisruptionAllowed",
        "status": status,
        "reason": "SufficientPods" if allowed else "InsufficientPods",
        "message": "",
        "observedGeneration": budget["metadata"].get("generation", 1),
        "lastTransitionTime": old["lastTransitionTime"] if same else registry.now,
    }
