"""State of a build by its Job, and its conditions, as in the Machine Config Operator (MCO)."""

from dataclasses import dataclass

from treenail.api.decode import Fields
from treenail.api.machineosbuild import BuildState
from treenail.api.object_meta import Condition, ObjectMeta
from treenail.sanitize import escape_text

MAX_FAILED_PODS = 3
"""``backoffLimit`` of a Job: one more failed pod ends it."""
MESSAGE_LIMIT = 4096
"""Maximum characters of a message; the API server accepts 32768."""

# Order, reasons and messages are those of the MCO.
_CONDITIONS: dict[BuildState, tuple[str, str]] = {
    BuildState.PREPARED: ("Prepared", "Build Prepared and Pending"),
    BuildState.BUILDING: ("Building", "Image Build In Progress"),
    BuildState.FAILED: ("Failed", "Build Failed"),
    BuildState.INTERRUPTED: ("Interrupted", "Build Interrupted"),
    BuildState.SUCCEEDED: ("Ready", "Build Ready"),
}


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Counts and conditions of a Job."""

    active: int = 0
    succeeded: int = 0
    failed: int = 0
    has_uncounted_pods: bool = False
    """Pods ended that no count contains yet."""
    conditions: tuple[Condition, ...] = ()
    is_deleting: bool = False

    @classmethod
    def from_json(cls, document: object) -> "JobStatus":
        """Read a Job; raise `ConfigError`."""
        fields = Fields.from_json(document, "Job")
        status = fields.get_object("status")
        uncounted = status.get_object("uncountedTerminatedPods")
        metadata = ObjectMeta.from_fields(fields.get_object("metadata"))
        return cls(
            active=status.get_optional_integer("active") or 0,
            succeeded=status.get_optional_integer("succeeded") or 0,
            failed=status.get_optional_integer("failed") or 0,
            has_uncounted_pods=bool(
                uncounted.get_list("succeeded") or uncounted.get_list("failed")
            ),
            conditions=status.map_objects("conditions", Condition.from_fields),
            is_deleting=metadata.is_deleting,
        )

    def find_condition(self, kind: str) -> Condition | None:
        """Return the condition of a type if it is True."""
        found = (each for each in self.conditions if (each.type, each.status) == (kind, "True"))
        return next(found, None)


def compute_job_state(job: JobStatus) -> BuildState:
    """Return the state of a build whose Job has this status.

    Unlike the MCO, a Job with the condition Failed has failed whatever its counts are: a
    ``podFailurePolicy`` and a deadline end it at the first failed pod. FailureTarget comes before
    Failed while other pods end.
    """
    has_failed = any(map(job.find_condition, ("Failed", "FailureTarget")))
    if job.is_deleting and not (job.succeeded or has_failed or job.failed > MAX_FAILED_PODS):
        return BuildState.INTERRUPTED
    if has_failed:
        return BuildState.FAILED
    if job.succeeded:
        is_complete = job.find_condition("Complete") is not None or not job.conditions
        return BuildState.SUCCEEDED if is_complete else BuildState.BUILDING
    if job.failed > MAX_FAILED_PODS:
        return BuildState.FAILED
    if not (job.active or job.failed or job.has_uncounted_pods):
        return BuildState.PREPARED
    return BuildState.BUILDING


def compute_build_conditions(
    state: BuildState, reason: str = "", message: str = ""
) -> tuple[Condition, ...]:
    """Return the five conditions without times; only that of ``state`` is True.

    ``reason`` and ``message`` replace those of the MCO in the condition that is True.
    """
    found: list[Condition] = []
    for kind, (usual_reason, usual_message) in _CONDITIONS.items():
        if kind is state:
            text = escape_text(message)[:MESSAGE_LIMIT] or usual_message
            found.append(Condition(kind, "True", reason or usual_reason, text))
        else:
            found.append(Condition(kind, "False", usual_reason, usual_message))
    return tuple(found)


def can_change_state(before: BuildState, after: BuildState) -> bool:
    """Return whether a build may go from one state to another one.

    States only move forward: from none to any, from Prepared to Building, and from both to an end.
    """
    if before.has_ended or before is after or after is BuildState.INITIAL:
        return False
    return not (before is BuildState.BUILDING and after is BuildState.PREPARED)
