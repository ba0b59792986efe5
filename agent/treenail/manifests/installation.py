"""Manifests that install controllers and agents in a cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources

import yaml

from treenail import __version__
from treenail.api import annotations as key
from treenail.api import component_names, decode
from treenail.controllers.image_build.job_builder import JobSettings
from treenail.manifests import objects, permissions

NAME = component_names.CONTROLLER
NODE_ROLE_NAME = "treenail-node"
PORT = 8080
WEB_PORT = 8081
EVENTS_NAMESPACE = "default"
"""Namespace of Events about nodes and pools."""

SIGNING_KEY = "key.pem"
KEY_VOLUME = "signing-key"
_KEY_DIRECTORY = "/run/secrets/treenail-signing-key"
_RBAC = "rbac.authorization.k8s.io"
LABELS: decode.Json = {"app.kubernetes.io/name": NAME, **component_names.PART_OF_LABELS}
SELECTOR: decode.Json = {"app.kubernetes.io/name": NAME}


@dataclass(frozen=True, slots=True)
class InstallOptions:
    """Controllers, namespace and image to install."""

    controllers: Sequence[str] = permissions.DEFAULT_CONTROLLERS
    namespace: str = component_names.NAMESPACE
    image: str = f"localhost/{NAME}:{__version__}"
    has_generator_kinds: bool = True
    """Define the kinds that the controller ``generate`` reads; OpenShift has its own."""
    has_web_page: bool = False
    """Serve the page, on the loopback interface of each pod."""
    metrics_namespaces: Sequence[str] = ()
    """Namespaces whose pods may read the metrics."""
    builds: JobSettings = field(default_factory=JobSettings)
    """Jobs of image builds, if the controller ``build`` is installed."""
    signing_key_secret: str = ""
    """Secret with the key that signs built images, in its field `SIGNING_KEY`; empty for none."""
    image_annotation: str = key.DESIRED_OS_IMAGE
    """Annotation of a Node that names its image, for the controllers and the Ignition server."""
    serve_namespace: str = ""
    """Namespace of the Ignition server; empty for the default one."""
    control_planes: Mapping[str, str] = field(default_factory=dict)
    """Of hosted clusters: the infrastructure ID, or nothing, by namespace."""
    node_pool_namespaces: Sequence[str] = ()
    """Of the controller ``nodepools``: namespaces of NodePools."""
    owning_arguments: Sequence[str] = ()
    """Of the controller ``nodepools``."""

    @property
    def has_builds(self) -> bool:
        return "build" in self.controllers

    @property
    def has_handover(self) -> bool:
        return "install" in self.controllers

    @property
    def has_generator(self) -> bool:
        return "generate" in self.controllers

    @property
    def build_namespace(self) -> str:
        """Namespace of the Jobs."""
        return self.builds.namespace or self.namespace

    def list_annotation_arguments(self) -> list[str]:
        """Return the argument that names the image annotation; empty for the default one."""
        if self.image_annotation == key.DESIRED_OS_IMAGE:
            return []
        return [f"--image-annotation={self.image_annotation.removeprefix(key.PREFIX)}"]


def build_documents(options: InstallOptions) -> list[decode.Json]:
    """Build all manifests, in an order in which they can be created.

    Without controllers these are the kinds and the access of agents only.
    """
    if not options.controllers:
        return [*load_crds(), *build_node_access()]
    return [
        *_build_namespaces(options),
        *load_crds(),
        *(
            load_crds("crds/generate")
            if options.has_generator and options.has_generator_kinds
            else []
        ),
        *build_node_access(),
        *_build_controller_access(options),
        *build_hosted_access(options),
        _build_deployment(options),
        _build_disruption_budget(options),
        _build_network_policy(options),
    ]


def load_crds(directory: str = "crds") -> list[decode.Json]:
    """Load CustomResourceDefinitions in a fixed order.

    Those of every installation are in the MCO's API group, those in ``crds/generate`` in
    OpenShift's groups too.
    """
    folder = resources.files("treenail.manifests").joinpath(directory)
    files = sorted(
        (path for path in folder.iterdir() if path.name.endswith(".yaml")),
        key=lambda path: path.name,
    )
    # The loader in C takes 10 ms, the other one 90.
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    # Both loaders are safe.
    return [yaml.load(path.read_text("utf-8"), Loader=loader) for path in files]  # noqa: S506


def build_node_access() -> list[decode.Json]:
    """Build the access of agents, which use the credentials of their node."""
    nodes: decode.Json = {"apiGroup": _RBAC, "kind": "Group", "name": "system:nodes"}
    return [
        _build_role(
            "ClusterRole",
            NODE_ROLE_NAME,
            "",
            [
                *permissions.build_rules([permissions.NODE_VERBS]),
                permissions.build_controllerconfig_rule(),
            ],
        ),
        _build_binding("ClusterRoleBinding", NODE_ROLE_NAME, "", nodes),
        _build_role(
            "Role",
            NODE_ROLE_NAME,
            EVENTS_NAMESPACE,
            permissions.build_rules([permissions.EVENT_VERBS]),
        ),
        _build_binding("RoleBinding", NODE_ROLE_NAME, EVENTS_NAMESPACE, nodes),
        *_build_node_admission_policy(),
    ]


def _build_namespaces(options: InstallOptions) -> list[decode.Json]:
    levels = {options.namespace: "restricted"}
    if options.has_builds:
        # buildah needs root and a container's default capabilities.
        levels[options.build_namespace] = "baseline"
    return [objects.build_namespace(name, level, LABELS) for name, level in levels.items()]


def _build_controller_access(options: InstallOptions) -> list[decode.Json]:
    account: decode.Json = {"kind": "ServiceAccount", "name": NAME, "namespace": options.namespace}
    chosen = [permissions.CONTROLLER_VERBS[name] for name in options.controllers]
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": _build_metadata(options.namespace),
        },
        _build_role("ClusterRole", NAME, "", permissions.build_rules(chosen)),
        _build_binding("ClusterRoleBinding", NAME, "", account),
        _build_role(
            "Role", NAME, EVENTS_NAMESPACE, permissions.build_rules([permissions.EVENT_VERBS])
        ),
        _build_binding("RoleBinding", NAME, EVENTS_NAMESPACE, account),
        _build_role(
            "Role", f"{NAME}-leader", options.namespace, permissions.build_lease_rules(NAME)
        ),
        _build_binding("RoleBinding", f"{NAME}-leader", options.namespace, account),
        *_build_gate_access(options, account),
        *_build_job_access(options, account),
        *_build_installation_access(options, account),
        *(_build_kubelet_config_access(account) if options.has_generator else []),
    ]


def build_hosted_access(options: InstallOptions) -> list[decode.Json]:
    """Build the access to hosted clusters: Roles in the namespaces of control planes and pools."""
    account: decode.Json = {"kind": "ServiceAccount", "name": NAME, "namespace": options.namespace}
    owns, roles = "nodepools" in options.controllers, []
    for namespace, infra_id in options.control_planes.items():
        rules = permissions.build_hosted_rules(infra_id) if "hosted" in options.controllers else []
        rules += permissions.build_rules([permissions.OWNING_VERBS] if owns else [])
        roles.append((f"{NAME}-hosted", namespace, rules))
    for namespace in options.node_pool_namespaces if owns else ():
        rules = permissions.build_rules([permissions.NODE_POOL_VERBS])
        roles.append((f"{NAME}-nodepools", namespace, rules))
    return [
        document
        for name, namespace, rules in roles
        for document in (
            _build_role("Role", name, namespace, rules),
            _build_binding("RoleBinding", name, namespace, account),
        )
    ]


def _build_kubelet_config_access(account: decode.Json) -> list[decode.Json]:
    """Build the access to the kubelet's configuration in a cluster of kubeadm."""
    name, namespace = f"{NAME}-kubelet-config", "kube-system"
    rules = permissions.build_named_rules({"configmaps": "kubelet-config"}, ("get",))
    return [
        _build_role("Role", name, namespace, rules),
        _build_binding("RoleBinding", name, namespace, account),
    ]


