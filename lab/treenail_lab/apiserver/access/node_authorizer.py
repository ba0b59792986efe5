"""The Node authorizer and the NodeRestriction admission: permissions of a node's credential.

As in Kubernetes 1.32 and newer, a node reads its own Node, the pods bound to it, and the objects
that those pods refer to. RBAC grants more, as in a real cluster. The admission policy that keeps a
node off other MachineConfigNodes is not evaluated: this module refuses what it refuses.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from treenail_lab.apiserver.errors import ApiError, forbidden_error
from treenail_lab.apiserver.objects import Json, find_value, read_labels
from treenail_lab.apiserver.request import ServerRequest
from treenail_lab.apiserver.schema.kinds import ResourceKind
from treenail_lab.apiserver.schema.selectors import find_exact_name
from treenail_lab.apiserver.store import Store

MACHINE_CONFIG = "machineconfiguration.openshift.io"
NODE_LEASES = "kube-node-lease"
_MIRROR = "kubernetes.io/config.mirror"
_READ = ("get", "list", "watch")
_CHANGE = ("update", "patch")

# Labels in the domains of Kubernetes that a node may set on itself.
_OWN_LABELS = frozenset({
    "kubernetes.io/hostname", "kubernetes.io/os", "kubernetes.io/arch",
    "beta.kubernetes.io/os", "beta.kubernetes.io/arch", "beta.kubernetes.io/instance-type",
    "node.kubernetes.io/instance-type",
    "topology.kubernetes.io/region", "topology.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region", "failure-domain.beta.kubernetes.io/zone",
})  # fmt: skip
_OWN_LABEL_DOMAINS = ("node.kubernetes.io", "kubelet.kubernetes.io")

# Verbs on resources with any name. NodeRestriction limits the objects.
_ANY_NAME_VERBS: dict[tuple[str, str], tuple[str, ...]] = {
    ("", "events"): ("create", "update", "patch"),
    ("", "nodes"): ("create", *_CHANGE),
    ("", "nodes/status"): _CHANGE,
    ("", "pods"): ("create", "delete"),
    ("", "pods/status"): _CHANGE,
    ("", "pods/eviction"): ("create",),
    ("", "services"): _READ,
}
# Verbs on objects with the name of the node.
_OWN_NAME_VERBS: dict[tuple[str, str], tuple[str, ...]] = {
    ("", "nodes"): _READ,
    ("coordination.k8s.io", "leases"): ("get", "update", "patch", "delete"),
}


@dataclass(frozen=True, slots=True)
class AccessAttempt:
    """The action that a user attempts, in the terms of RBAC rules."""

    verb: str
    group: str
    resource: str
    namespace: str
    name: str
    path: str

    @classmethod
    def from_request(cls, request: ServerRequest) -> "AccessAttempt":
        """Read the attempt; a list of one name counts as a get of that name."""
        name = request.name
        if request.verb in {"list", "watch", "deletecollection"}:
            name = find_exact_name(request.query.get("fieldSelector", ""))
        path = "" if request.is_resource_request else request.path
        return cls(request.verb, request.group, request.resource, request.namespace, name, path)


def find_refusal(store: Store, node: str, attempt: AccessAttempt, node_name: str) -> str:
    """Return why a node is not allowed an attempt; empty when it is.

    ``node_name`` is the value of ``spec.nodeName`` in the field selector of a list.
    """
    what = (attempt.group, attempt.resource)
    if attempt.verb in _ANY_NAME_VERBS.get(what, ()):
        return ""
    if attempt.verb in _OWN_NAME_VERBS.get(what, ()):
        if attempt.name == node:
            return ""
        if attempt.resource.startswith("nodes"):
            return f"node '{node}' cannot read '{attempt.name}', only its own Node object"
        return f"can only access {attempt.resource} named like the node"
    match what:
        case "coordination.k8s.io", "leases" if attempt.verb == "create":
            return "" if attempt.namespace == NODE_LEASES else f"only in {NODE_LEASES}"
        case "", "pods" if attempt.verb in _READ:
            return _find_pod_refusal(store, node, attempt, node_name)
        case "", "secrets" | "configmaps" if attempt.verb in _READ:
            if (attempt.namespace, attempt.name) in _find_references(store, node, attempt.resource):
                return ""
        case _:
            return "unknown to the Node authorizer"
    return f"no relationship found between node '{node}' and this object"


def _find_pod_refusal(store: Store, node: str, attempt: AccessAttempt, node_name: str) -> str:
    if attempt.verb == "get":
        pod = store.find_object(("", "pods"), (attempt.namespace, attempt.name))
        if pod is None or find_value(pod, "spec", "nodeName") == node:
            return ""
        return f"no relationship found between node '{node}' and this object"
    if node_name == node:
        return ""
    return "can only list/watch pods with spec.nodeName field selector"


def find_pods(store: Store, node: str) -> Iterator[Json]:
    """Yield the pods bound to a node."""
    for pod in store.list_objects(("", "pods")):
        if find_value(pod, "spec", "nodeName") == node:
            yield pod


def _find_references(store: Store, node: str, resource: str) -> set[tuple[str, str]]:
    """Return namespace and name of the secrets or configmaps that a node's pods refer to."""
    references = set()
    for pod in find_pods(store, node):
        namespace = pod["metadata"]["namespace"]
        spec = pod["spec"]
        names = _list_secret_names(spec) if resource == "secrets" else _list_config_map_names(spec)
        references |= {(namespace, name) for name in names if isinstance(name, str)}
    return references


