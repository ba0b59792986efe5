"""Defaults and validation of Jobs (batch/v1), as in kube-apiserver's strategy of the kind."""

from collections.abc import Iterable, Iterator

from treenail_lab.apiserver.errors import StatusCause
from treenail_lab.apiserver.objects import Json, find_value, read_labels

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
    return rule | {"onPodConditions": [{"status": "True"} | each for each in patterns]}


def find_job_problems(obj: Json, old: Json | None) -> list[StatusCause]:
    """Return the causes for which a Job is invalid."""
    spec = obj.get("spec") or {}
    found = [
        _invalid_cause(f"spec.{name}", value, "must be greater than or equal to 0")
        for name in _NUMBERS
        if isinstance(value := spec.get(name), int) and value < 0
    ]
    if old is not None:
        before = old.get("spec") or {}
        found += [
            _invalid_cause(f"spec.{name}", "", "field is immutable")
            for name in _FIXED_FIELDS
            if before.get(name) != spec.get(name)
        ]
        return found
    for name in ("backoffLimitPerIndex", "maxFailedIndexes", "successPolicy"):
        if name in spec:
            found.append(StatusCause("FieldValueForbidden", _NOT_EMULATED, f"spec.{name}"))
    if spec.get("completionMode") != "NonIndexed":
        found.append(
            _unsupported_cause("spec.completionMode", spec["completionMode"], ("NonIndexed",))
        )
    pod = find_value(spec, "template", "spec") or {}
    if not pod.get("containers"):
        found.append(_required_cause("spec.template.spec.containers", ""))
    where, policy = "spec.template.spec.restartPolicy", pod.get("restartPolicy")
    if policy in {None, "", "Always"}:
        found.append(_required_cause(where, _RESTART_POLICIES))
    elif policy not in {"OnFailure", "Never"}:
        found.append(_unsupported_cause(where, policy, ("OnFailure", "Never")))
    elif spec.get("podFailurePolicy") and policy != "Never":
        why = 'only "Never" is supported when podFailurePolicy is specified'
        found.append(_invalid_cause(where, policy, why))
    return found + list(_find_rule_problems(spec, pod))


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


def _required_cause(where: str, why: str) -> StatusCause:
    message = f"Required value: {why}" if why else "Required value"
    return StatusCause("FieldValueRequired", message, where)


def _unsupported_cause(where: str, value: object, supported: Iterable[str]) -> StatusCause:
    listed = ", ".join(f'"{each}"' for each in supported)
    message = f'Unsupported value: "{value}": supported values: {listed}'
    return StatusCause("FieldValueNotSupported", message, where)


def _invalid_cause(where: str, value: object, why: str) -> StatusCause:
    shown = f'"{value}"' if isinstance(value, str) else str(value)
    return StatusCause("FieldValueInvalid", f"Invalid value: {shown}: {why}", where)
