"""Texts and conditions that describe image builds."""

import re
from collections.abc import Iterable

from treenail.api import machineosbuild, object_meta
from treenail.api.machineosconfig import ImageConfigCondition as Kind
from treenail.clocks import format_rfc3339
from treenail.controllers.image_build import build_facts
from treenail.controllers.pools import image_tags
from treenail.image import build_result, input_checks

_WITH_OUTPUT = frozenset(
    {
        build_result.BuildReason.INSTRUCTION_FAILED,
        build_result.BuildReason.DISK_FULL,
        build_result.BuildReason.OUT_OF_MEMORY,
        build_result.BuildReason.DEADLINE_EXCEEDED,
    }
)
# A change of the inputs that the remedy names begins another build.
_ENDED_BY_CHANGE = frozenset(
    {
        build_result.BuildReason.CONTAINERFILE_INVALID,
        build_result.BuildReason.INSTRUCTION_FAILED,
        build_result.BuildReason.CONFIG_NOT_BAKEABLE,
    }
)
IMAGES_PRUNED = "ImagesPruned"
"""Condition of a MachineOSConfig whose registry refused to delete images."""
_PRUNE_REMEDY = (
    "permit the push login to delete, or enable deletion in the registry; until then the images of "
    "deleted builds stay"
)
_REFUSAL_REMEDY = "change the quota, the admission policy or the role that refuses it"
_STEP = re.compile(r"(?:\[\d+/\d+\] )?STEP \d+/\d+: ")
_EXIT = re.compile(r"subprocess exited ")
_OUTPUT_LINES = 3
_CAUSE_LIMIT, _OUTPUT_LIMIT = 1000, 500  # characters; the remedy needs the rest

IMAGE_MISSING = "ImageMissing"
"""Reason of a pool's image that the registry no longer has."""
INSTALLING = "WaitingForInstallation"
"""Reason while the first build waits for the image of the installation."""
UNSCHEDULABLE = "Unschedulable"
"""Reason of a build whose Job no node can run, as in the condition of its pod."""
MESSAGE_LIMIT = 2000
"""Maximum characters of a message. The API permits 32768, but users read it in tables."""


def format_failure(
    failure: build_result.AttemptFailure,
    attempts: int,
    instruction_remedy: str = "",
    *,
    config: str = "",
) -> str:
    """Format why a build failed, with its line, the last output and the remedy.

    ``instruction_remedy`` is a further one for an instruction that failed. ``config`` names the
    MachineOSConfig.
    """
    tried = f" after {attempts} attempts" if attempts > 1 else ""
    remedy = build_result.REMEDIES[failure.reason]
    if instruction_remedy and failure.reason is build_result.BuildReason.INSTRUCTION_FAILED:
        remedy += f"; {instruction_remedy}"
    if failure.reason not in _ENDED_BY_CHANGE:
        remedy += f"; then run: {_format_rebuild(config or 'NAME')}"
    return _join_remedy(f"{_format_cause(failure)}{tried}", remedy)


def format_retry(report: build_facts.BuildReport) -> tuple[str, str]:
    """Return reason and message of a build that waits for its next attempt."""
    failure = report.failure
    if failure is None or report.retry_at is None:
        return "", ""
    wait = f"attempt {report.attempts} failed; next attempt at {format_rfc3339(report.retry_at)}"
    return failure.reason, _join_remedy(
        f"{_format_cause(failure)}; {wait}", build_result.REMEDIES[failure.reason]
    )


def format_job_progress(
    job: build_facts.JobFacts, report: build_facts.BuildReport, architecture: str
) -> str:
    """Format what a Job for an architecture does."""
    what = f"Job {job.name} waits for a node of architecture {architecture}"
    if job.unschedulable:
        what += f": {job.unschedulable}"
    if job.phase:
        what = f"Job {job.name} runs {job.phase}"
    if report.attempts:
        what += f" (attempt {report.attempts + 1})"
    if job.failure is not None:
        what += f"; pod {job.retries} failed: {_format_cause(job.failure)}"
    return what[:MESSAGE_LIMIT]


def compute_config_conditions(
    problem: image_tags.ImageProblem | None,
    build: build_facts.BuildFacts | None,
    *,
    is_served: bool,
    pull_spec: str,
    hold_reason: str = "",
    refusal: str = "",
) -> tuple[object_meta.Condition, ...]:
    """Compute the conditions of a MachineOSConfig, without times.

    ``hold_reason`` says why the first build waits for the installation, and ``refusal`` why the
    API server refused a write.
    """
    accepted = object_meta.Condition(
        Kind.ACCEPTED, "True", "Accepted", "The build inputs are valid"
    )
    if problem is not None:
        accepted = object_meta.Condition(Kind.ACCEPTED, "False", problem.reason, problem.message)
    if hold_reason and build is None:
        if problem is not None:
            # Not False, which degrades the pool: inputs may reach the cluster after the config.
            accepted = object_meta.Condition(
                Kind.ACCEPTED, "Unknown", problem.reason, problem.message
            )
        return (
            accepted,
            object_meta.Condition(Kind.IMAGE_READY, "False", INSTALLING, hold_reason),
            object_meta.Condition(Kind.BUILD_PROGRESSING, "False", INSTALLING, "No build runs"),
        )
    ready, progressing = _compute_build_conditions(
        problem, build, is_served=is_served, pull_spec=pull_spec
    )
    if refusal:
        progressing = object_meta.Condition(
            Kind.BUILD_PROGRESSING,
            "False",
            input_checks.InputReason.REQUEST_REFUSED,
            _join_remedy(f"the API server refuses a request: {refusal}", _REFUSAL_REMEDY),
        )
    return accepted, ready, progressing


