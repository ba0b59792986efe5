"""Facts about MachineOSConfigs, MachineOSBuilds, Jobs and pods, from their API objects."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from treenail.api import annotations as key
from treenail.api.decode import Fields, Json
from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.api.meta import Condition, ObjectMeta
from treenail.clock import parse_rfc3339
from treenail.controllers.image_build.facts import (
    AttemptFailure,
    BuildFacts,
    ImageConfigFacts,
    JobFacts,
    JobState,
)
from treenail.controllers.image_build.report import decode_report
from treenail.controllers.image_build.systems import read_architectures, read_systems
from treenail.errors import ConfigError
from treenail.image.build_reason import BuildReason
from treenail.image.build_result import EXIT_USER, BuildPhase, BuildResult
from treenail.image.job_status import JobStatus, compute_job_state

JOB_NAME = "batch.kubernetes.io/job-name"
_OUT_OF_MEMORY_EXIT = 137
_MESSAGE_LIMIT = 1000


def make_config_facts(config: MachineOSConfig, *, holds_rebuild: bool = False) -> ImageConfigFacts:
    """Extract the facts that decisions need; ``holds_rebuild`` hides the request for a rebuild."""
    notes = config.metadata.annotations
    build = Fields.from_json(config.status, "status").get_object("machineOSBuild")
    return ImageConfigFacts(
        name=config.name,
        uid=config.metadata.uid,
        generation=config.metadata.generation,
        pool=config.pool,
        current_build=config.current_build,
        rebuild_requested=config.needs_rebuild and not holds_rebuild,
        rebuild_of=notes.get(key.REBUILD_OF, ""),
        pull_spec=config.pull_spec,
        pull_spec_build=build.get_text("name"),
        observed_generation=config.observed_generation,
        conditions=config.conditions,
        pre_built=config.pre_built_image,
    )


def make_build_facts(build: MachineOSBuild) -> BuildFacts:
    """Extract the facts that decisions need."""
    notes, condition = build.metadata.annotations, build.condition
    return BuildFacts(
        name=build.name,
        uid=build.metadata.uid,
        image_config=build.image_config,
        config=build.config,
        push_spec=build.push_spec,
        state=build.state,
        reason=condition.reason if condition else "",
        message=condition.message if condition else "",
        created=build.created,
        share_key=build.metadata.labels.get(key.BUILD_KEY, ""),
        report=decode_report(notes.get(key.BUILD_REPORT, "")),
        systems=read_systems(build),
        architectures=read_architectures(build),
        digest=build.pull_spec,
        job=build.job,
        rebuild_of=notes.get(key.REBUILD_OF, ""),
        started=build.start,
        is_deleting=build.is_deleting,
    )


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """A pod of a Job, and how its containers ended."""

    name: str
    job: str
    job_uid: str = ""
    """Of the Job that created it: another Job of the same name may exist now."""
    phase: str = ""
    """The container that runs or is next; empty before the first one and after the last one."""
    unschedulable: str = ""
    """Why no node runs the pod; empty if one does, or if the scheduler has not tried yet."""
    failure: AttemptFailure | None = None
    digest: str = ""
    warning: str = ""
    """What the pod could not attach to the pushed image."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    created: str = ""

    @classmethod
    def from_json(cls, document: Json) -> "ObservedPod":
        """Parse a pod; raises `ConfigError`."""
        fields = Fields.from_json(document, "Pod")
        meta = ObjectMeta.from_fields(fields.get_object("metadata"))
        status = fields.get_object("status")
        statuses = [
            *status.iter_objects("initContainerStatuses"),
            *status.iter_objects("containerStatuses"),
        ]
        results = [result for each in statuses if (result := _read_result(each)) is not None]
        seconds: dict[str, float] = {}
        for result in results:
            seconds |= result.seconds
        pushed = next((each for each in results if each.phase is BuildPhase.PUSH), None)
        failure = _find_pod_failure(status) or next(
            (found for each in statuses if (found := _find_container_failure(each)) is not None),
            None,
        )
        return cls(
            name=meta.name,
            job=meta.labels.get(JOB_NAME) or meta.labels.get("job-name", ""),
            job_uid=next((each.uid for each in meta.owner_references if each.kind == "Job"), ""),
            phase=_find_phase(statuses),
            unschedulable=next(
                (
                    each.message
                    for each in status.map_objects("conditions", Condition.from_fields)
                    if (each.type, each.status) == ("PodScheduled", "False")
                ),
                "",
            ),
            failure=None if failure is None else replace(failure, seconds=seconds),
            digest="" if pushed is None else pushed.digest,
            warning=pushed.message if pushed is not None and pushed.has_succeeded else "",
            seconds=seconds,
            created=meta.created,
        )


