"""Defaults and validation of the built-in kinds.

kube-apiserver has a schema for each of them. The lab stores their fields unchanged: it checks and
defaults only the fields that the agent, the controllers and their tests use.
"""

import base64
from collections.abc import Callable
from typing import Any

from treenail_lab.apiserver.errors import StatusCause
from treenail_lab.apiserver.objects import Json, copy_json, find_value
from treenail_lab.apiserver.registry import crds
from treenail_lab.apiserver.registry.certificate_requests import find_request_problems
from treenail_lab.apiserver.registry.jobs import find_job_problems, prepare_new_job
from treenail_lab.apiserver.schema.kinds import ResourceKind

_POD = {
    "restartPolicy": "Always",
    "terminationGracePeriodSeconds": 30,
    "dnsPolicy": "ClusterFirst",
    "serviceAccountName": "default",
    "securityContext": {},
    "schedulerName": "default-scheduler",
    "enableServiceLinks": True,
}
_CONTAINER = {
    "resources": {},
    "terminationMessagePath": "/dev/termination-log",
    "terminationMessagePolicy": "File",
    "imagePullPolicy": "IfNotPresent",
}
# The mutable fields of a pod spec.
_MUTABLE_POD_FIELDS = ("tolerations", "activeDeadlineSeconds", "terminationGracePeriodSeconds")


def prepare_new(kind: ResourceKind, obj: Json) -> Json:
    """Return a new object with defaults, and without a status that clients cannot set."""
    match kind.kind:
        case "Pod":
            return obj | {"spec": _default_pod_spec(obj), "status": {"phase": "Pending"}}
        case "Job":
            return prepare_new_job(obj)
        case "Namespace":
            return obj | {
                "spec": {"finalizers": ["kubernetes"]},
                "status": {"phase": "Active"},
                "metadata": obj["metadata"]
                | {
                    "labels": (obj["metadata"].get("labels") or {})
                    | {"kubernetes.io/metadata.name": obj["metadata"].get("name", "")}
                },
            }
        case "Node":
            return {"spec": {}} | obj
        case "Secret":
            return {"type": "Opaque"} | _encode_string_data(obj)
        case "CustomResourceDefinition":
            return {name: value for name, value in obj.items() if name != "status"}
        case _ if "status" in kind.subresources:
            return obj | {"status": {}}
        case _:
            return obj


def prepare_changed(kind: ResourceKind, old: Json, new: Json) -> Json:
    """Return an updated object with defaults."""
    match kind.kind:
        case "Pod":
            return new | {"spec": _default_pod_spec(new)}
        case "Secret":
            return {"type": old.get("type", "Opaque")} | _encode_string_data(new)
        case _:
            return new


def _default_pod_spec(obj: Json) -> Json:
    spec: Json = copy_json(_POD) | (obj.get("spec") or {})
    for name in ("containers", "initContainers"):
        if isinstance(spec.get(name), list):
            spec[name] = [copy_json(_CONTAINER) | container for container in spec[name]]
    return spec


def _encode_string_data(obj: Json) -> Json:
    plain = obj.get("stringData") or {}
    kept = {name: value for name, value in obj.items() if name != "stringData"}
    if plain:
        encoded = {key: base64.b64encode(text.encode()).decode() for key, text in plain.items()}
        kept["data"] = (kept.get("data") or {}) | encoded
    return kept


def find_problems(kind: ResourceKind, obj: Json, old: Json | None) -> list[StatusCause]:
    """Return the causes for which an object of a built-in kind is invalid."""
    check = _CHECKS.get(kind.kind)
    return check(obj, old) if check else []


def _required_cause(where: str) -> StatusCause:
    return StatusCause("FieldValueRequired", "Required value", where)


def _forbidden_cause(where: str, why: str) -> StatusCause:
    return StatusCause("FieldValueForbidden", f"Forbidden: {why}", where)