def _build_job_access(options: InstallOptions, account: decode.Json) -> list[decode.Json]:
    """Build the account of builds, which has no permission, and the access to its namespace."""
    if not options.has_builds:
        return []
    namespace, name = options.build_namespace, f"{NAME}-builds"
    rules = permissions.build_rules([permissions.BUILD_VERBS])
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": _build_metadata(namespace, options.builds.account),
            "automountServiceAccountToken": False,
        },
        _build_role("Role", name, namespace, rules),
        _build_binding("RoleBinding", name, namespace, account),
    ]


def _build_installation_access(options: InstallOptions, account: decode.Json) -> list[decode.Json]:
    """Build the access to the objects of an installation in image mode.

    The build controller waits for the image that the installation built.
    """
    if not (options.has_builds or options.has_handover):
        return []
    name, adoption = f"{NAME}-installation", f"{NAME}-adoption"
    rules = permissions.build_installation_rules(hands_over=options.has_handover)
    objects = [
        _build_role("Role", name, options.namespace, rules),
        _build_binding("RoleBinding", name, options.namespace, account),
    ]
    if options.has_handover:
        logins = permissions.build_rules([permissions.ADOPTION_VERBS])
        objects += [
            _build_role("Role", adoption, options.build_namespace, logins),
            _build_binding("RoleBinding", adoption, options.build_namespace, account),
        ]
    return objects