@dataclass(frozen=True, slots=True)
class ObservedJob:
    """A Job without its pods."""

    facts: JobFacts
    failure: AttemptFailure | None = None
    """Why the Job failed, if its conditions say more than its pods."""

    @classmethod
    def from_json(cls, document: Json) -> "ObservedJob":
        """Parse a Job; raises `ConfigError`."""
        fields = Fields.from_json(document, "Job")
        meta = ObjectMeta.from_fields(fields.get_object("metadata"))
        status = fields.get_object("status")
        # A deleted Job may still succeed: the decision sees both facts.
        counts = JobStatus.from_json(document)
        started = status.get_text("startTime")
        attempt = meta.labels.get(key.BUILD_ATTEMPT, "")
        failed = counts.find_condition("Failed")
        return cls(
            JobFacts(
                name=meta.name,
                uid=meta.uid,
                resource_version=meta.resource_version,
                share_key=meta.labels.get(key.BUILD_KEY, ""),
                image_config=meta.labels.get(key.IMAGE_CONFIG, ""),
                build=meta.labels.get(key.IMAGE_BUILD, ""),
                architecture=meta.labels.get(key.BUILD_ARCHITECTURE, ""),
                attempt=int(attempt) if attempt.isascii() and attempt.isdigit() else 1,
                state=JobState(compute_job_state(replace(counts, is_deleting=False)).value),
                is_deleting=counts.is_deleting,
                owners=tuple(each.uid for each in meta.owner_references),
                started_at=parse_rfc3339(started) if started else None,
            ),
            _find_deadline_failure(meta.name, failed),
        )


def make_job_facts(
    job: ObservedJob, pods: Iterable[ObservedPod], existing: frozenset[str]
) -> JobFacts:
    """Combine a Job with its pods; ``existing`` are the UIDs of all builds."""
    own = sorted(
        (pod for pod in pods if pod.job == job.facts.name and pod.job_uid in ("", job.facts.uid)),
        key=lambda pod: (pod.created, pod.name),
    )
    failed = [pod.failure for pod in own if pod.failure is not None]
    pushed = next((pod for pod in own if pod.digest and pod.failure is None), None)
    running = next((pod.phase for pod in reversed(own) if pod.phase), "")
    return replace(
        job.facts,
        failure=job.failure or (failed[-1] if failed else None),
        digest="" if pushed is None else pushed.digest,
        seconds={} if pushed is None else pushed.seconds,
        warning="" if pushed is None else pushed.warning,
        phase=running,
        unschedulable=own[-1].unschedulable if own else "",
        retries=len(failed),
        is_orphan=not existing.intersection(job.facts.owners),
    )


def _find_deadline_failure(job: str, failed: Condition | None) -> AttemptFailure | None:
    if failed is None or failed.reason != "DeadlineExceeded":
        return None
    return AttemptFailure(
        BuildReason.DEADLINE_EXCEEDED, f"Job {job} ran longer than its activeDeadlineSeconds"
    )


def _read_result(container: Fields) -> BuildResult | None:
    text = container.get_object("state").get_object("terminated").get_text("message")
    try:
        return BuildResult.from_json(text) if text else None
    except ConfigError:
        return None


def _find_phase(statuses: list[Fields]) -> str:
    states = [each.get_object("state").values for each in statuses]
    ended = sum(each.get("terminated") is not None for each in states)
    if ended == len(states):
        return ""
    is_running = any(each.get("running") is not None for each in states)
    # Containers run one after the other, so the number of ended ones is the index of the next.
    return statuses[ended].get_text("name") if ended or is_running else ""


def _find_pod_failure(status: Fields) -> AttemptFailure | None:
    """Find a failure that the kubelet or the control plane caused, not a container."""
    message = status.get_text("message")[:_MESSAGE_LIMIT]
    if status.get_text("reason") == "Evicted":
        is_disk = "ephemeral" in message
        reason = BuildReason.DISK_FULL if is_disk else BuildReason.EVICTED
        return AttemptFailure(reason, message or "the kubelet evicted the pod")
    for condition in status.map_objects("conditions", Condition.from_fields):
        if (condition.type, condition.status) == ("DisruptionTarget", "True"):
            what = condition.message[:_MESSAGE_LIMIT] or condition.reason
            return AttemptFailure(BuildReason.EVICTED, f"the pod was ended: {what}")
    return None


def _find_container_failure(container: Fields) -> AttemptFailure | None:
    ended = container.get_object("state").get_object("terminated")
    code = ended.get_optional_integer("exitCode")
    if not code:
        return None
    name = container.get_text("name")
    result = _read_result(container)
    if ended.get_text("reason") == "OOMKilled":
        return AttemptFailure(
            BuildReason.OUT_OF_MEMORY, f"container {name} exceeded its memory limit"
        )
    if result is not None and result.reason is not None:
        head, _, log = result.message.partition("\n")
        return AttemptFailure(result.reason, head, result.line, log)
    if code == EXIT_USER:
        return AttemptFailure(
            BuildReason.CONTAINERFILE_INVALID, f"container {name} ended with code {code}"
        )
    if code == _OUT_OF_MEMORY_EXIT:
        return AttemptFailure(BuildReason.EVICTED, f"container {name} was killed")
    return AttemptFailure(
        BuildReason.EVICTED, f"container {name} ended with code {code} and without a report"
    )
