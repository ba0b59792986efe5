"""The status of a pod, as its kubelet reports it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from treenail.clocks import format_rfc3339
from treenail_lab.apiserver.objects import Json, find_value
from treenail_lab.kubelet.pod_spec import Container
from treenail_lab.kubelet.runtime import ContainerEnd

_WAITING = ("PodInitializing", "ContainerCreating")


@dataclass(slots=True)
class ContainerRecord:
    """The observed life of one container; times are seconds since the epoch."""

    began: float | None = None
    ended: float | None = None
    end: ContainerEnd | None = None

    @property
    def is_running(self) -> bool:
        return self.began is not None and self.end is None


@dataclass(frozen=True, slots=True)
class PodOutcome:
    """Why a pod ended beside its containers; empty texts if it did not."""

    reason: str = ""
    message: str = ""
    is_disruption: bool = False


def build_status(
    pod: Json,
    init_containers: Sequence[Container],
    containers: Sequence[Container],
    records: Mapping[str, ContainerRecord],
    now: float,
    outcome: PodOutcome | None = None,
) -> Json:
    """Return the status of a pod; ``outcome`` ends it as failed."""
    initial = [records[container.name] for container in init_containers]
    main = [records[container.name] for container in containers]
    is_initialized = all(record.end is not None and record.end.code == 0 for record in initial)
    phase = _find_phase(initial, main)
    if outcome is not None and outcome.reason:
        phase = "Failed"
    is_ready = is_initialized and all(record.is_running for record in main) and phase == "Running"
    status: Json = {
        "phase": phase,
        "startTime": find_value(pod, "status", "startTime") or format_rfc3339(now),
        "initContainerStatuses": [
            _build_container(container, records[container.name], _WAITING[0])
            for container in init_containers
        ],
        "containerStatuses": [
            _build_container(
                container, records[container.name], _WAITING[0 if not is_initialized else 1]
            )
            for container in containers
        ],
    }
    wanted = {
        "PodReadyToStartContainers": phase not in {"Succeeded", "Failed"},
        "Initialized": is_initialized,
        "ContainersReady": is_ready,
        "Ready": is_ready,
    }
    conditions = list(find_value(pod, "status", "conditions") or [])
    for name, is_true in wanted.items():
        reason = "PodCompleted" if phase == "Succeeded" and not is_true else ""
        if phase == "Failed" and not is_true:
            reason = "PodFailed"
        conditions = set_condition(conditions, name, is_true=is_true, reason=reason, now=now)
    if outcome is not None and outcome.reason:
        status |= {"reason": outcome.reason, "message": outcome.message}
        if outcome.is_disruption:
            conditions = set_condition(
                conditions,
                "DisruptionTarget",
                is_true=True,
                reason="TerminationByKubelet",
                now=now,
                message=outcome.message,
            )
    return status | {"conditions": conditions}


def _find_phase(initial: Iterable[ContainerRecord], main: Sequence[ContainerRecord]) -> str:
    if any(record.end is not None and record.end.code != 0 for record in initial):
        return "Failed"
    if all(record.end is not None for record in main):
        is_failed = any(record.end is not None and record.end.code != 0 for record in main)
        return "Failed" if is_failed else "Succeeded"
    return "Running" if any(record.began is not None for record in main) else "Pending"


def set_condition(
    conditions: Sequence[Json],
    kind: str,
    *,
    is_true: bool,
    reason: str,
    now: float,
    message: str = "",
) -> list[Json]:
    """Return the conditions with this one; its time changes with its status only."""
    status = "True" if is_true else "False"
    moment = format_rfc3339(now)
    for condition in conditions:
        if condition.get("type") == kind and condition.get("status") == status:
            moment = condition.get("lastTransitionTime", moment)
    changed: Json = {"type": kind, "status": status, "lastTransitionTime": moment}
    if reason:
        changed["reason"] = reason
    if message:
        changed["message"] = message
    return [condition for condition in conditions if condition.get("type") != kind] + [changed]


def _build_container(container: Container, record: ContainerRecord, waiting: str) -> Json:
    status: Json = {
        "name": container.name,
        "image": container.image,
        "imageID": "",
        "ready": record.is_running,
        "started": record.is_running,
        "restartCount": 0,
    }
    if record.end is not None:
        ended: Json = {
            "exitCode": record.end.code,
            "reason": record.end.reason,
            "startedAt": format_rfc3339(record.began or 0.0),
            "finishedAt": format_rfc3339(record.ended or 0.0),
        }
        if record.end.message:
            ended["message"] = record.end.message
        return status | {"state": {"terminated": ended}}
    if record.began is not None:
        return status | {"state": {"running": {"startedAt": format_rfc3339(record.began)}}}
    return status | {"state": {"waiting": {"reason": waiting}}}
