"""PodSecurity admission: the levels baseline and restricted that a namespace enforces.

Only the fields that the lab's kubelet runs are checked. Reasons are those of kube-apiserver, in
its order, without the details of each.
"""

from collections.abc import Iterator, Mapping

from treenail_lab.apiserver.objects import Json, find_value

ENFORCE_LABEL = "pod-security.kubernetes.io/enforce"
_BASELINE_CAPABILITIES = frozenset({
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD",
    "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
})  # fmt: skip
_RESTRICTED_VOLUMES = frozenset({
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim",
    "projected", "secret",
})  # fmt: skip


def find_violation(namespace_labels: Mapping[str, str], spec: Json) -> str:
    """Return why the level of a namespace forbids a pod; empty if it does not."""
    level = namespace_labels.get(ENFORCE_LABEL, "privileged")
    reasons = list(_find_baseline_reasons(spec)) if level in {"baseline", "restricted"} else []
    if level == "restricted":
        reasons += _find_restricted_reasons(spec)
    version = namespace_labels.get(f"{ENFORCE_LABEL}-version", "latest")
    return f'violates PodSecurity "{level}:{version}": {", ".join(reasons)}' if reasons else ""


def _find_baseline_reasons(spec: Json) -> Iterator[str]:
    contexts = _list_contexts(spec)
    added = {
        capability for context in contexts for capability in _read_capabilities(context, "add")
    }
    if added - _BASELINE_CAPABILITIES:
        yield "non-default capabilities"
    if any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
        yield "host namespaces"
    if any("hostPath" in volume for volume in spec.get("volumes") or []):
        yield "hostPath volumes"
    if any(
        port.get("hostPort")
        for container in _list_containers(spec)
        for port in container.get("ports") or []
    ):
        yield "hostPort"
    if any(context.get("privileged") for context in contexts):
        yield "privileged"
    is_unmasked = any(context.get("procMount", "Default") != "Default" for context in contexts)
    # Pods in a user namespace may have it.
    if is_unmasked and spec.get("hostUsers") is not False:
        yield "procMount"
    profiles = [_read_profile(context) for context in (_read_pod_context(spec), *contexts)]
    if "Unconfined" in profiles:
        yield "seccompProfile"


def _find_restricted_reasons(spec: Json) -> Iterator[str]:
    pod, contexts = _read_pod_context(spec), _list_contexts(spec)
    if any(context.get("allowPrivilegeEscalation") is not False for context in contexts):
        yield "allowPrivilegeEscalation != false"
    if any(
        "ALL" not in _read_capabilities(context, "drop")
        or set(_read_capabilities(context, "add")) - {"NET_BIND_SERVICE"}
        for context in contexts
    ):
        yield "unrestricted capabilities"
    if any(
        not (volume.keys() - {"name"}) <= _RESTRICTED_VOLUMES
        for volume in spec.get("volumes") or []
    ):
        yield "restricted volume types"
    is_user = [context.get("runAsNonRoot", pod.get("runAsNonRoot")) for context in contexts]
    if spec.get("hostUsers") is not False:
        if not all(is_user):
            yield "runAsNonRoot != true"
        if any(context.get("runAsUser") == 0 for context in (pod, *contexts)):
            yield "runAsUser=0"
    kinds = {_read_profile(context) or _read_profile(pod) for context in contexts}
    if not kinds <= {"RuntimeDefault", "Localhost"}:
        yield "seccompProfile"


def _list_containers(spec: Json) -> list[Json]:
    groups = ("initContainers", "containers", "ephemeralContainers")
    return [container for group in groups for container in spec.get(group) or []]


def _list_contexts(spec: Json) -> list[Json]:
    return [container.get("securityContext") or {} for container in _list_containers(spec)]


def _read_pod_context(spec: Json) -> Json:
    context: Json = spec.get("securityContext") or {}
    return context


def _read_capabilities(context: Json, change: str) -> list[str]:
    return find_value(context, "capabilities", change) or []


def _read_profile(context: Json) -> str:
    return str(find_value(context, "seccompProfile", "type") or "")
