"""Decide what the Job controller does next, as kube-controller-manager 1.36 does.

A decision is one step: the status is written first, then pods are created or deleted, then the
finalizers of counted pods are removed. The changes lead to the next step.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from treenail.clocks import format_rfc3339, parse_rfc3339
from treenail_lab.apiserver.objects import (
    Json,
    copy_json,
    find_value,
    is_deleting,
    read_finalizers,
    read_uid,
)
from treenail_lab.apiserver.registry.disruption_budgets import is_ready

TRACKING_FINALIZER = "batch.kubernetes.io/job-tracking"
POD_BACKOFF_S, MAX_POD_BACKOFF_S = 10.0, 600.0
_INTERIM = {"Failed": "FailureTarget", "Complete": "SuccessCriteriaMet"}


@dataclass(frozen=True, slots=True)
class PodBackoff:
    """The failures of a Job's pods since the last success; kept in memory only."""

    failures: int = 0
    last_failure: float = 0.0

    def compute_wait_s(self, now: float, first_s: float) -> float:
        """Return the seconds until the next pod may be created."""
        if not self.failures:
            return 0.0
        # Bounded, because a float overflows at 2**1024.
        delay_s = min(first_s * 2.0 ** min(self.failures - 1, 32), MAX_POD_BACKOFF_S)
        return max(self.last_failure + delay_s - now, 0.0)


@dataclass(frozen=True, slots=True)
class JobStep:
    """One step of a Job: writes in the order of the fields."""

    status: Json
    created_pods: int = 0
    deleted_pods: tuple[Json, ...] = ()
    released_pods: tuple[Json, ...] = ()
    """Pods whose tracking finalizer is removed."""
    backoff: PodBackoff = field(default_factory=PodBackoff)
    wait_s: float | None = None
    """Seconds until the Job must be processed again without a change; None if never."""


@dataclass(frozen=True, slots=True)
class _Finish:
    """Why a Job ends: the type of its last condition, and the texts of both conditions."""

    type: str
    reason: str
    message: str


def find_condition(job: Json, kind: str) -> Json | None:
    """Return the condition of a Job that is true; None if there is none."""
    for condition in find_value(job, "status", "conditions") or []:
        if condition.get("type") == kind and condition.get("status") == "True":
            match: Json = condition
            return match
    return None


def is_finished(job: Json) -> bool:
    return any(find_condition(job, kind) for kind in _INTERIM)


def decide_step(
    job: Json, pods: Sequence[Json], backoff: PodBackoff, now: float, *, first_backoff_s: float
) -> JobStep:
    """Return the next step of a Job that is not finished; ``pods`` are all of its pods."""
    return _JobRound(job, pods, backoff, now, first_backoff_s).decide()


