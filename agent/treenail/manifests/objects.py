"""Parts of manifests: roles, bindings, namespaces, probes."""

from treenail.api.decode import Json

RBAC = "rbac.authorization.k8s.io"
"""API group of roles."""

NONROOT_UID = 65532
"""User of the containers; the images contain no user of this ID."""
POD_SECURITY: Json = {
    "runAsNonRoot": True,
    "runAsUser": NONROOT_UID,
    "runAsGroup": NONROOT_UID,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Json = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
CONTROL_PLANE_TOLERATIONS: tuple[Json, ...] = (
    {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"},
    {"key": "node-role.kubernetes.io/master", "effect": "NoSchedule"},
)


def build_role(kind: str, metadata: Json, rules: list[Json]) -> Json:
    """Build a Role or ClusterRole."""
    return {"apiVersion": f"{RBAC}/v1", "kind": kind, "metadata": metadata, "rules": rules}


def build_binding(kind: str, metadata: Json, subject: Json) -> Json:
    """Build a binding to the role of the same name."""
    role = kind.removesuffix("Binding")
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": kind,
        "metadata": metadata,
        "roleRef": {"apiGroup": RBAC, "kind": role, "name": metadata["name"]},
        "subjects": [subject],
    }


def build_namespace(name: str, level: str, labels: Json) -> Json:
    """Build a namespace that enforces a level of the Pod Security Standards."""
    modes = ("audit", "enforce", "warn")
    levels = {f"pod-security.kubernetes.io/{mode}": level for mode in modes}
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": name, "labels": {**labels, **levels}},
    }


def build_field_env(name: str, path: str) -> Json:
    """Build a variable with a field of the pod."""
    # With its default: the field is atomic, and a server-side apply would conflict without it.
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def build_probe(path: str) -> Json:
    """Build a probe of the port for metrics."""
    return {"httpGet": {"path": path, "port": "metrics"}}
