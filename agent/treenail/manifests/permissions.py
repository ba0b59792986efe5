"""The exact permissions of each controller and of the agent.

Maps a resource with its group (``daemonsets.apps``, ``pods/eviction``) to its verbs.
"""

from collections.abc import Iterable, Mapping

from treenail.api import component_names
from treenail.api.controllerconfig import NAME as CONTROLLER_CONFIG
from treenail.api.decode import Json
from treenail.controllers.handover import handover_objects, image_mode
from treenail.kube import resources
from treenail.provisioning.approval.request import KUBELET_SIGNER

GROUP = resources.MACHINECONFIGPOOLS.group

Verbs = Mapping[str, tuple[str, ...]]

_CERTIFICATES = resources.CERTIFICATESIGNINGREQUESTS.group
_OBJECT_NAMES = {
    f"signers.{_CERTIFICATES}": KUBELET_SIGNER,
    # Whether the Machine Config Operator runs its controllers.
    "deployments.apps": component_names.MCO_CONTROLLER,
}
"""Resources of which a controller needs only one object."""
_WATCH_VERBS = ("list", "watch")
_POOL_SOURCES = (resources.KUBELETCONFIGS, resources.CONTAINERRUNTIMECONFIGS)

EVENT_VERBS: Verbs = {"events": ("create", "patch")}
"""Verbs for Events, in the namespace of Events about cluster-scoped objects."""

GATE_VERBS: Verbs = {"secrets": ("get",)}
"""Verbs for the Secrets of gates, in the namespace of the controller."""


def _grant(verbs: tuple[str, ...], *kinds: resources.Resource) -> Verbs:
    return {f"{kind.plural}.{kind.group}": verbs for kind in kinds}


_MACHINE_OWNERS = (resources.MACHINEDEPLOYMENTS, resources.MACHINESETS)
CONTROLLER_VERBS: Mapping[str, Verbs] = {
    "render": {
        f"machineconfigs.{GROUP}": ("create", "delete", "get", *_WATCH_VERBS),
        f"machineconfigpools.{GROUP}": ("patch", *_WATCH_VERBS),
        f"machineconfigpools/status.{GROUP}": ("patch",),
        # The OwnerReferencesPermissionEnforcement plugin needs this for blockOwnerDeletion.
        f"machineconfigpools/finalizers.{GROUP}": ("update",),
        f"controllerconfigs.{GROUP}": _WATCH_VERBS,
        **_grant(_WATCH_VERBS, *_POOL_SOURCES),
        f"osimagestreams.{GROUP}": _WATCH_VERBS,
        "nodes": _WATCH_VERBS,
    },
    "rollout": {
        # Logins and CAs, for pools whose image is a tag.
        f"controllerconfigs.{GROUP}": ("get",),
        f"machineconfigs.{GROUP}": ("get",),
        f"machineconfigpools.{GROUP}": _WATCH_VERBS,
        f"machineconfigpools/status.{GROUP}": ("patch",),
        f"pinnedimagesets.{GROUP}": _WATCH_VERBS,
        f"rolloutpolicies.{resources.ROLLOUTPOLICIES.group}": _WATCH_VERBS,
        f"rolloutpolicies/status.{resources.ROLLOUTPOLICIES.group}": ("patch",),
        f"machineconfignodes.{GROUP}": ("create", "patch", *_WATCH_VERBS),
        f"machineosbuilds.{GROUP}": _WATCH_VERBS,
        f"machineosconfigs.{GROUP}": _WATCH_VERBS,
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
        f"machineconfignodes.{GROUP}": ("get", *_WATCH_VERBS),
        f"machineconfignodes/status.{GROUP}": ("patch",),
    },
    "approve": {
        f"certificatesigningrequests.{_CERTIFICATES}": ("get", *_WATCH_VERBS),
        f"certificatesigningrequests/approval.{_CERTIFICATES}": ("update",),
        # The CertificateApproval plugin of kube-apiserver requires this for the signer.
        f"signers.{_CERTIFICATES}": ("approve",),
        f"machineconfigpools.{GROUP}": _WATCH_VERBS,
        "nodes": ("patch", *_WATCH_VERBS),
    },
    "build": {
        f"controllerconfigs.{GROUP}": ("get",),
        # Pruning reads what refers to an image.
        f"machineconfignodes.{GROUP}": ("list",),
        f"machineconfigs.{GROUP}": ("get",),
        f"machineconfigpools.{GROUP}": _WATCH_VERBS,
        f"machineconfigpools/status.{GROUP}": ("patch",),
        f"rolloutpolicies.{resources.ROLLOUTPOLICIES.group}": ("list",),
        f"machineosbuilds.{GROUP}": ("create", "delete", "patch", *_WATCH_VERBS),
        f"machineosbuilds/status.{GROUP}": ("patch",),
        f"machineosconfigs.{GROUP}": ("patch", *_WATCH_VERBS),
        f"machineosconfigs/status.{GROUP}": ("patch",),
        "nodes": _WATCH_VERBS,
    },
    "install": {
        f"controllerconfigs.{GROUP}": ("get",),
        f"machineconfigs.{GROUP}": ("get",),
        f"machineconfigpools.{GROUP}": _WATCH_VERBS,
        f"machineosbuilds.{GROUP}": ("create", "delete", *_WATCH_VERBS),
        f"machineosbuilds/status.{GROUP}": ("patch",),
        f"machineosconfigs.{GROUP}": ("create", "patch", *_WATCH_VERBS),
        f"machineosconfigs/status.{GROUP}": ("patch",),
        "nodes": ("patch", *_WATCH_VERBS),
    },
    "generate": {
        f"machineconfigs.{GROUP}": ("create", "delete", "get", "update", *_WATCH_VERBS),
        f"machineconfigpools.{GROUP}": _WATCH_VERBS,
        f"controllerconfigs.{GROUP}": _WATCH_VERBS,
        f"machineosconfigs.{GROUP}": _WATCH_VERBS,
        "deployments.apps": ("get",),
        **_grant(_WATCH_VERBS, *resources.GENERATOR_SOURCES),
        **{
            f"{source.plural}{part}.{source.group}": verbs
            for source in _POOL_SOURCES
            for part, verbs in {
                "": ("patch", *_WATCH_VERBS),
                "/finalizers": ("update",),
                "/status": ("patch",),
            }.items()
        },
        "clusterimagepolicies/status.config.openshift.io": ("patch",),
        "imagepolicies/status.config.openshift.io": ("patch",),
    },
    # The rest is in the namespace of each control plane: `build_hosted_rules`.
    "hosted": {
        # Beside NodePools: also where the Roles of a hosted cluster are missing.
        **EVENT_VERBS,
        **_grant(_WATCH_VERBS, resources.NODEPOOLS, resources.HOSTEDCLUSTERS),
        **_grant(_WATCH_VERBS, resources.HOSTEDCONTROLPLANES, resources.MACHINES),
        **_grant(("get", *_WATCH_VERBS), resources.MACHINESETS, resources.MACHINEDEPLOYMENTS),
        f"rolloutpolicies.{resources.ROLLOUTPOLICIES.group}": _WATCH_VERBS,
        f"rolloutpolicies/status.{resources.ROLLOUTPOLICIES.group}": ("patch",),
    },
    # The rest is in the namespaces of control planes and of NodePools.
    "nodepools": {
        **EVENT_VERBS,
        **_grant(_WATCH_VERBS, resources.NODEPOOLS, resources.HOSTEDCLUSTERS),
        **_grant(_WATCH_VERBS, resources.HOSTEDCONTROLPLANES, resources.MACHINES),
        **_grant(_WATCH_VERBS, *_MACHINE_OWNERS, resources.MACHINEHEALTHCHECKS),
    },
}

