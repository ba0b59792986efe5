"""State of a build by its Job, and its conditions, as in the Machine Config Operator (MCO)."""

from dataclasses import dataclass

from treenail.api import decode, machineosbuild, object_meta
from treenail.sanitize import escape_text

MAX_FAILED_PODS = 3
"""``backoffLimit`` of a Job: one more failed pod ends it."""
MESSAGE_LIMIT = 4096
"""Maximum characters of a message; the API server accepts 32768."""

# Order, reasons and messages are those of the MCO.
_CONDITIONS: dict[machineosbuild.BuildState, tuple[str, str]] = {
    machineosbuild.BuildState.PREPARED: ("Prepared", "Build Prepared and Pending"),
    machineosbuild.BuildState.BUILDING: ("Building", "Image Build In Progress"),
    machineosbuild.BuildState.FAILED: ("Failed", "Build Failed"),
    machineosbuild.BuildState.INTERRUPTED: ("Interrupted", "Build Interrupted"),
    machineosbuild.BuildState.SUCCEEDED: ("Ready", "Build Ready"),
}


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Counts and conditions of a Job."""

    active: int = 0
    succeeded: int = 0
    failed: int = 0
    has_uncounted_pods: bool = False
    """Pods ended that no count contains yet."""
    conditions: tuple[object_meta.Condition, ...] = ()
    is_deleting: bool = False

    @classmethod
    def from_json(cls, document: object) -> "JobStatus":
        """Read a Job; raise `ConfigError`."""
        fields = decode.Fields.from_json(document, "Job")
        status = fields.get_object("status")
        uncounted = status.get_object("uncountedTerminatedPods")
        metadata = object_meta.ObjectMeta.from_fields(fields.get_object("metadata"))
        return cls(
            active=status.get_optional_integer("active") or 0,
            succeeded=status.get_optional_integer("succeeded") or 0,
            failed=status.get_optional_integer("failed") or 0,
            has_uncounted_pods=bool(
                uncounted.get_list("succeeded") or uncounted.get_list("failed")
            ),
            conditions=status.map_objects("conditions", object_meta.Condition.from_fields),
            is_deleting=metadata.is_deleting,
        )

    def find_condition(self, kind: str) -> object_meta.Condition | None:
        """Return the condition of a type if it is True."""
        matches = (
            condition
            for condition in self.conditions
            if (condition.type, condition.status) == (kind, "True")
        )
        return next(matches, None)


def compute_job_state(job: JobStatus) -> machineosbuild.BuildState:
    """Return the state of a build whose Job has this status.

    Unlike the MCO, a Job with the condition Failed has failed whatever its counts are: a
    ``podFailurePolicy`` and a deadline end it at the first failed pod. FailureTarget comes before
    Failed while other pods end.
    """
    has_failed = any(map(job.find_condition, ("Failed", "FailureTarget")))
    if job.is_deleting and not (job.succeeded or has_failed or job.failed > MAX_FAILED_PODS):
        return machineosbuild.BuildState.INTERRUPTED
    if has_failed:
        return machineosbuild.BuildState.FAILED
    if job.succeeded:
        is_complete = job.find_condition("Complete") is not None or not job.conditions
        return (
            machineosbuild.BuildState.SUCCEEDED
            if is_complete
            else machineosbuild.BuildState.BUILDING
        )
    if job.failed > MAX_FAILED_PODS:
        return machineosbuild.BuildState.FAILED
    if not (job.active or job.failed or job.has_uncounted_pods):
        return machineosbuild.BuildState.PREPARED
    return machineosbuild.BuildState.BUILDING


def compute_build_conditions(
    state: machineosbuild.BuildState, reason: str = "", message: str = ""
) -> tuple[object_meta.Condition, ...]:
    """Return the five conditions without times; only that of ``state`` is True.

    ``reason`` and ``message`` replace those of the MCO in the condition that is True.
    """
    conditions: list[object_meta.Condition] = []
    for kind, (usual_reason, usual_message) in _CONDITIONS.items():
        if kind is state:
            text = escape_text(message)[:MESSAGE_LIMIT] or usual_message
            conditions.append(object_meta.Condition(kind, "True", reason or usual_reason, text))
        else:
            conditions.append(object_meta.Condition(kind, "False", usual_reason, usual_message))
    return tuple(conditions)


def can_change_state(before: machineosbuild.BuildState, after: machineosbuild.BuildState) -> bool:
    """Return whether a build may go from one state to another one.

    States only move forward: from none to any, from Prepared to Building, and from both to an end.
    """
    if before.has_ended or before is after or after is machineosbuild.BuildState.INITIAL:
        return False
    return not (
        before is machineosbuild.BuildState.BUILDING and after is machineosbuild.BuildState.PREPARED
    )
