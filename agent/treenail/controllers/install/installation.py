"""What a cluster needs to run controllers and agents, as documents for ``kubectl apply``."""

from collections.abc import Sequence
from dataclasses import dataclass

from treenail import __version__
from treenail.api.decode import Json
from treenail.controllers.install import crds, permissions
from treenail.controllers.install.permissions import BY_CONTROLLER, EVENTS, GROUP, OF_NODES

NAME = "treenail-controller"
NODES = "treenail-node"
PORT = 8080
EVENTS_NAMESPACE = "default"
"""Where the events about nodes and pools are."""

_RBAC = "rbac.authorization.k8s.io"
_LABELS: Json = {"app.kubernetes.io/name": NAME, "app.kubernetes.io/part-of": "treenail"}
_SELECTOR: Json = {"app.kubernetes.io/name": NAME}
_NOBODY = 65532


@dataclass(frozen=True, slots=True)
class Options:
    """Which controllers, where, from which image."""

    controllers: Sequence[str] = tuple(BY_CONTROLLER)
    namespace: str = "treenail"
    image: str = f"localhost/{NAME}:{__version__}"


def documents(options: Options) -> list[Json]:
    """All documents, in an order in which they can be created one after the other."""
    return [
        _namespace(options),
        *crds.documents(),
        *node_access(),
        *_access(options),
        _deployment(options),
        _disruption_budget(options),
    ]


def node_access() -> list[Json]:
    """What agents may do with the credential of their node, and only to what is their node's."""
    nodes: Json = {"apiGroup": _RBAC, "kind": "Group", "name": "system:nodes"}
    return [
        _role(
            "ClusterRole",
            NODES,
            "",
            [*permissions.rules([OF_NODES]), permissions.handed_out_rule()],
        ),
        _binding("ClusterRoleBinding", NODES, "", nodes),
        _role("Role", NODES, EVENTS_NAMESPACE, permissions.rules([EVENTS])),
        _binding("RoleBinding", NODES, EVENTS_NAMESPACE, nodes),
        *_own_node_only(),
    ]


def _namespace(options: Options) -> Json:
    levels = {
        f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("audit", "enforce", "warn")
    }
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": options.namespace, "labels": {**_LABELS, **levels}},
    }


def _access(options: Options) -> list[Json]:
    account: Json = {"kind": "ServiceAccount", "name": NAME, "namespace": options.namespace}
    chosen = [BY_CONTROLLER[name] for name in options.controllers]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _meta(options.namespace)},
        _role("ClusterRole", NAME, "", permissions.rules(chosen)),
        _binding("ClusterRoleBinding", NAME, "", account),
        _role("Role", NAME, EVENTS_NAMESPACE, permissions.rules([EVENTS])),
        _binding("RoleBinding", NAME, EVENTS_NAMESPACE, account),
        _role("Role", f"{NAME}-leader", options.namespace, permissions.lease_rules(NAME)),
        _binding("RoleBinding", f"{NAME}-leader", options.namespace, account),
    ]


def _deployment(options: Options) -> Json:
    template: Json = {
        "metadata": {"labels": _LABELS},
        "spec": {
            "serviceAccountName": NAME,
            "priorityClassName": "system-cluster-critical",
            "terminationGracePeriodSeconds": 30,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _NOBODY,
                "runAsGroup": _NOBODY,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "tolerations": [
                {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"},
                {"key": "node-role.kubernetes.io/master", "effect": "NoSchedule"},
            ],
            # The two are not to be drained with the same node.
            "affinity": {
                "podAntiAffinity": {
                    "preferredDuringSchedulingIgnoredDuringExecution": [
                        {
                            "weight": 100,
                            "podAffinityTerm": {
                                "labelSelector": {"matchLabels": _SELECTOR},
                                "topologyKey": "kubernetes.io/hostname",
                            },
                        }
                    ]
                }
            },
            "containers": [_container(options)],
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _meta(options.namespace),
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": _SELECTOR},
            "template": template,
        },
    }


def _container(options: Options) -> Json:
    enabled = ",".join(options.controllers)
    return {
        "name": "controller",
        "image": options.image,
        "command": ["treenail-controller"],
        "args": ["run", f"--enable={enabled}", f"--metrics=:{PORT}"],
        "env": [
            _from_field("NODE_NAME", "spec.nodeName"),
            _from_field("POD_NAME", "metadata.name"),
            _from_field("POD_NAMESPACE", "metadata.namespace"),
        ],
        "ports": [{"name": "metrics", "containerPort": PORT}],
        "livenessProbe": {**_probe("/healthz"), "initialDelaySeconds": 15, "periodSeconds": 20},
        "readinessProbe": {**_probe("/readyz"), "periodSeconds": 5},
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }


def _disruption_budget(options: Options) -> Json:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _meta(options.namespace),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": _SELECTOR},
            # One that does not start must not hold up the drain that would help it.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def _own_node_only() -> list[Json]:
    """A node's credential writes its own MachineConfigNode: RBAC alone can't say that."""
    group = "admissionregistration.k8s.io"
    return [
        {
            "apiVersion": f"{group}/v1",
            "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": NODES, "labels": _LABELS},
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {
                    "resourceRules": [
                        {
                            "apiGroups": [GROUP],
                            "apiVersions": ["*"],
                            "operations": ["*"],
                            "resources": ["machineconfignodes", "machineconfignodes/status"],
                        }
                    ]
                },
                "matchConditions": [
                    {
                        "name": "by-a-node",
                        "expression": "'system:nodes' in request.userInfo.groups",
                    }
                ],
                "validations": [
                    {
                        "expression": "request.userInfo.username == 'system:node:' + request.name",
                        "message": "a node may write the MachineConfigNode of its own name only",
                    }
                ],
            },
        },
        {
            "apiVersion": f"{group}/v1",
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": NODES, "labels": _LABELS},
            "spec": {"policyName": NODES, "validationActions": ["Deny"]},
        },
    ]


def _role(kind: str, name: str, namespace: str, rules: list[Json]) -> Json:
    meta = _meta(namespace, name)
    return {"apiVersion": f"{_RBAC}/v1", "kind": kind, "metadata": meta, "rules": rules}


def _binding(kind: str, name: str, namespace: str, subject: Json) -> Json:
    role = kind.removesuffix("Binding")
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": kind,
        "metadata": _meta(namespace, name),
        "roleRef": {"apiGroup": _RBAC, "kind": role, "name": name},
        "subjects": [subject],
    }


def _meta(namespace: str, name: str = NAME) -> Json:
    place: Json = {"namespace": namespace} if namespace else {}
    return {"name": name, **place, "labels": _LABELS}


def _from_field(name: str, path: str) -> Json:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _probe(path: str) -> Json:
    return {"httpGet": {"path": path, "port": "metrics"}}
