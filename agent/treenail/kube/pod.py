"""The parts of a Pod that a drain needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail.clock import parse_rfc3339
from treenail.kube.client import Json
from treenail.kube.resources import get_object

# The kubelet sets it on the mirror pods of static pods and recreates those after a deletion.
_MIRROR_ANNOTATION = "kubernetes.io/config.mirror"


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod as the API server reports it.

    ``terminates_at`` is the end of the grace period of a deleted pod, in seconds since the epoch.
    ``daemonset`` names the DaemonSet that controls the pod. ``is_running`` is True until all
    containers are known to have ended. ``claims`` are its PersistentVolumeClaims.
    """

    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str] = field(default_factory=dict)
    daemonset: str = ""
    is_mirror: bool = False
    is_finished: bool = False
    is_running: bool = False
    terminates_at: float | None = None
    grace_s: int = 0
    finalizers: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    resource_version: str = field(default="", compare=False)

    @property
    def key(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"


def parse_pod(found: Json) -> Pod:
    """Read the pod in an API object; malformed fields count as absent."""
    metadata, spec, status = (get_object(found, name) for name in ("metadata", "spec", "status"))
    grace_s = metadata.get("deletionGracePeriodSeconds")
    return Pod(
        namespace=str(metadata.get("namespace") or ""),
        name=str(metadata.get("name") or ""),
        uid=str(metadata.get("uid") or ""),
        labels={key: str(value) for key, value in get_object(metadata, "labels").items()},
        daemonset=_find_daemonset(metadata),
        is_mirror=_MIRROR_ANNOTATION in get_object(metadata, "annotations"),
        is_finished=str(status.get("phase")) in {"Succeeded", "Failed"},
        is_running=_is_running(status),
        terminates_at=parse_rfc3339(metadata.get("deletionTimestamp")),
        grace_s=grace_s if isinstance(grace_s, int) else 0,
        finalizers=tuple(str(one) for one in _as_list(metadata.get("finalizers"))),
        claims=tuple(
            str(claim["claimName"])
            for volume in _as_objects(spec.get("volumes"))
            if "claimName" in (claim := get_object(volume, "persistentVolumeClaim"))
        ),
        resource_version=str(metadata.get("resourceVersion") or ""),
    )


def _is_running(status: Json) -> bool:
    """Return True until every container is known to have ended."""
    containers = _as_objects(status.get("containerStatuses"))
    ended = containers and all("terminated" in get_object(one, "state") for one in containers)
    return status.get("phase") == "Running" and not ended


def _find_daemonset(metadata: Json) -> str:
    for owner in _as_objects(metadata.get("ownerReferences")):
        if owner.get("controller") is True and owner.get("kind") == "DaemonSet":
            return str(owner.get("name") or "")
    return ""


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _as_objects(value: object) -> list[Json]:
    return [one for one in _as_list(value) if isinstance(one, dict)]
