"""Defaults and validation of the built-in kinds.

kube-apiserver has a schema for each of them. The lab stores their fields unchanged: it checks and
defaults only the fields that the agent, the controllers and their tests use. The rules of Jobs are
those of kube-apiserver's strategy (batch/v1). The rules of CertificateSigningRequests are those of
pkg/registry/certificates and pkg/apis/certificates/validation.
"""

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from cryptography import x509

from treenail_lab.apiserver.errors import StatusCause
from treenail_lab.apiserver.objects import Json, copy_json, find_value, read_labels
from treenail_lab.apiserver.registry import crds
from treenail_lab.apiserver.schema.kinds import ResourceKind

KIND = "CertificateSigningRequest"
_DECISIONS = ("Approved", "Denied")
_REQUESTER_FIELDS = ("username", "groups", "uid", "extra")
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SIGNER = re.compile(rf"{_LABEL}(\.{_LABEL})+/[A-Za-z0-9._/-]+")
_USAGES = frozenset({
    "signing", "digital signature", "content commitment", "key encipherment", "key agreement",
    "data encipherment", "cert sign", "crl sign", "encipher only", "decipher only", "any",
    "server auth", "client auth", "code signing", "email protection", "s/mime",
    "ipsec end system", "ipsec tunnel", "ipsec user", "timestamping", "ocsp signing",
    "microsoft sgc", "netscape sgc",
})  # fmt: skip


def set_requester(kind: ResourceKind, obj: Json, user: str, groups: Sequence[str]) -> Json:
    """Return a request with the user who creates it; objects of other kinds unchanged."""
    if kind.kind != KIND:
        return obj
    spec = {
        name: value
        for name, value in (obj.get("spec") or {}).items()
        if name not in _REQUESTER_FIELDS
    }
    return obj | {"spec": spec | {"username": user, "groups": list(groups)}}


def complete_decision(kind: ResourceKind, new: Json, now: str) -> Json:
    """Return a request whose conditions have times; objects of other kinds unchanged."""
    conditions = (new.get("status") or {}).get("conditions")
    if kind.kind != KIND or not conditions:
        return new
    times = {"lastUpdateTime": now, "lastTransitionTime": now}
    completed = [times | {k: v for k, v in condition.items() if v} for condition in conditions]
    return new | {"status": new["status"] | {"conditions": completed}}


def find_request_problems(obj: Json, old: Json | None) -> list[StatusCause]:
    """Return the causes for which a request, or a change of one, is invalid."""
    spec = obj.get("spec") or {}
    if old is not None:
        if old.get("spec") != spec:
            return [_invalid_cause("spec", "", "field is immutable")]
        return _find_decision_problems(obj, old)
    causes = []
    if not _is_pem_request(spec.get("request")):
        causes.append(
            _invalid_cause("spec.request", "", "PEM block type must be CERTIFICATE REQUEST")
        )
    if not spec.get("usages"):
        causes.append(StatusCause("FieldValueRequired", "Required value", "spec.usages"))
    for number, usage in enumerate(spec.get("usages") or []):
        if usage not in _USAGES:
            text = f'Unsupported value: "{usage}"'
            causes.append(StatusCause("FieldValueNotSupported", text, f"spec.usages[{number}]"))
    signer = spec.get("signerName")
    if not signer:
        causes.append(StatusCause("FieldValueRequired", "Required value", "spec.signerName"))
    elif not _SIGNER.fullmatch(signer):
        why = "must be a fully qualified domain and path of the form 'example.com/signer-name'"
        causes.append(_invalid_cause("spec.signerName", signer, why))
    return causes


def _find_decision_problems(obj: Json, old: Json) -> list[StatusCause]:
    before, after = _list_types(old), _list_types(obj)
    where = "status.conditions"
    if set(_DECISIONS) <= set(after):
        return [_invalid_cause(where, "", "Approved and Denied conditions are mutually exclusive")]
    removed = [kind for kind in before if kind not in after]
    return [
        StatusCause(
            "FieldValueForbidden", f"updates may not remove a condition of type {kind}", where
        )
        for kind in removed
    ]