def _invalid_cause(where: str, value: Any, why: str) -> StatusCause:
    shown = f'"{value}"' if isinstance(value, str) else str(value)
    return StatusCause("FieldValueInvalid", f"Invalid value: {shown}: {why}", where)


def _find_pod_problems(obj: Json, old: Json | None) -> list[StatusCause]:
    spec = obj["spec"]
    containers = spec.get("containers") or []
    if not containers:
        return [_required_cause("spec.containers")]
    found = [
        _required_cause(f"spec.containers[{index}].{name}")
        for index, container in enumerate(containers)
        for name in ("name", "image")
        if not container.get(name)
    ]
    if old is not None and _select_immutable(old["spec"]) != _select_immutable(spec):
        why = (
            "pod updates may not change fields other than `spec.containers[*].image`,"
            "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` "
            "(only additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow "
            "it to be set to 1 if it was previously negative)"
        )
        found.append(_forbidden_cause("spec", why))
    return found


def _select_immutable(spec: Json) -> Json:
    fixed = {key: value for key, value in spec.items() if key not in _MUTABLE_POD_FIELDS}
    for name in ("containers", "initContainers"):
        if name in fixed:
            fixed[name] = [container | {"image": ""} for container in fixed[name]]
    return fixed


def _find_budget_problems(obj: Json, _: Json | None) -> list[StatusCause]:
    spec = obj.get("spec") or {}
    if "minAvailable" in spec and "maxUnavailable" in spec:
        why = "minAvailable and maxUnavailable cannot be both set"
        return [_invalid_cause("spec", "", why)]
    return []


def _find_lease_problems(obj: Json, _: Json | None) -> list[StatusCause]:
    spec = obj.get("spec") or {}
    found = []
    for name, least in (("leaseDurationSeconds", 1), ("leaseTransitions", 0)):
        value = spec.get(name)
        if value is not None and value < least:
            rule = "must be greater than 0" if least else "must be greater than or equal to 0"
            found.append(_invalid_cause(f"spec.{name}", value, rule))
    return found


def _find_event_problems(obj: Json, _: Json | None) -> list[StatusCause]:
    place = find_value(obj, "involvedObject", "namespace") or "default"
    if obj["metadata"].get("namespace") != place:
        why = "does not match event.namespace"
        return [_invalid_cause("involvedObject.namespace", place, why)]
    return []


def _find_immutable_problems(obj: Json, old: Json | None) -> list[StatusCause]:
    """Check Secrets and ConfigMaps: the type and ``immutable: true`` cannot be changed."""
    if old is None:
        return []
    found = []
    if old.get("type") != obj.get("type"):
        found.append(_invalid_cause("type", obj.get("type"), "field is immutable"))
    if old.get("immutable"):
        why = "field is immutable when `immutable` is set"
        found += [
            _forbidden_cause(name, why)
            for name in ("immutable", "data", "binaryData")
            if old.get(name) != obj.get(name)
        ]
    return found


def _find_binding_problems(obj: Json, old: Json | None) -> list[StatusCause]:
    if not find_value(obj, "roleRef", "name"):
        return [_required_cause("roleRef.name")]
    if old is not None and old.get("roleRef") != obj.get("roleRef"):
        return [_invalid_cause("roleRef", obj.get("roleRef"), "cannot change roleRef")]
    return []


_CHECKS: dict[str, Callable[[Json, Json | None], list[StatusCause]]] = {
    "Pod": _find_pod_problems,
    "Job": find_job_problems,
    "PodDisruptionBudget": _find_budget_problems,
    "CertificateSigningRequest": find_request_problems,
    "Lease": _find_lease_problems,
    "Event": _find_event_problems,
    "Secret": _find_immutable_problems,
    "ConfigMap": _find_immutable_problems,
    "ClusterRoleBinding": _find_binding_problems,
    "RoleBinding": _find_binding_problems,
    "CustomResourceDefinition": lambda obj, _: crds.find_problems(obj),
}