def _build_job_arguments(options: InstallOptions) -> list[str]:
    if not options.has_builds:
        return [f"--build-namespace={options.build_namespace}"] if options.has_handover else []
    builds, defaults = options.builds, JobSettings()
    arguments = [
        f"--builder-image={builds.image}",
        f"--build-namespace={options.build_namespace}",
    ]
    for flag, value, default in (
        ("cpu", builds.cpu, defaults.cpu),
        ("memory", builds.memory, defaults.memory),
        ("storage", builds.storage, defaults.storage),
        ("cache", builds.cache_repository, defaults.cache_repository),
    ):
        if value != default:
            arguments.append(f"--build-{flag}={value}")
    return arguments


def _build_approval_arguments(options: InstallOptions) -> list[str]:
    is_needed = "approve" in options.controllers and options.serve_namespace
    return [f"--serve-namespace={options.serve_namespace}"] if is_needed else []


def _build_gate_access(options: InstallOptions, account: decode.Json) -> list[decode.Json]:
    """Build the access to the Secrets that rollout policies name."""
    if {"rollout", "hosted"}.isdisjoint(options.controllers):
        return []
    name = f"{NAME}-gates"
    rules = permissions.build_rules([permissions.GATE_VERBS])
    return [
        _build_role("Role", name, options.namespace, rules),
        _build_binding("RoleBinding", name, options.namespace, account),
    ]


def _build_deployment(options: InstallOptions) -> decode.Json:
    template: decode.Json = {
        "metadata": {"labels": LABELS},
        "spec": {
            "serviceAccountName": NAME,
            "priorityClassName": "system-cluster-critical",
            "terminationGracePeriodSeconds": 30,
            "securityContext": {
                **objects.POD_SECURITY,
                # The kubelet gives files of Secrets to this group.
                **({"fsGroup": objects.NONROOT_UID} if options.signing_key_secret else {}),
            },
            "tolerations": list(objects.CONTROL_PLANE_TOLERATIONS),
            # Prefer two nodes, so that one drain never stops both replicas, and two zones.
            "affinity": {
                "podAntiAffinity": {
                    "preferredDuringSchedulingIgnoredDuringExecution": [
                        _build_anti_affinity(100, "kubernetes.io/hostname"),
                        _build_anti_affinity(50, "topology.kubernetes.io/zone"),
                    ]
                }
            },
            "containers": [_build_container(options)],
            **_build_volumes(options),
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _build_metadata(options.namespace),
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": SELECTOR},
            "template": template,
        },
    }


def _build_volumes(options: InstallOptions) -> decode.Json:
    if not options.signing_key_secret:
        return {}
    secret: decode.Json = {
        "secretName": options.signing_key_secret,
        "defaultMode": 0o440,
        "items": [{"key": SIGNING_KEY, "path": SIGNING_KEY}],
    }
    return {"volumes": [{"name": KEY_VOLUME, "secret": secret}]}


def _build_mounts(options: InstallOptions) -> decode.Json:
    if not options.signing_key_secret:
        return {}
    mount: decode.Json = {"name": KEY_VOLUME, "mountPath": _KEY_DIRECTORY, "readOnly": True}
    return {"volumeMounts": [mount]}


def _build_anti_affinity(weight: int, topology_key: str) -> decode.Json:
    return {
        "weight": weight,
        "podAffinityTerm": {
            "labelSelector": {"matchLabels": SELECTOR},
            "topologyKey": topology_key,
        },
    }


