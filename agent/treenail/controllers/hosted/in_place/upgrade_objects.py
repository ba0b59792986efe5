"""The objects that treenail makes in a hosted cluster while nodes are updated in place, as values.

`build_objects` has what each update needs. `build_installer` is for nodes whose image has no
treenail: a pod that takes the arguments of a Machine Config Daemon in HyperShift's mode.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail import clocks
from treenail.api import component_names, decode, object_meta
from treenail.api.annotations import NodeState
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import node_mode
from treenail.controllers.drain import decide
from treenail.controllers.pools import node_facts
from treenail.kube import resources

_CONFIG_PATH = "/etc/machine-config-daemon-desired-config"
_NAME_LIMIT = 253
_PREFIX = "treenail-installer-"


@dataclass(frozen=True, slots=True)
class UpgradeContent:
    """The config that nodes of a pool get, and the hash that names it."""

    node_pool: str
    """``NAMESPACE/NAME``."""
    target: str
    config: str = field(repr=False)
    """gzip and base64 of an Ignition config."""
    is_refresh: bool = False

    @property
    def mode(self) -> node_mode.HostedMode:
        """The names of the objects."""
        name = self.node_pool.rpartition("/")[2]
        return node_mode.HostedMode(name, node_mode.name_upgrade_namespace(name))


@dataclass(frozen=True, slots=True)
class HostedNode:
    """Agent and drain of a node in a hosted cluster, by its Node."""

    name: str
    boot_id: str = ""
    service_boot: str = ""
    has_drain: bool = False
    """A drain or uncordon was requested, and the drainer has not acknowledged it."""
    created_at: float = 0.0
    """Unix time at which the machine joined; 0 if unknown."""

    @classmethod
    def from_json(
        cls, document: decode.Json, drain_keys: decide.DrainKeys = decide.USUAL_KEYS
    ) -> "HostedNode":
        """Parse a Node; raise `ConfigError`."""
        fields = decode.Fields.from_json(document, "Node")
        meta = fields.get_object("metadata").read(object_meta.ObjectMeta)
        notes = node_facts.read_annotations(meta)
        requested = notes.get(drain_keys.request, "")
        return cls(
            meta.name,
            fields.get_object("status").get_object("nodeInfo").get_text("bootID")[:100],
            notes.get(hosted_key.SERVICE_BOOT, ""),
            requested not in ("", notes.get(drain_keys.applied, "")),
            clocks.parse_rfc3339(meta.created) or 0.0,
        )

    @property
    def has_service(self) -> bool:
        """The agent of the node's image runs: it was started in the present boot."""
        return self.service_boot == self.boot_id != ""


_LEVELS = {
    **{f"pod-security.kubernetes.io/{mode}": "privileged" for mode in ("audit", "enforce", "warn")},
    # OpenShift's own controller would lower them again.
    "security.openshift.io/scc.podSecurityLabelSync": "false",
}


def is_done(node: node_facts.NodeFacts | None, state: HostedNode | None, target: str) -> bool:
    """Return whether a node has the target and serves again, as its agent and the drainer say."""
    if node is None or state is None or state.has_drain or node.state != NodeState.DONE:
        return False
    return node.current_config == node.desired_config == target


def build_objects(content: UpgradeContent) -> list[tuple[resources.Resource, decode.Json]]:
    """Build the namespace and what it contains, in the order of their creation."""
    names = content.mode
    namespace, name = names.upgrade_namespace, names.config_map
    data = {node_mode.CONFIG_KEY: content.config, node_mode.HASH_KEY: content.target}
    if content.is_refresh:
        data[node_mode.MODE_KEY] = node_mode.REFRESH
    # An agent that is a service reads it as its node, whose pods need not mount it.
    rule = {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [name]}
    nodes = {"apiGroup": resources.ROLES.group, "kind": "Group", "name": "system:nodes"}
    role = {"apiGroup": resources.ROLES.group, "kind": "Role", "name": name}
    return [
        _build(content, resources.NAMESPACES, namespace, _LEVELS),
        _build(content, resources.ROLES, name, rules=[{**rule, "verbs": ["get"]}]),
        _build(content, resources.ROLEBINDINGS, name, roleRef=role, subjects=[nodes]),
        _build(content, resources.CONFIGMAPS, name, data=data),
    ]


def _build(
    content: UpgradeContent,
    resource: resources.Resource,
    name: str,
    labels: Mapping[str, str] | None = None,
    **fields: object,
) -> tuple[resources.Resource, decode.Json]:
    metadata = {
        "name": name,
        "labels": {**component_names.PART_OF_LABELS, **(labels or {})},
        "annotations": {hosted_key.NODE_POOL: content.node_pool},
    }
    kind = {"apiVersion": resource.api_version, "kind": resource.kind}
    return resource, {**kind, "metadata": metadata, **fields}


def name_installer(node: str) -> str:
    """Return the name of the pod for a node."""
    name = _PREFIX + node
    if len(name) <= _NAME_LIMIT:
        return name
    digest = hashlib.sha256(node.encode()).hexdigest()[:8]
    return f"{name[: _NAME_LIMIT - 9].rstrip('-.')}-{digest}"


def is_installer(namespace: str, name: str) -> bool:
    """Return whether a pod is an installer, which a drain of its node must not end."""
    return namespace.startswith(node_mode.NAMESPACE_PREFIX) and name.startswith(_PREFIX)


def build_installer(content: UpgradeContent, node: str, image: str) -> decode.Json:
    """Build the pod that updates a node whose image has no treenail.

    It mounts the ConfigMap, so the node authorizer lets the node read it.
    """
    arguments = [
        "start",
        f"--node-name={node}",
        "--root-mount=/rootfs",
        "--kubeconfig=/var/lib/kubelet/kubeconfig",
        f"--desired-configmap={_CONFIG_PATH}",
    ]
    container = {
        "name": "machine-config-daemon",
        "image": image,
        "command": ["/usr/bin/machine-config-daemon"],
        "args": arguments,
        "env": [{"name": node_mode.VARIABLE, "value": json.dumps(content.mode.to_json())}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {"privileged": True},
        "volumeMounts": [
            {"name": "rootfs", "mountPath": "/rootfs"},
            {"name": "config", "mountPath": f"/rootfs{_CONFIG_PATH}"},
        ],
    }
    spec = {
        "nodeName": node,
        "hostNetwork": True,
        "hostPID": True,
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": 10,
        "automountServiceAccountToken": False,
        "priorityClassName": "system-node-critical",
        "tolerations": [{"operator": "Exists"}],
        "containers": [container],
        "volumes": [
            {"name": "rootfs", "hostPath": {"path": "/"}},
            {"name": "config", "configMap": {"name": content.mode.config_map}},
        ],
    }
    return _build(content, resources.PODS, name_installer(node), spec=spec)[1]