def _list_types(request: Json) -> list[str]:
    return [
        condition.get("type", "")
        for condition in (request.get("status") or {}).get("conditions") or []
    ]


def _is_pem_request(text: object) -> bool:
    try:
        x509.load_pem_x509_csr(base64.b64decode(str(text or ""), validate=True))
    except (ValueError, binascii.Error):
        return False
    return True


def _invalid_cause(where: str, value: object, why: str) -> StatusCause:
    shown = f'"{value}"' if isinstance(value, str) else str(value)
    return StatusCause("FieldValueInvalid", f"Invalid value: {shown}: {why}", where)


JOB_NAME_LABELS = ("batch.kubernetes.io/job-name", "job-name")
JOB_UID_LABELS = ("batch.kubernetes.io/controller-uid", "controller-uid")
_FIXED_FIELDS = ("completions", "completionMode", "selector", "template", "podFailurePolicy")
_ACTIONS = ("Count", "FailIndex", "FailJob", "Ignore")
_NUMBERS = (
    "parallelism",
    "completions",
    "backoffLimit",
    "activeDeadlineSeconds",
    "ttlSecondsAfterFinished",
)
_NOT_EMULATED = "Forbidden: the lab runs no Indexed Jobs"
_RESTART_POLICIES = 'valid values: "OnFailure", "Never"'


def prepare_new_job(obj: Json) -> Json:
    """Return a new Job with its defaults, its selector and the labels of its pods."""
    given = obj.get("spec") or {}
    spec: Json = {
        "parallelism": 1,
        "backoffLimit": 6,
        "completionMode": "NonIndexed",
        "suspend": False,
        "manualSelector": False,
        # A pod that a rule may ignore is replaced only when its exit code is known.
        "podReplacementPolicy": "Failed"
        if given.get("podFailurePolicy")
        else "TerminatingOrFailed",
    }
    if given.get("completions") is None and given.get("parallelism") is None:
        spec["completions"] = 1
    spec |= {name: value for name, value in given.items() if value is not None}
    if policy := spec.get("podFailurePolicy"):
        spec["podFailurePolicy"] = _default_policy(policy)
    metadata = dict(obj["metadata"])
    template = dict(spec.get("template") or {})
    labels = dict(read_labels({"metadata": template.get("metadata") or {}}))
    if labels and not read_labels(obj):
        metadata["labels"] = dict(labels)
    if not spec["manualSelector"]:
        uid, name = metadata["uid"], metadata.get("name", "")
        labels |= dict.fromkeys(JOB_UID_LABELS, uid) | dict.fromkeys(JOB_NAME_LABELS, name)
        spec["selector"] = {"matchLabels": {JOB_UID_LABELS[0]: uid}}
        template["metadata"] = (template.get("metadata") or {}) | {"labels": labels}
    spec["template"] = template
    return obj | {"metadata": metadata, "spec": spec, "status": {}}


def _default_policy(policy: Json) -> Json:
    return policy | {"rules": [_default_rule(rule) for rule in policy.get("rules") or []]}


def _default_rule(rule: Json) -> Json:
    if not (patterns := rule.get("onPodConditions")):
        return rule
    return rule | {"onPodConditions": [{"status": "True"} | pattern for pattern in patterns]}