def _list_containers(spec: Json) -> Iterator[Json]:
    for name in ("containers", "initContainers", "ephemeralContainers"):
        yield from spec.get(name) or []


def _list_secret_names(spec: Json) -> Iterator[object]:
    for reference in spec.get("imagePullSecrets") or []:
        yield reference.get("name")
    for volume in spec.get("volumes") or []:
        yield find_value(volume, "secret", "secretName")
        for source in find_value(volume, "projected", "sources") or []:
            yield find_value(source, "secret", "name")
    for container in _list_containers(spec):
        for variable in container.get("env") or []:
            yield find_value(variable, "valueFrom", "secretKeyRef", "name")
        for source in container.get("envFrom") or []:
            yield find_value(source, "secretRef", "name")


def _list_config_map_names(spec: Json) -> Iterator[object]:
    for volume in spec.get("volumes") or []:
        yield find_value(volume, "configMap", "name")
        for source in find_value(volume, "projected", "sources") or []:
            yield find_value(source, "configMap", "name")
    for container in _list_containers(spec):
        for variable in container.get("env") or []:
            yield find_value(variable, "valueFrom", "configMapKeyRef", "name")
        for source in container.get("envFrom") or []:
            yield find_value(source, "configMapRef", "name")


def restrict_write(
    node: str, kind: ResourceKind, subresource: str, old: Json | None, new: Json | None
) -> None:
    """Raise 403 when a node writes an object that is not its own (NodeRestriction).

    ``old`` is None for a creation, ``new`` for a deletion.
    """
    why = ""
    obj = new or old or {}
    name = obj.get("metadata", {}).get("name", "")
    match kind.group, kind.plural:
        case "", "nodes":
            why = _find_node_problem(node, name, old, new)
        case "", "pods":
            why = _find_pod_problem(node, subresource, old, new)
        case "coordination.k8s.io", "leases" if obj["metadata"].get("namespace") != NODE_LEASES:
            why = f'can only access leases in the "{NODE_LEASES}" system namespace'
        case "coordination.k8s.io", "leases" if name != node:
            why = "can only access node lease with the same name as the requesting node"
        case group, "machineconfignodes" if group == MACHINE_CONFIG and name != node:
            why = (
                "ValidatingAdmissionPolicy 'treenail-node' with binding 'treenail-node' denied "
                "request: a node may write only the MachineConfigNode of its own name"
            )
        case _:
            pass
    if why:
        raise _forbidden_write_error(kind, name, why)


def restrict_eviction(node: str, kind: ResourceKind, pod: Json) -> None:
    """Raise 403 when a node evicts a pod of another node."""
    if find_value(pod, "spec", "nodeName") != node:
        why = f'node "{node}" can only evict pods with spec.nodeName set to itself'
        raise _forbidden_write_error(kind, pod["metadata"]["name"], why)


def _forbidden_write_error(kind: ResourceKind, name: str, why: str) -> ApiError:
    return forbidden_error(kind.group, kind.plural, name, why)


def _find_node_problem(node: str, name: str, old: Json | None, new: Json | None) -> str:
    if name != node:
        return f'node "{node}" is not allowed to modify node "{name}"'
    if new is None:
        return ""
    before = read_labels(old) if old else {}
    after = read_labels(new)
    changed = {key for key in {*before, *after} if before.get(key) != after.get(key)}
    foreign = sorted(key for key in changed if not _can_label(key))
    if old is None:
        if foreign:
            return f'node "{node}" is not allowed to set the following labels: {", ".join(foreign)}'
        return ""
    if find_value(old, "spec", "taints") != find_value(new, "spec", "taints"):
        return f'node "{node}" is not allowed to modify taints'
    if foreign:
        return f"is not allowed to modify labels: {', '.join(foreign)}"
    return ""


def _can_label(label: str) -> bool:
    domain = label.rpartition("/")[0]
    if label in _OWN_LABELS or _is_in_domain(domain, *_OWN_LABEL_DOMAINS):
        return True
    return not _is_in_domain(domain, "kubernetes.io", "k8s.io")


def _is_in_domain(domain: str, *parents: str) -> bool:
    return any(domain == parent or domain.endswith(f".{parent}") for parent in parents)


def _find_pod_problem(node: str, subresource: str, old: Json | None, new: Json | None) -> str:
    if old is None and new is not None:
        if _MIRROR not in (new["metadata"].get("annotations") or {}):
            return (
                f'pod does not have "{_MIRROR}" annotation, node "{node}" can only create mirror '
                "pods"
            )
        bound = find_value(new, "spec", "nodeName") == node
        verb = "create pods"
    else:
        bound = find_value(old or {}, "spec", "nodeName") == node
        verb = "update pod status for pods" if subresource == "status" else "delete pods"
    return "" if bound else f'node "{node}" can only {verb} with spec.nodeName set to itself'