def _build_container(options: InstallOptions) -> decode.Json:
    enabled = ",".join(options.controllers)
    return {
        "name": "controller",
        "image": options.image,
        "command": ["treenail-controller"],
        "args": [
            "run",
            f"--enable={enabled}",
            f"--metrics=:{PORT}",
            *options.list_annotation_arguments(),
            *([f"--web=127.0.0.1:{WEB_PORT}"] if options.has_web_page else []),
            *_build_job_arguments(options),
            *options.owning_arguments,
            *_build_approval_arguments(options),
            *(
                [f"--signing-key={_KEY_DIRECTORY}/{SIGNING_KEY}"]
                if options.signing_key_secret
                else []
            ),
        ],
        **_build_mounts(options),
        "env": [
            objects.build_field_env("NODE_NAME", "spec.nodeName"),
            objects.build_field_env("POD_NAME", "metadata.name"),
            objects.build_field_env("POD_NAMESPACE", "metadata.namespace"),
        ],
        "ports": [
            {"name": "metrics", "containerPort": PORT},
            *([{"name": "web", "containerPort": WEB_PORT}] if options.has_web_page else []),
        ],
        "livenessProbe": {
            **objects.build_probe("/healthz"),
            "initialDelaySeconds": 15,
            "periodSeconds": 20,
        },
        "readinessProbe": {**objects.build_probe("/readyz"), "periodSeconds": 5},
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
        "securityContext": objects.CONTAINER_SECURITY,
    }


def _build_disruption_budget(options: InstallOptions) -> decode.Json:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _build_metadata(options.namespace),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": SELECTOR},
            # A pod that never becomes ready must not block the drain of its node.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def _build_network_policy(options: InstallOptions) -> decode.Json:
    """Admit only Prometheus to the pods: metrics and probes ask for no password.

    A NetworkPolicy never blocks the node of a pod, so the kubelet still probes, and
    `kubectl port-forward` still works. Egress stays open: policies name alert and lock servers.
    """
    rule: decode.Json = {
        "from": [
            {
                "namespaceSelector": {
                    "matchExpressions": [
                        {
                            # The API server sets this label on every namespace.
                            "key": "kubernetes.io/metadata.name",
                            "operator": "In",
                            "values": list(options.metrics_namespaces),
                        }
                    ]
                }
            }
        ],
        "ports": [{"port": "metrics", "protocol": "TCP"}],
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _build_metadata(options.namespace),
        "spec": {
            "podSelector": {"matchLabels": SELECTOR},
            "policyTypes": ["Ingress"],
            **({"ingress": [rule]} if options.metrics_namespaces else {}),
        },
    }


def _build_node_admission_policy() -> list[decode.Json]:
    """Restrict each node to its own MachineConfigNode, which RBAC cannot express."""
    group = "admissionregistration.k8s.io"
    return [
        {
            "apiVersion": f"{group}/v1",
            "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": NODE_ROLE_NAME, "labels": LABELS},
            "spec": {
                "failurePolicy": "Fail",
                # Atomic, hence with the API server's defaults: without them a server-side apply
                # after a client-side one conflicts.
                "matchConstraints": {
                    "matchPolicy": "Equivalent",
                    "namespaceSelector": {},
                    "objectSelector": {},
                    "resourceRules": [
                        {
                            "apiGroups": [permissions.GROUP],
                            "apiVersions": ["*"],
                            "operations": ["*"],
                            "resources": ["machineconfignodes", "machineconfignodes/status"],
                            "scope": "*",
                        }
                    ],
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
                        "message": "a node may write only the MachineConfigNode of its own name",
                        # Without it the API server says 422 Invalid.
                        "reason": "Forbidden",
                    }
                ],
            },
        },
        {
            "apiVersion": f"{group}/v1",
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": NODE_ROLE_NAME, "labels": LABELS},
            "spec": {"policyName": NODE_ROLE_NAME, "validationActions": ["Deny"]},
        },
    ]


def _build_role(kind: str, name: str, namespace: str, rules: list[decode.Json]) -> decode.Json:
    return objects.build_role(kind, _build_metadata(namespace, name), rules)


def _build_binding(kind: str, name: str, namespace: str, subject: decode.Json) -> decode.Json:
    return objects.build_binding(kind, _build_metadata(namespace, name), subject)


def _build_metadata(namespace: str, name: str = NAME) -> decode.Json:
    scope: decode.Json = {"namespace": namespace} if namespace else {}
    return {"name": name, **scope, "labels": LABELS}
