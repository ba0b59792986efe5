"""PodDisruptionBudgets: the controller of their status, and evictions that honour them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from treenail_lab.apiserver.access.authentication import MASTERS, ApiUser
from treenail_lab.apiserver.access.node_authorizer import restrict_eviction
from treenail_lab.apiserver.errors import (
    ApiError,
    StatusCause,
    bad_request_error,
    too_many_requests_error,
)
from treenail_lab.apiserver.objects import (
    Json,
    find_value,
    is_deleting,
    read_labels,
    read_owner_references,
)
from treenail_lab.apiserver.registry.deletion import (
    DeleteOptions,
    check_preconditions,
    delete_object,
    parse_delete_options,
)
from treenail_lab.apiserver.registry.registry import ObjectRegistry, WriteContext
from treenail_lab.apiserver.schema.kinds import ResourceKind, StorageKey
from treenail_lab.apiserver.schema.selectors import compile_selector
from treenail_lab.apiserver.store import Store, StoreEvent

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
            owner_object = store.find_object(storage, (pod["metadata"]["namespace"], owner["name"]))
            if owner_object is not None:
                yield int(find_value(owner_object, "spec", "replicas") or 1)


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


_STILL_PROCESSED = "The disruption budget {} is still being processed by the server."
_VIOLATES = "Cannot evict pod as it would violate the pod's disruption budget."
_MORE_THAN_ONE = (
    "This pod has more than one PodDisruptionBudget, which the eviction subresource does not "
    "support."
)
_RETRY_AFTER_S = 10


def evict_pod(
    registry: ObjectRegistry,
    kind: ResourceKind,
    namespace: str,
    name: str,
    body: Json,
    write: WriteContext,
) -> Json:
    """Delete a pod; raise 429 with the budget as cause when a budget forbids it now."""
    body_name = find_value(body, "metadata", "name")
    if body_name and body_name != name:
        raise bad_request_error(
            f"the name of the object ({body_name}) does not match the name on the URL ({name})"
        )
    options = parse_delete_options(body.get("deleteOptions") or {}, dry_run=write.is_dry_run)
    pod = registry.find_object(kind, namespace, name)
    if write.user.node_name and not write.user.is_master:
        restrict_eviction(write.user.node_name, kind, pod)
    if not _can_ignore_budgets(pod):
        _spend_disruption(registry, pod, options, write)
    if not options.is_dry_run:
        check_preconditions(kind, pod, options)
        _mark_disrupted(registry, kind, pod, write)
        # The mark is a new version of the pod.
        options = replace(options, resource_version="")
    delete_object(registry, kind, namespace, name, options, write.user)
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
        "code": 201,
    }


def _mark_disrupted(
    registry: ObjectRegistry, kind: ResourceKind, pod: Json, write: WriteContext
) -> None:
    """Add the condition DisruptionTarget, which podFailurePolicy of a Job matches."""
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "EvictionByEvictionAPI",
        "message": "Eviction API: evicting",
        "lastTransitionTime": registry.now,
    }
    before = find_value(pod, "status", "conditions") or []
    if any(present.get("type") == condition["type"] for present in before):
        return
    status = (pod.get("status") or {}) | {"conditions": [*before, condition]}
    registry.update_object(
        kind,
        pod["metadata"]["namespace"],
        pod["metadata"]["name"],
        lambda old: old | {"status": status},
        write,
        "status",
    )


def _can_ignore_budgets(pod: Json) -> bool:
    """Return whether the pod is ending, has ended or has not started: budgets ignore it."""
    return is_deleting(pod) or find_value(pod, "status", "phase") in {
        "Succeeded",
        "Failed",
        "Pending",
    }


def _spend_disruption(
    registry: ObjectRegistry, pod: Json, options: DeleteOptions, write: WriteContext
) -> None:
    """Take one disruption from the budget of a pod; raise 429 when none is left."""
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    budgets = find_budgets(registry.store, pod)
    if not budgets:
        return
    if len(budgets) > 1:
        raise ApiError(500, "InternalError", _MORE_THAN_ONE)
    budget = budgets[0]
    status = budget.get("status") or {}
    if not is_ready(pod) and _can_evict_unready(budget):
        return
    budget_name = budget["metadata"]["name"]
    if status.get("observedGeneration", 0) < budget["metadata"].get("generation", 1):
        cause = StatusCause("DisruptionBudget", _STILL_PROCESSED.format(budget_name))
        raise too_many_requests_error(_VIOLATES, _RETRY_AFTER_S, [cause])
    if status.get("disruptionsAllowed", 0) < 1:
        message = (
            f"The disruption budget {budget_name} needs {status.get('desiredHealthy', 0)} healthy "
            f"pods and has {status.get('currentHealthy', 0)} currently"
        )
        raise too_many_requests_error(_VIOLATES, 0, [StatusCause("DisruptionBudget", message)])
    if options.is_dry_run:
        return
    spent = status | {
        "disruptionsAllowed": status["disruptionsAllowed"] - 1,
        "disruptedPods": (status.get("disruptedPods") or {}) | {name: registry.now},
    }
    kind = registry.kinds.find_kind(BUDGETS[0], "v1", BUDGETS[1])
    registry.update_object(
        kind, namespace, budget_name, lambda old: old | {"status": spent}, write, "status"
    )


def _can_evict_unready(budget: Json) -> bool:
    if find_value(budget, "spec", "unhealthyPodEvictionPolicy") == "AlwaysAllow":
        return True
    status = budget.get("status") or {}
    desired = status.get("desiredHealthy", 0)
    return bool(desired > 0 and status.get("currentHealthy", 0) >= desired)
