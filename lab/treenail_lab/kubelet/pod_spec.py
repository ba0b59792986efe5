"""A pod's spec as the kubelet runs it: containers, volumes, and their security contexts."""

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from treenail.errors import ConfigError
from treenail_lab.apiserver.objects import Json, find_value

CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID",
    "SETPCAP", "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW",
    "IPC_LOCK", "IPC_OWNER", "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT",
    "SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD",
    "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP", "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG",
    "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF", "CHECKPOINT_RESTORE",
)  # fmt: skip
"""Capabilities by their number."""
# Those that containerd gives to a container by default.
DEFAULT_CAPABILITIES = frozenset({
    "CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP",
    "SETPCAP", "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE",
})  # fmt: skip
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGTPE]i?|k|m)?")
_SUFFIXES = {"": 1.0, "m": 0.001, "k": 1e3} | {
    f"{letter}{binary}": (1024.0 if binary else 1000.0) ** power
    for power, letter in enumerate("KMGTPE", start=1)
    for binary in ("", "i")
}
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")
_VOLUME_KINDS = ("configMap", "secret", "emptyDir", "projected", "downwardAPI")
_UNSUPPORTED_POD = ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace")
_UNSUPPORTED_CONTAINER = ("lifecycle", "livenessProbe", "readinessProbe", "startupProbe")


@dataclass(frozen=True, slots=True)
class Mount:
    """A volume, or a part of it, in a container."""

    volume: str
    target: str
    sub_path: str = ""
    is_read_only: bool = False


@dataclass(frozen=True, slots=True)
class SecurityContext:
    """The privileges of a container; ``capabilities`` is None if it keeps all."""

    user: int = 0
    group: int = 0
    groups: tuple[int, ...] = ()
    capabilities: frozenset[str] | None = DEFAULT_CAPABILITIES
    has_no_new_privileges: bool = False
    is_read_only: bool = False
    is_unmasked: bool = False


@dataclass(frozen=True, slots=True)
class Container:
    """One container of a pod."""

    name: str
    image: str
    command: tuple[str, ...]
    directory: str
    variables: tuple[Json, ...]
    """``env`` of the container, not resolved."""
    sources: tuple[Json, ...]
    """``envFrom`` of the container."""
    mounts: tuple[Mount, ...]
    security: SecurityContext
    memory_limit: int
    """Bytes; 0 without a limit."""
    termination_path: str
    has_log_as_message: bool


@dataclass(frozen=True, slots=True)
class PodPlan:
    """The parts of a pod that the kubelet runs."""

    init_containers: tuple[Container, ...]
    containers: tuple[Container, ...]
    volumes: tuple[Json, ...]
    fs_group: int | None
    storage_limit: int
    """Bytes of ephemeral storage after which the kubelet evicts the pod; 0 without a limit."""


def plan_pod(pod: Json) -> PodPlan:
    """Return the plan of a pod; raise `ConfigError` for what the lab cannot enforce."""
    spec = pod["spec"]
    if problems := list(_find_problems(spec)):
        raise ConfigError(f"cannot run pod {pod['metadata']['name']}: {'; '.join(problems)}")
    context = spec.get("securityContext") or {}
    limits = [_read_limit(container, "ephemeral-storage") for container in spec["containers"]]
    return PodPlan(
        init_containers=tuple(
            _plan_container(container, context) for container in spec.get("initContainers") or []
        ),
        containers=tuple(_plan_container(container, context) for container in spec["containers"]),
        volumes=tuple(spec.get("volumes") or []),
        fs_group=context.get("fsGroup"),
        storage_limit=sum(limits) if all(limits) else 0,
    )


def _find_problems(spec: Json) -> Iterator[str]:
    if spec.get("restartPolicy") != "Never":
        yield f"restartPolicy is {spec.get('restartPolicy')}, and the lab runs Never only"
    for name in _UNSUPPORTED_POD:
        if spec.get(name):
            yield f"{name} is not emulated"
    if spec.get("hostUsers") is False:
        yield "hostUsers: false is not emulated"
    for volume in spec.get("volumes") or []:
        if not any(kind in volume for kind in _VOLUME_KINDS):
            kinds = ", ".join(sorted(volume.keys() - {"name"}))
            yield f"volume {volume.get('name')} is of the kind {kinds}"
    for group in ("initContainers", "containers"):
        for container in spec.get(group) or []:
            yield from _find_container_problems(container)


