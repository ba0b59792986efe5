"""What each controller does at the API server, and therefore may do: no verb more.

By resource (with its group, as in ``daemonsets.apps``; a subresource after a slash), the verbs.
"""

from collections.abc import Iterable, Iterator, Mapping

from treenail.api.controllerconfig import NAME as CONTROLLER_CONFIG
from treenail.api.decode import Json
from treenail.kube.resources import MACHINECONFIGPOOLS, MACHINECONFIGURATIONS

GROUP = MACHINECONFIGPOOLS.group

Verbs = Mapping[str, tuple[str, ...]]

_WATCH_VERBS = ("list", "watch")

EVENT_VERBS: Verbs = {"events": ("create", "patch")}
"""In the namespace of events about what has none."""

CONTROLLER_VERBS: Mapping[str, Verbs] = {
    "render": {
        f"machineconfigs.{GROUP}": ("create", "delete", "get", *_WATCH_VERBS),
        f"machineconfigpools.{GROUP}": ("patch", *_WATCH_VERBS),
        f"machineconfigpools/status.{GROUP}": ("patch",),
        # Where owners of what blocks their deletion are checked, rendered configs ask for this.
        f"machineconfigpools/finalizers.{GROUP}": ("update",),
        f"controllerconfigs.{GROUP}": _WATCH_VERBS,
        "nodes": _WATCH_VERBS,
    },
    "rollout": {
        f"machineconfigs.{GROUP}": ("get",),
        f"machineconfigpools.{GROUP}": ("patch", *_WATCH_VERBS),
        f"machineconfigpools/status.{GROUP}": ("patch",),
        f"machineconfignodes.{GROUP}": ("create", "patch", *_WATCH_VERBS),
        "nodes": ("patch", *_WATCH_VERBS),
        "pods": ("list",),
        "poddisruptionbudgets.policy": _WATCH_VERBS,
    },
    "drain": {
        "nodes": ("get", "patch", *_WATCH_VERBS),
        "pods": _WATCH_VERBS,
        "pods/eviction": ("create",),
        "daemonsets.apps": ("get",),
        "poddisruptionbudgets.policy": _WATCH_VERBS,
        f"machineconfignodes.{GROUP}": ("get",),
        f"machineconfignodes/status.{GROUP}": ("patch",),
    },
}


def build_controllerconfig_rule() -> Json:
    """The rule of agents to read the one ControllerConfig, whose credentials are for nodes."""
    rule = _build_rule(f"controllerconfigs.{GROUP}", ["get", "list", "watch"])
    return {**rule, "resourceNames": [CONTROLLER_CONFIG]}


NODE_VERBS: Verbs = {
    f"machineconfigs.{GROUP}": ("get",),
    f"machineconfignodes.{GROUP}": ("get",),
    f"machineconfignodes/status.{GROUP}": ("patch",),
    f"machineconfigurations.{MACHINECONFIGURATIONS.group}": ("get",),
}
"""Of the agent, beside what the Node authorizer lets a node's credential do."""


def build_rules(permissions: Iterable[Verbs]) -> list[Json]:
    """The rules of a role that has all of these."""
    together: dict[str, set[str]] = {}
    for verbs in permissions:
        for resource, names in verbs.items():
            together.setdefault(resource, set()).update(names)
    return [_build_rule(resource, sorted(verbs)) for resource, verbs in sorted(together.items())]


def build_lease_rules(name: str) -> list[Json]:
    """The rules of whoever stands for the election by the lease of that name."""
    lease = "leases.coordination.k8s.io"
    # A create has no name yet that could be allowed.
    return [
        _build_rule(lease, ["create"]),
        {**_build_rule(lease, ["get", "update"]), "resourceNames": [name]},
    ]


def iter_granted_verbs(rules: Iterable[Json]) -> Iterator[tuple[str, str]]:
    """Resource and verb of all that some rules allow; the reverse of `rules`."""
    for rule in rules:
        for group in _get_texts(rule, "apiGroups"):
            for resource in _get_texts(rule, "resources"):
                for verb in _get_texts(rule, "verbs"):
                    yield f"{resource}.{group}" if group else resource, verb


def _build_rule(resource: str, verbs: list[str]) -> Json:
    name, _, group = resource.partition(".")
    return {"apiGroups": [group], "resources": [name], "verbs": verbs}


def _get_texts(rule: Json, name: str) -> list[str]:
    found = rule.get(name)
    return [str(each) for each in found] if isinstance(found, list) else []
