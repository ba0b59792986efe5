"""PodDisruptionBudgets that never allow an eviction and so block every drain."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from treenail.api.decode import Fields, Json
from treenail.api.meta import ObjectMeta
from treenail.errors import ConfigError
from treenail.label_selector import matches_selector

# kube-apiserver accepts a percentage with any number of digits.
_PERCENTAGE = re.compile(r"([0-9]{1,9})%")


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


def find_blocking_reason(budget: Json) -> str:
    """Return why the budget allows no eviction with all pods healthy; empty when it does."""
    try:
        fields = Fields.from_json(budget, "PodDisruptionBudget")
        spec, status = fields.get_object("spec"), fields.get_object("status")
        expected = status.get_optional_integer("expectedPods") or 0
    except ConfigError as error:
        return str(error)
    most, least = spec.values.get("maxUnavailable"), spec.values.get("minAvailable")
    if most in (0, "0", "0%"):
        return f"maxUnavailable is {most}"
    if isinstance(least, str) and (percent := _PERCENTAGE.fullmatch(least)):
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
    budget: Json, pods: Sequence[Mapping[str, object]]
) -> BlockingBudget | None:
    """Return the budget with the nodes of its pods; None when it can pass or has no pod.

    ``pods`` are the pods of its namespace.
    """
    why = find_blocking_reason(budget)
    if not why:
        return None
    fields = Fields.from_json(budget, "PodDisruptionBudget")
    meta = ObjectMeta.from_fields(fields.get_object("metadata"))
    selector = fields.get_object("spec").values.get("selector")
    nodes = set()
    for pod in pods:
        found = Fields.from_json(pod, "Pod")
        labels = found.get_object("metadata").get_text_map("labels")
        node = found.get_object("spec").get_text("nodeName")
        if node and matches_selector(selector, labels):
            nodes.add(node)
    return (
        BlockingBudget(f"{meta.namespace}/{meta.name}", why, tuple(sorted(nodes)))
        if nodes
        else None
    )