def _find_container_problems(container: Json) -> Iterator[str]:
    name = container.get("name")
    for key in _UNSUPPORTED_CONTAINER:
        if container.get(key):
            yield f"{key} of container {name} is not emulated"
    if container.get("restartPolicy"):
        yield f"container {name} has a restartPolicy of its own"
    if not container.get("command"):
        yield f"container {name} has no command, and images of the lab have none"
    for change in ("add", "drop"):
        for capability in find_value(container, "securityContext", "capabilities", change) or []:
            if capability.removeprefix("CAP_") not in {*CAPABILITIES, "ALL"}:
                yield f"container {name} names the unknown capability {capability}"


def _plan_container(container: Json, pod_context: Json) -> Container:
    command = [*container["command"], *(container.get("args") or [])]
    return Container(
        name=container["name"],
        image=container.get("image", ""),
        command=tuple(command),
        directory=container.get("workingDir") or "/",
        variables=tuple(container.get("env") or []),
        sources=tuple(container.get("envFrom") or []),
        mounts=tuple(_read_mount(mount) for mount in container.get("volumeMounts") or []),
        security=_read_security(container, pod_context),
        memory_limit=_read_limit(container, "memory"),
        termination_path=container.get("terminationMessagePath") or "/dev/termination-log",
        has_log_as_message=container.get("terminationMessagePolicy") == "FallbackToLogsOnError",
    )


def _read_mount(mount: Json) -> Mount:
    sub_path = posixpath.normpath("/" + (mount.get("subPath") or "")).lstrip("/")
    return Mount(
        mount["name"], mount["mountPath"], sub_path, is_read_only=bool(mount.get("readOnly"))
    )


def _read_security(container: Json, pod_context: Json) -> SecurityContext:
    own = container.get("securityContext") or {}
    context = pod_context | {name: value for name, value in own.items() if value is not None}
    user = int(context.get("runAsUser") or 0)
    groups = [*(pod_context.get("supplementalGroups") or [])]
    if pod_context.get("fsGroup") is not None:
        groups.append(pod_context["fsGroup"])
    if context.get("runAsNonRoot") and user == 0:
        raise ConfigError(
            f"cannot run container {container['name']}: container has runAsNonRoot and image will "
            "run as root"
        )
    return SecurityContext(
        user=user,
        group=int(context.get("runAsGroup") or 0),
        groups=tuple(groups),
        capabilities=_read_capabilities(own),
        has_no_new_privileges=own.get("allowPrivilegeEscalation") is False,
        is_read_only=bool(own.get("readOnlyRootFilesystem")),
        is_unmasked=bool(own.get("privileged")) or own.get("procMount") == "Unmasked",
    )


def _read_capabilities(context: Json) -> frozenset[str] | None:
    if context.get("privileged"):
        return None
    changes = context.get("capabilities") or {}
    added, dropped = (
        {capability.removeprefix("CAP_") for capability in changes.get(key) or []}
        for key in ("add", "drop")
    )
    if "ALL" in added:
        return frozenset(CAPABILITIES) - (dropped - {"ALL"})
    kept = frozenset() if "ALL" in dropped else DEFAULT_CAPABILITIES - dropped
    return kept | added


def _read_limit(container: Json, name: str) -> int:
    text = find_value(container, "resources", "limits", name)
    return parse_quantity(str(text)) if text is not None else 0


def parse_quantity(text: str) -> int:
    """Return a quantity of bytes; raise `ConfigError` if it is none."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ConfigError(f"cannot read the quantity {text!r}: expected a number like 512Mi")
    return int(float(match[1]) * _SUFFIXES[match[2] or ""])


def resolve_variables(
    variables: Sequence[Json], known: Mapping[str, str], read: Callable[[Json], str | None]
) -> dict[str, str]:
    """Return the variables of a container, in which ``$(NAME)`` names an earlier one.

    ``read`` returns the value of a ``valueFrom``; None if it is optional and missing.
    """
    resolved = dict(known)
    for variable in variables:
        name = variable["name"]
        if source := variable.get("valueFrom"):
            value = read(source)
            if value is None:
                continue
            resolved[name] = value
        else:
            resolved[name] = expand_references(variable.get("value") or "", resolved)
    return resolved


def expand_references(text: str, variables: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` by the variable; unknown names stay, and ``$$`` is ``$``."""

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return _REFERENCE.sub(replace, text)