def report_missing_image(
    conditions: Iterable[object_meta.Condition], pull_spec: str, config: str
) -> tuple[object_meta.Condition, ...]:
    """Return the conditions of a MachineOSConfig whose image the registry no longer has."""
    cause = f"the registry no longer has all of {pull_spec}, so that nodes cannot pull it"
    message = _join_remedy(cause, f"build it again with: {_format_rebuild(config)}")
    missing = object_meta.Condition(Kind.IMAGE_READY, "False", IMAGE_MISSING, message)
    return tuple(missing if known.type == Kind.IMAGE_READY else known for known in conditions)


def _format_rebuild(config: str) -> str:
    return f"kubectl annotate machineosconfig {config} machineconfiguration.openshift.io/rebuild="


def _compute_build_conditions(
    problem: image_tags.ImageProblem | None,
    build: build_facts.BuildFacts | None,
    *,
    is_served: bool,
    pull_spec: str,
) -> tuple[object_meta.Condition, object_meta.Condition]:
    previous = f"; the pool keeps {pull_spec}" if pull_spec else ""
    if build is None:
        reason = "Waiting" if problem is None else problem.reason
        message = f"No image is built for the present inputs{previous}"
        return (
            object_meta.Condition(Kind.IMAGE_READY, "False", reason, message),
            object_meta.Condition(Kind.BUILD_PROGRESSING, "False", reason, "No build runs"),
        )
    name = f"MachineOSBuild {build.name}"
    if build.state is machineosbuild.BuildState.SUCCEEDED:
        ready = (
            object_meta.Condition(Kind.IMAGE_READY, "True", "Ready", f"{name} built {pull_spec}")
            if is_served
            else object_meta.Condition(
                Kind.IMAGE_READY, "False", "Verifying", f"{name} is being verified"
            )
        )
        return ready, object_meta.Condition(
            Kind.BUILD_PROGRESSING, "False", "Succeeded", f"{name} succeeded"
        )
    reason = build.reason or build.state.value or "Created"
    message = f"{name}: {build.message}" if build.message else f"{name} was created"
    if build.has_ended:
        return (
            object_meta.Condition(Kind.IMAGE_READY, "False", reason, f"{message}{previous}"),
            object_meta.Condition(Kind.BUILD_PROGRESSING, "False", reason, message),
        )
    return (
        object_meta.Condition(
            Kind.IMAGE_READY,
            "False",
            "Building",
            f"{name} is in progress{previous}",
        ),
        object_meta.Condition(Kind.BUILD_PROGRESSING, "True", reason, message),
    )


def _format_cause(failure: build_result.AttemptFailure) -> str:
    line = f"line {failure.line}: " if failure.line else ""
    output = _find_last_output(failure.log) if failure.reason in _WITH_OUTPUT else ""
    shown = f"; last output: {output}" if output else ""
    return f"{line}{failure.message[:_CAUSE_LIMIT]}{shown}"


def _find_last_output(log: str) -> str:
    """Return the last lines that the instruction printed, without those of buildah."""
    lines = log.splitlines()
    steps = [number for number, line in enumerate(lines) if _STEP.match(line)]
    own = [line for line in lines[steps[-1] + 1 if steps else 0 :] if not _EXIT.match(line)]
    return " | ".join(own[-_OUTPUT_LINES:])[-_OUTPUT_LIMIT:]


def _join_remedy(cause: str, remedy: str) -> str:
    room = max(MESSAGE_LIMIT - len(remedy) - 2, 0)
    return f"{cause[:room]}; {remedy}" if remedy else cause[:MESSAGE_LIMIT]


def make_prune_condition(
    present: Iterable[object_meta.Condition], problem: str | None
) -> object_meta.Condition | None:
    """Return the condition of refused deletions if it must be written.

    ``problem`` is None while nothing is known. A registry that never refused gets no condition.
    """
    if problem is None:
        return None
    known = next((condition for condition in present if condition.type == IMAGES_PRUNED), None)
    if not problem:
        if known is None or known.status == "True":
            return None
        return object_meta.Condition(
            IMAGES_PRUNED, "True", "AsExpected", "the registry deletes images"
        )
    wanted = ("False", "DeletionRefused", f"{problem}; {_PRUNE_REMEDY}")
    if known is not None and (known.status, known.reason, known.message) == wanted:
        return None
    return object_meta.Condition(IMAGES_PRUNED, *wanted)