_OPTIONAL_CONTROLLERS = ("approve", "build", "install", "generate", "hosted", "nodepools")
DEFAULT_CONTROLLERS = tuple(name for name in CONTROLLER_VERBS if name not in _OPTIONAL_CONTROLLERS)
"""Controllers of a cluster without image builds, new machines and an installation in image mode."""

BUILD_VERBS: Verbs = {
    "configmaps": ("create", "delete", "get", "update", *_WATCH_VERBS),
    "jobs.batch": ("create", "delete", "get", "patch", *_WATCH_VERBS),
    "pods": _WATCH_VERBS,
    "secrets": ("create", "delete", "get", "update"),
}
"""Verbs of the build controller in the namespace of builds."""


ADOPTION_VERBS: Verbs = {"secrets": ("create", "get", "update")}
"""Verbs of the install controller in the namespace of builds: the logins of the installation."""


def build_hosted_rules(infra_id: str) -> list[Json]:
    """Build the rules for one control plane; ``infra_id`` names its Cluster of Cluster API."""
    secrets = ["admin-kubeconfig", *([f"{infra_id}-kubeconfig"] if infra_id else [])]
    return [
        _build_rule(f"machines.{resources.MACHINES.group}", ["delete"]),
        # RBAC cannot restrict create by resourceNames: the request has no name yet.
        _build_rule("configmaps", ["create"]),
        *build_named_rules({"configmaps": component_names.HOSTED_ROLLOUTS}, ("get", "patch")),
        {**_build_rule("secrets", ["get"]), "resourceNames": secrets},
    ]


OWNING_VERBS: Verbs = {
    **_grant(("create", "delete", "get", "patch"), *_MACHINE_OWNERS),
    **_grant(("create", "delete", "get"), resources.MACHINEHEALTHCHECKS),
    "*.infrastructure.cluster.x-k8s.io": ("get",),
    "configmaps": ("get", "list"),
    "secrets": ("create", "delete", "get", "list", "update"),
}
"""Verbs of nodepools in the namespace of a control plane; its Secrets have names with hashes."""

