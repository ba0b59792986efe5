"""What is particular about the built-in kinds: their defaults and the checks that matter here.

The real server knows a schema for each of them. This one keeps their fields as they come: it
checks and defaults only what a node agent, controllers and their tests meet.
"""

import base64
from collections.abc import Callable
from typing import Any

from treenail_lab.apiserver.errors import Cause
from treenail_lab.apiserver.objects import Json, copy, dig
from treenail_lab.apiserver.registry import crds
from treenail_lab.apiserver.schema.kinds import Kind

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
# All a pod may change of its spec after it was created.
_MUTABLE_POD_FIELDS = ("tolerations", "activeDeadlineSeconds", "terminationGracePeriodSeconds")


def begun(kind: Kind, obj: Json) -> Json:
    """A new object of a built-in kind: defaults set, a status that clients can't set reset."""
    match kind.kind:
        case "Pod":
            return obj | {"spec": _pod_spec(obj), "status": {"phase": "Pending"}}
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
            return {"type": "Opaque"} | _without_string_data(obj)
        case "CustomResourceDefinition":
            return {name: value for name, value in obj.items() if name != "status"}
        case _ if "status" in kind.subresources:
            return obj | {"status": {}}
        case _:
            return obj


def changed(kind: Kind, old: Json, new: Json) -> Json:
    """An updated object of a built-in kind, defaults set."""
    match kind.kind:
        case "Pod":
            return new | {"spec": _pod_spec(new)}
        case "Secret":
            return {"type": old.get("type", "Opaque")} | _without_string_data(new)
        case _:
            return new


def _pod_spec(obj: Json) -> Json:
    spec: Json = copy(_POD) | (obj.get("spec") or {})
    for name in ("containers", "initContainers"):
        if isinstance(spec.get(name), list):
            spec[name] = [copy(_CONTAINER) | container for container in spec[name]]
    return spec


def _without_string_data(obj: Json) -> Json:
    plain = obj.get("stringData") or {}
    kept = {name: value for name, value in obj.items() if name != "stringData"}
    if plain:
        encoded = {key: base64.b64encode(text.encode()).decode() for key, text in plain.items()}
        kept["data"] = (kept.get("data") or {}) | encoded
    return kept


def problems(kind: Kind, obj: Json, old: Json | None) -> list[Cause]:
    """What is wrong with an object of a built-in kind."""
    check = _CHECKS.get(kind.kind)
    return check(obj, old) if check else []


def _required(where: str) -> Cause:
    return Cause("FieldValueRequired", "Required value", where)


def _forbidden(where: str, why: str) -> Cause:
    return Cause("FieldValueForbidden", f"Forbidden: {why}", where)


def _invalid(where: str, value: Any, why: str) -> Cause:
    shown = f'"{value}"' if isinstance(value, str) else str(value)
    return Cause("FieldValueInvalid", f"Invalid value: {shown}: {why}", where)


def _pod_problems(obj: Json, old: Json | None) -> list[Cause]:
    spec = obj["spec"]
    containers = spec.get("containers") or []
    if not containers:
        return [_required("spec.containers")]
    found = [
        _required(f"spec.containers[{index}].{name}")
        for index, container in enumerate(containers)
        for name in ("name", "image")
        if not container.get(name)
    ]
    if old is not None and _fixed_part(old["spec"]) != _fixed_part(spec):
        why = (
            "pod updates may not change fields other than `spec.containers[*].image`,"
            "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` "
            "(only additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow "
            "it to be set to 1 if it was previously negative)"
        )
        found.append(_forbidden("spec", why))
    return found


def _fixed_part(spec: Json) -> Json:
    fixed = {key: value for key, value in spec.items() if key not in _MUTABLE_POD_FIELDS}
    for name in ("containers", "initContainers"):
        if name in fixed:
            fixed[name] = [container | {"image": ""} for container in fixed[name]]
    return fixed


def _budget_problems(obj: Json, _: Json | None) -> list[Cause]:
    spec = obj.get("spec") or {}
    if "minAvailable" in spec and "maxUnavailable" in spec:
        why = "minAvailable and maxUnavailable cannot be both set"
        return [_invalid("spec", "", why)]
    return []


def _lease_problems(obj: Json, _: Json | None) -> list[Cause]:
    spec = obj.get("spec") or {}
    found = []
    for name, least in (("leaseDurationSeconds", 1), ("leaseTransitions", 0)):
        value = spec.get(name)
        if value is not None and value < least:
            rule = "must be greater than 0" if least else "must be greater than or equal to 0"
            found.append(_invalid(f"spec.{name}", value, rule))
    return found


def _event_problems(obj: Json, _: Json | None) -> list[Cause]:
    place = dig(obj, "involvedObject", "namespace") or "default"
    if obj["metadata"].get("namespace") != place:
        why = "does not match event.namespace"
        return [_invalid("involvedObject.namespace", place, why)]
    return []


def _immutable_problems(obj: Json, old: Json | None) -> list[Cause]:
    """Secrets and ConfigMaps: ``immutable: true`` can't be taken back, nor the type changed."""
    if old is None:
        return []
    found = []
    if old.get("type") != obj.get("type"):
        found.append(_invalid("type", obj.get("type"), "field is immutable"))
    if old.get("immutable"):
        why = "field is immutable when `immutable` is set"
        found += [
            _forbidden(name, why)
            for name in ("immutable", "data", "binaryData")
            if old.get(name) != obj.get(name)
        ]
    return found


def _binding_problems(obj: Json, old: Json | None) -> list[Cause]:
    if not dig(obj, "roleRef", "name"):
        return [_required("roleRef.name")]
    if old is not None and old.get("roleRef") != obj.get("roleRef"):
        return [_invalid("roleRef", obj.get("roleRef"), "cannot change roleRef")]
    return []


_CHECKS: dict[str, Callable[[Json, Json | None], list[Cause]]] = {
    "Pod": _pod_problems,
    "PodDisruptionBudget": _budget_problems,
    "Lease": _lease_problems,
    "Event": _event_problems,
    "Secret": _immutable_problems,
    "ConfigMap": _immutable_problems,
    "ClusterRoleBinding": _binding_problems,
    "RoleBinding": _binding_problems,
    "CustomResourceDefinition": lambda obj, _: crds.problems(obj),
}
