"""The eviction subresource of pods, which honours PodDisruptionBudgets."""

from dataclasses import replace

from treenail_lab.apiserver.access.node_authorizer import restrict_eviction
from treenail_lab.apiserver.errors import (
    ApiError,
    StatusCause,
    bad_request_error,
    too_many_requests_error,
)
from treenail_lab.apiserver.objects import Json, find_value, is_deleting
from treenail_lab.apiserver.registry.deletion import (
    DeleteOptions,
    check_preconditions,
    delete_object,
    parse_delete_options,
)
from treenail_lab.apiserver.registry.disruption_budgets import BUDGETS, find_budgets, is_ready
from treenail_lab.apiserver.registry.registry import ObjectRegistry, WriteContext
from treenail_lab.apiserver.schema.kinds import ResourceKind

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
    if any(each.get("type") == condition["type"] for each in before):
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