class _JobRound:
    """The computation of one step."""

    def __init__(
        self, job: Json, pods: Sequence[Json], backoff: PodBackoff, now: float, first_s: float
    ) -> None:
        self._job, self._spec, self._pods = job, job["spec"], pods
        self._now, self._first_s, self._backoff = now, first_s, backoff
        self._status: Json = copy_json(job.get("status") or {})
        self._wait_s: float | None = None
        self._active = [pod for pod in pods if _is_active(pod)]
        self._terminating = sum(1 for pod in pods if is_deleting(pod) and not _has_ended(pod))

    def decide(self) -> JobStep:
        status = self._status
        uncounted = self._count_released()
        tracked = [pod for pod in self._pods if TRACKING_FINALIZER in read_finalizers(pod)]
        fresh = [pod for pod in tracked if read_uid(pod) not in _list_uids(uncounted)]
        succeeded = [pod for pod in fresh if _read_phase(pod) == "Succeeded"]
        failed = [pod for pod in fresh if self._is_failed(pod)]
        total_succeeded = self._sum("succeeded", uncounted) + len(succeeded)
        total_failed = self._sum("failed", uncounted) + sum(map(self._counts_as_failure, failed))
        if not self._is_suspended and "startTime" not in status:
            status["startTime"] = format_rfc3339(self._now)
        backoff = self._update_backoff(succeeded, failed)
        finish = self._find_finish(total_failed)
        created, deleted = 0, tuple(self._active)
        if finish is None:
            created, deleted = self._decide_pods(total_succeeded, backoff)
            if self._is_complete(total_succeeded, len(self._active) + created - len(deleted)):
                finish = _Finish(
                    "Complete",
                    "CompletionsReached",
                    "Reached expected number of succeeded pods",
                )
            else:
                self._note_suspension()
        released = tuple(pod for pod in tracked if self._can_release(pod, finish))
        for pod in released:
            self._add_uncounted(pod, uncounted, finish)
        terminating = self._terminating + len(deleted)
        status["uncountedTerminatedPods"] = {key: uids for key, uids in uncounted.items() if uids}
        status["active"] = len(self._active) + created - len(deleted)
        status["ready"] = sum(
            1 for pod in self._active if is_ready(pod) and not _is_in(pod, deleted)
        )
        status["terminating"] = terminating
        if finish is not None:
            is_settled = not any(uncounted.values()) and not released and not terminating
            self._add_finish(finish, is_last=is_settled)
        return JobStep(_drop_zeros(status), created, deleted, released, backoff, self._wait_s)

    @property
    def _is_suspended(self) -> bool:
        return bool(self._spec.get("suspend"))

    def _sum(self, kind: str, uncounted: dict[str, list[str]]) -> int:
        return int(self._status.get(kind, 0)) + len(uncounted[kind])

    def _count_released(self) -> dict[str, list[str]]:
        """Count the pods whose finalizer is gone; return the uids that are not counted yet."""
        tracked = {
            read_uid(pod) for pod in self._pods if TRACKING_FINALIZER in read_finalizers(pod)
        }
        before = self._status.get("uncountedTerminatedPods") or {}
        uncounted = {}
        for kind in ("succeeded", "failed"):
            uids = before.get(kind) or []
            uncounted[kind] = [uid for uid in uids if uid in tracked]
            self._status[kind] = int(self._status.get(kind, 0)) + len(uids) - len(uncounted[kind])
        return uncounted

    def _is_failed(self, pod: Json) -> bool:
        if _read_phase(pod) == "Failed":
            return True
        if self._spec.get("podReplacementPolicy") == "Failed":
            return False
        return is_deleting(pod) and _read_phase(pod) != "Succeeded"

    def _counts_as_failure(self, pod: Json) -> bool:
        return match_rules(self._spec.get("podFailurePolicy"), pod)[0] != "Ignore"

    def _update_backoff(self, succeeded: list[Json], failed: list[Json]) -> PodBackoff:
        if not succeeded and not failed:
            return self._backoff
        times = sorted(_find_end_time(pod) for pod in failed)
        if not succeeded:
            return PodBackoff(self._backoff.failures + len(failed), times[-1])
        last_success = max(_find_end_time(pod) for pod in succeeded)
        later = [moment for moment in times if moment > last_success]
        return PodBackoff(len(later), later[-1]) if later else PodBackoff()

    def _find_finish(self, total_failed: int) -> _Finish | None:
        for kind, interim in reversed(_INTERIM.items()):
            if condition := find_condition({"status": self._status}, interim):
                return _Finish(kind, condition.get("reason", ""), condition.get("message", ""))
        for pod in self._pods:
            if self._is_failed(pod):
                action, message = match_rules(self._spec.get("podFailurePolicy"), pod)
                if action == "FailJob":
                    return _Finish("Failed", "PodFailurePolicy", message)
        if total_failed > self._spec["backoffLimit"]:
            return _Finish(
                "Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit"
            )
        limit_s, began = self._spec.get("activeDeadlineSeconds"), self._status.get("startTime")
        if limit_s is not None and began and not self._is_suspended:
            left_s = (parse_rfc3339(began) or self._now) + limit_s - self._now
            if left_s <= 0:
                message = "Job was active longer than specified deadline"
                return _Finish("Failed", "DeadlineExceeded", message)
            self._wait_until(left_s)
        return None

    def _decide_pods(
        self, total_succeeded: int, backoff: PodBackoff
    ) -> tuple[int, tuple[Json, ...]]:
        """Return how many pods to create, and the active ones to delete."""
        if is_deleting(self._job):
            return 0, ()
        if self._is_suspended:
            return 0, tuple(self._active)
        parallelism, completions = self._spec["parallelism"], self._spec.get("completions")
        if completions is not None:
            wanted = max(min(completions - total_succeeded, parallelism), 0)
        else:
            wanted = len(self._active) if total_succeeded else parallelism
        surplus = len(self._active) - wanted
        if surplus > 0:
            return 0, tuple(self._active[:surplus])
        is_replacing_failed = self._spec.get("podReplacementPolicy") == "Failed"
        missing = -surplus - (self._terminating if is_replacing_failed else 0)
        if missing <= 0:
            return 0, ()
        wait_s = backoff.compute_wait_s(self._now, self._first_s)
        if wait_s > 0:
            self._wait_until(wait_s)
            return 0, ()
        return missing, ()

    def _is_complete(self, total_succeeded: int, active: int) -> bool:
        completions = self._spec.get("completions")
        enough = total_succeeded > 0 if completions is None else total_succeeded >= completions
        return enough and active == 0

    def _note_suspension(self) -> None:
        before = find_condition({"status": self._status}, "Suspended")
        if self._is_suspended and before is None:
            self._set_condition("Suspended", "True", "JobSuspended", "Job suspended")
            self._status.pop("startTime", None)
        elif not self._is_suspended and before is not None:
            self._set_condition("Suspended", "False", "JobResumed", "Job resumed")
            self._status["startTime"] = format_rfc3339(self._now)

    def _can_release(self, pod: Json, finish: _Finish | None) -> bool:
        is_over = is_deleting(self._job) or finish is not None or _read_phase(pod) == "Succeeded"
        return is_over or self._is_failed(pod)

    def _add_uncounted(
        self, pod: Json, uncounted: dict[str, list[str]], finish: _Finish | None
    ) -> None:
        uid = read_uid(pod)
        if uid in _list_uids(uncounted):
            return
        if _read_phase(pod) == "Succeeded":
            uncounted["succeeded"].append(uid)
            return
        is_failed = self._is_failed(pod) or (finish is not None and finish.type == "Failed")
        if is_failed and self._counts_as_failure(pod):
            uncounted["failed"].append(uid)

    def _add_finish(self, finish: _Finish, *, is_last: bool) -> None:
        interim = _INTERIM[finish.type]
        if find_condition({"status": self._status}, interim) is None:
            self._set_condition(interim, "True", finish.reason, finish.message)
        elif is_last:
            self._set_condition(finish.type, "True", finish.reason, finish.message)
            if finish.type == "Complete":
                self._status["completionTime"] = format_rfc3339(self._now)

    def _set_condition(self, kind: str, status: str, reason: str, message: str) -> None:
        now = format_rfc3339(self._now)
        before = self._status.get("conditions") or []
        self._status["conditions"] = [
            condition for condition in before if condition.get("type") != kind
        ] + [
            {
                "type": kind,
                "status": status,
                "lastProbeTime": now,
                "lastTransitionTime": now,
                "reason": reason,
                "message": message,
            }
        ]

    def _wait_until(self, seconds: float) -> None:
        self._wait_s = seconds if self._wait_s is None else min(self._wait_s, seconds)


