"""Builds the access with which new machines join: bootstrap tokens, and requests of kubelets."""

from treenail.api.decode import Json
from treenail.manifests import objects, permissions
from treenail.provisioning.tokens.bootstrap_tokens import (
    GROUP,
    MANAGER,
    MANAGER_LABEL,
    NAMESPACE,
    SECRET_PREFIX,
    SECRET_TYPE,
)

NAME = "treenail-ignition-join"
_ADMISSION = "admissionregistration.k8s.io"
_BOOTSTRAPPER_ROLE = "system:node-bootstrapper"
"""Role of every cluster: it may create and watch certificate signing requests."""


def build_join_access(namespace: str) -> list[Json]:
    """Build the access to bootstrap tokens for the server, which is in this namespace.

    The server reads no Secret of kube-system. RBAC cannot restrict the names that it writes, so an
    admission policy does.
    """
    labels: Json = {"app.kubernetes.io/name": MANAGER, "app.kubernetes.io/part-of": "treenail"}
    place: Json = {"name": NAME, "namespace": NAMESPACE, "labels": labels}
    whole: Json = {"name": NAME, "labels": labels}
    account: Json = {"kind": "ServiceAccount", "name": MANAGER, "namespace": namespace}
    machines: Json = {"apiGroup": objects.RBAC, "kind": "Group", "name": GROUP}
    bootstrappers = objects.build_binding("ClusterRoleBinding", whole, machines)
    bootstrappers["roleRef"] = {
        "apiGroup": objects.RBAC,
        "kind": "ClusterRole",
        "name": _BOOTSTRAPPER_ROLE,
    }
    return [
        objects.build_role("Role", place, permissions.build_rules([permissions.JOIN_VERBS])),
        objects.build_binding("RoleBinding", place, account),
        bootstrappers,
        *_build_admission_policy(whole, f"system:serviceaccount:{namespace}:{MANAGER}"),
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
                        "matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}
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
                        f"(object.type == '{SECRET_TYPE}' && "
                        f"object.metadata.name.startsWith('{SECRET_PREFIX}') && "
                        f"{_format_label_check('object')})",
                        "message": "the Ignition server may write only its bootstrap tokens",
                        "reason": "Forbidden",
                    },
                    {
                        "expression": "request.operation == 'CREATE' || "
                        f"(oldObject.type == '{SECRET_TYPE}' && "
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
            "spec": {"policyName": NAME, "validationActions": ["Deny"]},
        },
    ]


def _format_label_check(name: str) -> str:
    return (
        f"has({name}.metadata.labels) && '{MANAGER_LABEL}' in {name}.metadata.labels && "
        f"{name}.metadata.labels['{MANAGER_LABEL}'] == '{MANAGER}'"
    )