NODE_POOL_VERBS: Verbs = {
    # get: hosted adds the conditions of a refresh to those of nodepools.
    f"nodepools.{resources.NODEPOOLS.group}": ("get", "patch"),
    f"nodepools/status.{resources.NODEPOOLS.group}": ("patch",),
    "configmaps": ("get", "list"),
    "secrets": ("get",),
}
"""Verbs of nodepools in a namespace of NodePools; users choose the names of what a pool uses."""


SERVER_VERBS: Verbs = {
    f"controllerconfigs.{GROUP}": _WATCH_VERBS,
    f"machineconfigpools.{GROUP}": _WATCH_VERBS,
    # A pool may return to a config whose contents the server no longer has in memory.
    f"machineconfigs.{GROUP}": ("get", *_WATCH_VERBS),
    f"machineosbuilds.{GROUP}": _WATCH_VERBS,
    f"machineosconfigs.{GROUP}": _WATCH_VERBS,
    # Which Nodes are those of the machines.
    f"certificatesigningrequests.{_CERTIFICATES}": ("list",),
    # Which images run, and whose Nodes did not appear.
    "nodes": _WATCH_VERBS,
}
"""Verbs of the Ignition server for objects of the cluster."""


HOSTED_SERVER_VERBS: Verbs = {"secrets": _WATCH_VERBS}
"""Verbs of the Ignition server for a hosted cluster, beside its control plane."""


JOIN_VERBS: Verbs = {"secrets": ("create", "delete", "update")}
"""Verbs of the Ignition server in kube-system, for bootstrap tokens; the admission policy of the
manifests restricts them to its own."""


def build_installation_rules(*, hands_over: bool) -> list[Json]:
    """Build the rules to read what an installation left, and to complete it."""
    names = [image_mode.CONFIGMAP, handover_objects.RESULT_CONFIGMAP]
    rules: list[Json] = [{**_build_rule("configmaps", ["get"]), "resourceNames": names}]
    if hands_over:
        secret, result = (
            {"secrets": handover_objects.HANDOVER_SECRET},
            {"configmaps": handover_objects.RESULT_CONFIGMAP},
        )
        # RBAC cannot restrict create by resourceNames: the request has no name yet.
        rules.append(_build_rule("configmaps", ["create"]))
        rules += build_named_rules(result, ("update",))
        rules += build_named_rules(secret, ("delete", "get", *_WATCH_VERBS))
    return rules


def build_named_rules(names: Mapping[str, str], verbs: Iterable[str]) -> list[Json]:
    """Build rules for one object of each resource; ``names`` maps resources to names."""
    return [
        {**_build_rule(resource, sorted(verbs)), "resourceNames": [name]}
        for resource, name in sorted(names.items())
    ]


def build_controllerconfig_rule() -> Json:
    """Build the rule for agents to watch the only ControllerConfig."""
    rule = _build_rule(f"controllerconfigs.{GROUP}", list(_WATCH_VERBS))
    return {**rule, "resourceNames": [CONTROLLER_CONFIG]}


NODE_VERBS: Verbs = {
    # Not list: a node can read only the rendered configs whose names it knows.
    f"machineconfigs.{GROUP}": ("get",),
    # Not get: RBAC cannot restrict a group to the object of the requester's name, and the admission
    # policy applies to writes only. The agent reads its own object in the response to a patch.
    f"machineconfignodes/status.{GROUP}": ("patch",),
    f"machineconfigurations.{resources.MACHINECONFIGURATIONS.group}": ("get",),
    # Not list: the Node names the sets.
    f"pinnedimagesets.{GROUP}": ("get",),
}
"""Verbs of the agent beyond those of the Node authorizer."""


def build_rules(permissions: Iterable[Verbs]) -> list[Json]:
    """Build the rules of a role with all of these verbs."""
    together: dict[str, set[str]] = {}
    for verbs in permissions:
        for resource, names in verbs.items():
            together.setdefault(resource, set()).update(names)
    return [_build_rule(resource, sorted(verbs)) for resource, verbs in sorted(together.items())]


def build_lease_rules(name: str) -> list[Json]:
    """Build the rules of a candidate for the Lease of this name."""
    lease = "leases.coordination.k8s.io"
    # RBAC cannot restrict create by resourceNames: the request has no name yet.
    return [
        _build_rule(lease, ["create"]),
        {**_build_rule(lease, ["get", "update"]), "resourceNames": [name]},
    ]


def _build_rule(resource: str, verbs: list[str]) -> Json:
    name, _, group = resource.partition(".")
    rule: Json = {"apiGroups": [group], "resources": [name], "verbs": verbs}
    if resource in _OBJECT_NAMES:
        rule["resourceNames"] = [_OBJECT_NAMES[resource]]
    return rule