def match_rules(policy: Json | None, pod: Json) -> tuple[str, str]:
    """Return the action of the first rule of a podFailurePolicy that a failed pod matches.

    The second value is the message of the action ``FailJob``. Without a match the action is
    ``Count``.
    """
    where = f"{pod['metadata'].get('namespace', '')}/{pod['metadata']['name']}"
    for index, rule in enumerate((policy or {}).get("rules") or []):
        action = rule.get("action", "")
        if codes := rule.get("onExitCodes"):
            for status in _list_ended_containers(pod):
                code = status["state"]["terminated"].get("exitCode", 0)
                if _matches_code(codes, status.get("name"), code):
                    message = (
                        f"Container {status.get('name')} for pod {where} failed with exit code "
                        f"{code} matching {action} rule at index {index}"
                    )
                    return action, message
        for pattern in rule.get("onPodConditions") or []:
            for condition in find_value(pod, "status", "conditions") or []:
                if all(condition.get(key) == pattern.get(key) for key in ("type", "status")):
                    message = (
                        f"Pod {where} has condition {condition['type']} matching {action} rule "
                        f"at index {index}"
                    )
                    return action, message
    return "Count", ""


def _list_ended_containers(pod: Json) -> Iterator[Json]:
    for group in ("containerStatuses", "initContainerStatuses"):
        for status in find_value(pod, "status", group) or []:
            if find_value(status, "state", "terminated"):
                yield status


def _matches_code(codes: Json, name: object, code: int) -> bool:
    if codes.get("containerName") not in {None, name} or code == 0:
        return False
    is_listed = code in (codes.get("values") or [])
    return is_listed if codes.get("operator") == "In" else not is_listed


def _find_end_time(pod: Json) -> float:
    """Return when a pod ended: by its containers, its Ready condition, or its deletion."""
    ends = [
        parse_rfc3339(find_value(status, "state", "terminated", "finishedAt"))
        for status in find_value(pod, "status", "containerStatuses") or []
    ]
    if ends and all(end is not None for end in ends):
        return max(end for end in ends if end is not None)
    for condition in find_value(pod, "status", "conditions") or []:
        if condition.get("type") == "Ready" and condition.get("status") == "False":
            moment = parse_rfc3339(condition.get("lastTransitionTime"))
            if moment is not None:
                return moment
    metadata = pod["metadata"]
    deleted = parse_rfc3339(metadata.get("deletionTimestamp"))
    if deleted is not None:
        return deleted - float(metadata.get("deletionGracePeriodSeconds") or 0)
    return parse_rfc3339(metadata.get("creationTimestamp")) or 0.0


def _read_phase(pod: Json) -> str:
    return str(find_value(pod, "status", "phase") or "")


def _has_ended(pod: Json) -> bool:
    return _read_phase(pod) in {"Succeeded", "Failed"}


def _is_active(pod: Json) -> bool:
    return not _has_ended(pod) and not is_deleting(pod)


def _is_in(pod: Json, pods: Iterable[Json]) -> bool:
    return any(other is pod for other in pods)


def _list_uids(uncounted: dict[str, list[str]]) -> list[str]:
    return [*uncounted["succeeded"], *uncounted["failed"]]


def _drop_zeros(status: Json) -> Json:
    """Return the status as kube-apiserver encodes it: these counters are omitted when 0."""
    omitted = {"active", "succeeded", "failed"}
    return {name: value for name, value in status.items() if value != 0 or name not in omitted}