def find_job_problems(obj: Json, old: Json | None) -> list[StatusCause]:
    """Return the causes for which a Job is invalid."""
    spec = obj.get("spec") or {}
    problems = [
        _invalid_cause(f"spec.{name}", value, "must be greater than or equal to 0")
        for name in _NUMBERS
        if isinstance(value := spec.get(name), int) and value < 0
    ]
    if old is not None:
        before = old.get("spec") or {}
        problems += [
            _invalid_cause(f"spec.{name}", "", "field is immutable")
            for name in _FIXED_FIELDS
            if before.get(name) != spec.get(name)
        ]
        return problems
    for name in ("backoffLimitPerIndex", "maxFailedIndexes", "successPolicy"):
        if name in spec:
            problems.append(StatusCause("FieldValueForbidden", _NOT_EMULATED, f"spec.{name}"))
    if spec.get("completionMode") != "NonIndexed":
        problems.append(
            _unsupported_cause("spec.completionMode", spec["completionMode"], ("NonIndexed",))
        )
    pod = find_value(spec, "template", "spec") or {}
    if not pod.get("containers"):
        problems.append(_required_cause("spec.template.spec.containers", ""))
    where, policy = "spec.template.spec.restartPolicy", pod.get("restartPolicy")
    if policy in {None, "", "Always"}:
        problems.append(_required_cause(where, _RESTART_POLICIES))
    elif policy not in {"OnFailure", "Never"}:
        problems.append(_unsupported_cause(where, policy, ("OnFailure", "Never")))
    elif spec.get("podFailurePolicy") and policy != "Never":
        why = 'only "Never" is supported when podFailurePolicy is specified'
        problems.append(_invalid_cause(where, policy, why))
    return problems + list(_find_rule_problems(spec, pod))


def _find_rule_problems(spec: Json, pod: Json) -> Iterator[StatusCause]:
    names = {
        container.get("name")
        for group in ("containers", "initContainers")
        for container in pod.get(group) or []
    }
    for index, rule in enumerate(find_value(spec, "podFailurePolicy", "rules") or []):
        where = f"spec.podFailurePolicy.rules[{index}]"
        action, codes = rule.get("action"), rule.get("onExitCodes")
        if not action:
            yield _required_cause(f"{where}.action", "")
        elif action not in _ACTIONS:
            yield _unsupported_cause(f"{where}.action", action, _ACTIONS)
        if bool(codes) == bool(rule.get("onPodConditions")):
            why = "specifying one of OnExitCodes and OnPodConditions is required"
            yield _invalid_cause(where, "", why)
        if not codes:
            continue
        if codes.get("containerName") and codes["containerName"] not in names:
            why = "must be one of the container or initContainer names in the pod template"
            yield _invalid_cause(f"{where}.onExitCodes.containerName", codes["containerName"], why)
        values = codes.get("values") or []
        if not values:
            why = "at least one value is required"
            yield _invalid_cause(f"{where}.onExitCodes.values", values, why)
        if codes.get("operator") == "In" and 0 in values:
            why = "must not be 0 for the In operator"
            yield _invalid_cause(f"{where}.onExitCodes.values[{values.index(0)}]", 0, why)


def _required_cause(where: str, why: str = "") -> StatusCause:
    message = f"Required value: {why}" if why else "Required value"
    return StatusCause("FieldValueRequired", message, where)


def _unsupported_cause(where: str, value: object, supported: Iterable[str]) -> StatusCause:
    listed = ", ".join(f'"{choice}"' for choice in supported)
    message = f'Unsupported value: "{value}": supported values: {listed}'
    return StatusCause("FieldValueNotSupported", message, where)


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


def _forbidden_cause(where: str, why: str) -> StatusCause:
    return StatusCause("FieldValueForbidden", f"Forbidden: {why}", where)


def _find_pod_problems(obj: Json, old: Json | None) -> list[StatusCause]:
    spec = obj["spec"]
    containers = spec.get("containers") or []
    if not containers:
        return [_required_cause("spec.containers")]
    problems = [
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
        problems.append(_forbidden_cause("spec", why))
    return problems


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
    problems = []
    for name, least in (("leaseDurationSeconds", 1), ("leaseTransitions", 0)):
        value = spec.get(name)
        if value is not None and value < least:
            rule = "must be greater than 0" if least else "must be greater than or equal to 0"
            problems.append(_invalid_cause(f"spec.{name}", value, rule))
    return problems


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
    problems = []
    if old.get("type") != obj.get("type"):
        problems.append(_invalid_cause("type", obj.get("type"), "field is immutable"))
    if old.get("immutable"):
        why = "field is immutable when `immutable` is set"
        problems += [
            _forbidden_cause(name, why)
            for name in ("immutable", "data", "binaryData")
            if old.get(name) != obj.get(name)
        ]
    return problems


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
