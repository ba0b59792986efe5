"""What each controller does at the API server, and therefore may do: no verb more.

By resource (with its group, as in ``daemonsets.apps``; a subresource after a slash), the verbs.
"""

from collections.abc import Iterable, Iterator, Mapping

from treenail.api.controllerconfig import NAME as CONTROLLER_CONFIG
from treenail.api.decode import Json
from treenail.kube.resources import MACHINECONFIGPOOLS, MACHINECONFIGURATIONS

GROUP = MACHINECONFIGPOOLS.group

Verbs = Mapping[str, tuple[str, ...]]

_WATCHED = ("list", "watch")

EVENTS: Verbs = {"events": ("create", "patch")}
"""In the namespace of events about what has none."""

BY_CONTROLLER: Mapping[str, Verbs] = {
    "render": {
        f"machineconfigs.{GROUP}": ("create", "delete", "get", *_WATCHED),
        f"machineconfigpools.{GROUP}": ("patch", *_WATCHED),
        f"machineconfigpools/status.{GROUP}": ("patch",),
        # Where owners of what blocks their deletion are checked, rendered configs ask for this.
        f"machineconfigpools/finalizers.{GROUP}": ("update",),
        f"controllerconfigs.{GROUP}": _WATCHED,
        "nodes": _WATCHED,
    },
    "rollout": {
        f"machineconfigs.{GROUP}": ("get",),
        f"machineconfigpools.{GROUP}": ("patch", *_WATCHED),
        f"machineconfigpools/status.{GROUP}": ("patch",),
        f"machineconfignodes.{GROUP}": ("create", "patch", *_WATCHED),
        "nodes": ("patch", *_WATCHED),
        "pods": ("list",),
        "poddisruptionbudgets.policy": _WATCHED,
    },
    "drain": {
        "nodes": ("get", "patch", *_WATCHED),
        "pods": _WATCHED,
        "pods/eviction": ("create",),
        "daemonsets.apps": ("get",),
        "poddisruptionbudgets.policy": _WATCHED,
        f"machineconfignodes.{GROUP}": ("get",),
        f"machineconfignodes/status.{GROUP}": ("patch",),
    },
}


def handed_out_rule() -> Json:
    """The rule of agents to read the one ControllerConfig, whose credentials are for nodes."""
    rule = _rule(f"controllerconfigs.{GROUP}", ["get", "list", "watch"])
    return {**rule, "resourceNames": [CONTROLLER_CONFIG]}


OF_NODES: Verbs = {
    f"machineconfigs.{GROUP}": ("get",),
    f"machineconfignodes.{GROUP}": ("get",),
    f"machineconfignodes/status.{GROUP}": ("patch",),
    f"machineconfigurations.{MACHINECONFIGURATIONS.group}": ("get",),
}
"""Of the agent, beside what the Node authorizer lets a node's credential do."""


def rules(permissions: Iterable[Verbs]) -> list[Json]:
    """The rules of a role that has all of these."""
    together: dict[str, set[str]] = {}
    for verbs in permissions:
        for resource, names in verbs.items():
            together.setdefault(resource, set()).update(names)
    return [_rule(resource, sorted(verbs)) for resource, verbs in sorted(together.items())]


def lease_rules(name: str) -> list[Json]:
    """The rules of whoever stands for the election by the lease of that name."""
    lease = "leases.coordination.k8s.io"
    # A create has no name yet that could be allowed.
    return [_rule(lease, ["create"]), {**_rule(lease, ["get", "update"]), "resourceNames": [name]}]


def granted(rules: Iterable[Json]) -> Iterator[tuple[str, str]]:
    """Resource and verb of all that some rules allow; the reverse of `rules`."""
    for rule in rules:
        for group in _texts(rule, "apiGroups"):
            for resource in _texts(rule, "resources"):
                for verb in _texts(rule, "verbs"):
                    yield f"{resource}.{group}" if group else resource, verb


def _rule(resource: str, verbs: list[str]) -> Json:
    name, _, group = resource.partition(".")
    return {"apiGroups": [group], "resources": [name], "verbs": verbs}


def _texts(rule: Json, name: str) -> list[str]:
    found = rule.get(name)
    return [str(each) for each in found] if isinstance(found, list) else []
