"""Manifests of the Ignition server, a DaemonSet on the nodes of the control plane.

It has a namespace of its own, because it uses the network of its nodes: new machines reach it at
the addresses of the control plane, as they reach the server of the Machine Config Operator. New
machines join with bootstrap tokens and requests of their kubelets: this access is built here too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from treenail.api import component_names
from treenail.api.decode import Json
from treenail.api.hosted import token_secret
from treenail.controllers.handover.image_mode import CONFIGMAP
from treenail.manifests import objects, permissions
from treenail.manifests.installation import EVENTS_NAMESPACE, InstallOptions
from treenail.manifests.installation import NAME as CONTROLLER_NAME
from treenail.provisioning.machines.request_log import REQUEST_CONFIGMAP
from treenail.provisioning.tokens import bootstrap_tokens, token_store

NAME = component_names.IGNITION_SERVER
HOSTED_NAME = "treenail-hosted-ignition"
"""Deployment and namespace of the server for hosted clusters."""
PORT = 22623
"""The port of the Machine Config Operator's server."""
METRICS_PORT = 22625
CERTIFICATE_SECRET = "treenail-ignition-tls"  # noqa: S105  # a name
"""Secret of type kubernetes.io/tls with the certificate of the server. The user creates it."""

_LABELS: Json = {"app.kubernetes.io/name": NAME, **component_names.PART_OF_LABELS}
SELECTOR: Json = {"app.kubernetes.io/name": NAME}
_VOLUME = "certificate"
_DIRECTORY = "/run/secrets/treenail-ignition"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of ``serve`` that depend on the cluster."""

    tokens: str = "require"
    """Which machines are served: off, ask or require."""
    registries_needing_cluster: Sequence[str] = ()
    """Registries that machines reach only after they joined, HOST or HOST:PORT."""
    api_server: str = ""
    """URL of the API server for new machines; empty to issue no bootstrap tokens."""


def build_server_documents(
    options: InstallOptions, namespace: str = NAME, server: ServerOptions | None = None
) -> list[Json]:
    """Build the manifests, in an order in which they can be created."""
    account: Json = {"kind": "ServiceAccount", "name": NAME, "namespace": namespace}
    metadata = _build_metadata(namespace)
    events = _build_metadata(EVENTS_NAMESPACE, f"{NAME}-events")
    rules = [
        *permissions.build_named_rules({"configmaps": REQUEST_CONFIGMAP}, ("get", "update")),
        *permissions.build_named_rules(
            {"secrets": token_store.TOKEN_SECRET}, ("get", "list", "patch", "watch")
        ),
    ]
    return [
        # Only the level privileged permits hostNetwork.
        objects.build_namespace(namespace, "privileged", _LABELS),
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        objects.build_role(
            "ClusterRole", _build_metadata(), permissions.build_rules([permissions.SERVER_VERBS])
        ),
        objects.build_binding("ClusterRoleBinding", _build_metadata(), account),
        # RBAC cannot restrict create by name, so the objects exist from the beginning.
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": _build_metadata(namespace, token_store.TOKEN_SECRET),
            "type": "Opaque",
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": _build_metadata(namespace, REQUEST_CONFIGMAP),
        },
        objects.build_role("Role", metadata, rules),
        objects.build_binding("RoleBinding", metadata, account),
        *build_join_access(namespace),
        objects.build_role("Role", events, permissions.build_rules([permissions.EVENT_VERBS])),
        objects.build_binding("RoleBinding", events, account),
        _build_service(metadata, SELECTOR),
        _build_daemonset(options, namespace, server or ServerOptions()),
    ]


def build_hosted_documents(options: InstallOptions) -> list[Json]:
    """Build the manifests of the server for hosted clusters: two pods behind a Service.

    In the namespace of each control plane it may read Secrets, and write one ConfigMap.
    """
    namespace = options.serve_namespace or HOSTED_NAME
    selector: Json = {"app.kubernetes.io/name": HOSTED_NAME}
    labels: Json = {**selector, **component_names.PART_OF_LABELS}
    account: Json = {"kind": "ServiceAccount", "name": HOSTED_NAME, "namespace": namespace}
    metadata: Json = {"name": HOSTED_NAME, "namespace": namespace, "labels": labels}
    rules = [
        *permissions.build_named_rules({"configmaps": token_secret.REACHED_CONFIGMAP}, ["patch"]),
        *permissions.build_rules([permissions.HOSTED_SERVER_VERBS]),
    ]
    access: list[Json] = []
    for plane in options.control_planes:
        # RBAC cannot restrict create by name, so the object exists from the beginning.
        record: Json = {**metadata, "name": token_secret.REACHED_CONFIGMAP, "namespace": plane}
        access += [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": record},
            objects.build_role("Role", {**metadata, "namespace": plane}, rules),
            objects.build_binding("RoleBinding", {**metadata, "namespace": plane}, account),
        ]
    arguments = ["--hosted", f"--namespace={','.join(options.control_planes)}"]
    pod = _build_pod(HOSTED_NAME, _build_container(options, arguments, is_on_host=False))
    return [
        objects.build_namespace(namespace, "restricted", labels),
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        *access,
        _build_service(metadata, selector),
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {
                "replicas": 2,
                "selector": {"matchLabels": selector},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
    ]


def build_settings_access(options: InstallOptions, namespace: str = NAME) -> list[Json]:
    """Build the server's access to the settings of an installation in image mode.

    They say whether workers wait, and are in the namespace of the controllers, which must exist.
    """
    account: Json = {"kind": "ServiceAccount", "name": NAME, "namespace": namespace}
    metadata = _build_metadata(options.namespace, f"{NAME}-installation")
    rules = permissions.build_named_rules({"configmaps": CONFIGMAP}, ("get",))
    return [
        objects.build_role("Role", metadata, rules),
        objects.build_binding("RoleBinding", metadata, account),
    ]


def build_approval_access(options: InstallOptions, namespace: str = NAME) -> list[Json]:
    """Build the access with which the controller approve records Nodes in their access tokens.

    It is empty for other controllers. Without any their manifests are printed separately.
    """
    if options.controllers and "approve" not in options.controllers:
        return []
    account: Json = {
        "kind": "ServiceAccount",
        "name": CONTROLLER_NAME,
        "namespace": options.namespace,
    }
    metadata = _build_metadata(namespace, f"{NAME}-approve")
    rules = permissions.build_named_rules({"secrets": token_store.TOKEN_SECRET}, ("get", "patch"))
    return [
        objects.build_role("Role", metadata, rules),
        objects.build_binding("RoleBinding", metadata, account),
    ]


def _build_service(metadata: Json, selector: Json) -> Json:
    ports = [{"name": "https", "port": PORT, "targetPort": "https"}]
    spec = {"selector": selector, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _build_pod(account: str, container: Json) -> Json:
    secret: Json = {"secretName": CERTIFICATE_SECRET, "defaultMode": 0o440}
    return {
        "serviceAccountName": account,
        "terminationGracePeriodSeconds": 30,
        # The kubelet gives files of Secrets to fsGroup.
        "securityContext": {**objects.POD_SECURITY, "fsGroup": objects.NONROOT_UID},
        "containers": [container],
        "volumes": [{"name": _VOLUME, "secret": secret}],
    }


def _build_daemonset(options: InstallOptions, namespace: str, server: ServerOptions) -> Json:
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": _build_metadata(namespace),
        "spec": {
            "selector": {"matchLabels": SELECTOR},
            # The port belongs to one pod of a node at a time.
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
            "template": {
                "metadata": {"labels": _LABELS},
                "spec": {
                    **_build_pod(NAME, _build_container(options, _list_arguments(options, server))),
                    "priorityClassName": "system-cluster-critical",
                    "hostNetwork": True,
                    "dnsPolicy": "ClusterFirstWithHostNet",
                    "nodeSelector": {"node-role.kubernetes.io/control-plane": ""},
                    "tolerations": list(objects.CONTROL_PLANE_TOLERATIONS),
                },
            },
        },
    }


def _list_arguments(options: InstallOptions, server: ServerOptions) -> list[str]:
    return [
        f"--tokens={server.tokens}",
        *([f"--api-server={server.api_server}"] if server.api_server else []),
        *options.list_annotation_arguments(),
        *(
            f"--registry-needs-cluster={host}"
            for host in dict.fromkeys(server.registries_needing_cluster)
        ),
    ]


def _build_container(
    options: InstallOptions, arguments: list[str], *, is_on_host: bool = True
) -> Json:
    ports = {"https": PORT, "metrics": METRICS_PORT}
    return {
        "name": "server",
        "image": options.image,
        "command": ["treenail-controller"],
        "args": [
            "serve",
            f"--listen=:{PORT}",
            f"--certificate={_DIRECTORY}/tls.crt",
            f"--key={_DIRECTORY}/tls.key",
            f"--metrics=:{METRICS_PORT}",
            *arguments,
        ],
        "env": [
            objects.build_field_env("NODE_NAME", "spec.nodeName"),
            objects.build_field_env("POD_NAME", "metadata.name"),
            objects.build_field_env("POD_NAMESPACE", "metadata.namespace"),
        ],
        "ports": [
            {
                "name": name,
                "containerPort": port,
                **({"hostPort": port} if is_on_host else {}),
                "protocol": "TCP",
            }
            for name, port in ports.items()
        ],
        "volumeMounts": [{"name": _VOLUME, "mountPath": _DIRECTORY, "readOnly": True}],
        "livenessProbe": {
            **objects.build_probe("/healthz"),
            "initialDelaySeconds": 15,
            "periodSeconds": 20,
        },
        "readinessProbe": {**objects.build_probe("/readyz"), "periodSeconds": 5},
        "resources": {"requests": {"cpu": "20m", "memory": "64Mi"}},
        "securityContext": objects.CONTAINER_SECURITY,
    }


def _build_metadata(namespace: str = "", name: str = NAME) -> Json:
    scope: Json = {"namespace": namespace} if namespace else {}
    return {"name": name, **scope, "labels": _LABELS}


JOIN_NAME = "treenail-ignition-join"
_ADMISSION = "admissionregistration.k8s.io"
_BOOTSTRAPPER_ROLE = "system:node-bootstrapper"
"""Role of every cluster: it may create and watch certificate signing requests."""


def build_join_access(namespace: str) -> list[Json]:
    """Build the access to bootstrap tokens for the server, which is in this namespace.

    The server reads no Secret of kube-system. RBAC cannot restrict the names that it writes, so an
    admission policy does.
    """
    labels: Json = {
        "app.kubernetes.io/name": bootstrap_tokens.MANAGER,
        **component_names.PART_OF_LABELS,
    }
    metadata: Json = {"name": JOIN_NAME, "namespace": bootstrap_tokens.NAMESPACE, "labels": labels}
    whole: Json = {"name": JOIN_NAME, "labels": labels}
    account: Json = {
        "kind": "ServiceAccount",
        "name": bootstrap_tokens.MANAGER,
        "namespace": namespace,
    }
    machines: Json = {"apiGroup": objects.RBAC, "kind": "Group", "name": bootstrap_tokens.GROUP}
    bootstrappers = objects.build_binding("ClusterRoleBinding", whole, machines)
    bootstrappers["roleRef"] = {
        "apiGroup": objects.RBAC,
        "kind": "ClusterRole",
        "name": _BOOTSTRAPPER_ROLE,
    }
    return [
        objects.build_role("Role", metadata, permissions.build_rules([permissions.JOIN_VERBS])),
        objects.build_binding("RoleBinding", metadata, account),
        bootstrappers,
        *_build_admission_policy(
            whole, f"system:serviceaccount:{namespace}:{bootstrap_tokens.MANAGER}"
        ),
    ]


def _build_admission_policy(metadata: Json, user: str) -> list[Json]:
    return [
        {
            "apiVersion": f"{_ADMISSION}/v1",
            "kind": "ValidatingAdmissionPolicy",
            "metadata": metadata,
            "spec": {
                "failurePolicy": "Fail",
                # Atomic, hence with the API server's defaults.
                "matchConstraints": {
                    "matchPolicy": "Equivalent",
                    "namespaceSelector": {
                        "matchLabels": {"kubernetes.io/metadata.name": bootstrap_tokens.NAMESPACE}
                    },
                    "objectSelector": {},
                    "resourceRules": [
                        {
                            "apiGroups": [""],
                            "apiVersions": ["*"],
                            "operations": ["CREATE", "UPDATE", "DELETE"],
                            "resources": ["secrets"],
                            "scope": "*",
                        }
                    ],
                },
                "matchConditions": [
                    {
                        "name": "by-the-server",
                        "expression": f"request.userInfo.username == '{user}'",
                    }
                ],
                "validations": [
                    {
                        "expression": "request.operation == 'DELETE' || "
                        f"(object.type == '{bootstrap_tokens.SECRET_TYPE}' && "
                        f"object.metadata.name.startsWith('{bootstrap_tokens.SECRET_PREFIX}') && "
                        f"{_format_label_check('object')})",
                        "message": "the Ignition server may write only its bootstrap tokens",
                        "reason": "Forbidden",
                    },
                    {
                        "expression": "request.operation == 'CREATE' || "
                        f"(oldObject.type == '{bootstrap_tokens.SECRET_TYPE}' && "
                        f"{_format_label_check('oldObject')})",
                        "message": "the Ignition server may change only its bootstrap tokens",
                        "reason": "Forbidden",
                    },
                ],
            },
        },
        {
            "apiVersion": f"{_ADMISSION}/v1",
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": metadata,
            "spec": {"policyName": JOIN_NAME, "validationActions": ["Deny"]},
        },
    ]


def _format_label_check(name: str) -> str:
    labels, label = f"{name}.metadata.labels", bootstrap_tokens.MANAGER_LABEL
    return (
        f"has({labels}) && '{label}' in {labels} && "
        f"{labels}['{label}'] == '{bootstrap_tokens.MANAGER}'"
    )
