"""Build facts from API objects, and API objects from build facts. Pure.

Reads MachineOSConfigs, MachineOSBuilds, Jobs and pods. Encodes MachineOSBuilds and the annotations
that record a build: its report, its system parts, and the images that builds of a MachineOSConfig
pushed. Only those images may be pruned.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import decode, machineosbuild, machineosconfig, object_meta, pullspec
from treenail.api.component_names import PART_OF_LABELS
from treenail.controllers.image_build import build_facts
from treenail.encoding import codec
from treenail.image import build_result
from treenail.image.oci.documents import make_system_tag
from treenail.kube.resources import MACHINEOSCONFIGS

_SYSTEMS_LIMIT = 8 * 1024
PUSH_SECRET = key.PREFIX + "rendered-image-push-secret"
_FAILURE_LIMIT = 2000  # characters
REPORT_LIMIT_BYTES = 8 * 1024
JOB_NAME = "batch.kubernetes.io/job-name"
_OUT_OF_MEMORY_EXIT = 137  # 128 + SIGKILL
_POD_MESSAGE_LIMIT = 1000
MAX_PUSHED = 64
"""The newest images of a MachineOSConfig. Older ones stay in the registry."""
_PUSHED_TAG = re.compile(r"system-[0-9a-f]{16}|[a-z0-9][a-z0-9.-]*-[0-9a-f]{32}")


def read_systems(build: machineosbuild.MachineOSBuild) -> dict[str, build_facts.SystemFacts]:
    """Return the system parts by architecture; an empty name for the only one."""
    notes = build.metadata.annotations
    if text := notes.get(key.SYSTEMS, ""):
        return _decode_systems(text)
    only = build_facts.SystemFacts(
        content_key=build.content_key,
        share_key=build.metadata.labels.get(key.BUILD_KEY, ""),
        job=build.job,
        image=notes.get(key.SYSTEM_IMAGE, ""),
    )
    return {"": only}


def read_architectures(build: machineosbuild.MachineOSBuild) -> tuple[str, ...]:
    """Return the architectures of the image; empty if the build does not record them."""
    text = build.metadata.annotations.get(key.BUILD_ARCHITECTURES, "")
    return tuple(filter(None, text.split(",")))


def encode_systems(systems: Mapping[str, build_facts.SystemFacts]) -> dict[str, str]:
    """Return the annotations that record the system parts.

    The Job of the only architecture is in the status of the build.
    """
    if (only := systems.get("")) is not None:
        return {key.SYSTEM_IMAGE: only.image} if only.image else {}
    entries = {name: facts.to_json() for name, facts in sorted(systems.items())}
    return {key.SYSTEMS: json.dumps(entries, separators=(",", ":"))}


def _decode_systems(text: str) -> dict[str, build_facts.SystemFacts]:
    """Decode the annotation; an unreadable one has no part, so that the build begins again."""
    if len(text) > _SYSTEMS_LIMIT:
        return {}
    try:
        systems = decode.load_json(text, where="systems")
        return cast(
            "dict[str, build_facts.SystemFacts]",
            codec.read_value(Mapping[str, build_facts.SystemFacts], systems, "systems"),
        )
    except errors.ConfigError:
        return {}


def make_build_object(
    wanted: build_facts.WantedBuild,
    config: machineosconfig.MachineOSConfig,
    *,
    rebuild_of: str = "",
    previous_failure: str = "",
) -> decode.Json:
    """Return a new MachineOSBuild without a status.

    A MachineOSConfig of a file has no UID, and its build no owner.
    """
    notes = {
        PUSH_SECRET: wanted.push_secret,
        key.CONTENT_KEY: wanted.content_key,
        key.BUILD_ARCHITECTURES: ",".join(wanted.architectures),
        **encode_systems({system.name: system.initial for system in wanted.systems}),
        key.REBUILD_OF: rebuild_of,
        key.PREVIOUS_FAILURE: previous_failure[:_FAILURE_LIMIT],
    }
    metadata: decode.Json = {
        "name": wanted.name,
        "labels": {
            key.TARGET_POOL: config.pool,
            key.RENDERED_CONFIG: wanted.config,
            key.IMAGE_CONFIG: config.name,
            key.BUILD_KEY: wanted.share_key,
            **PART_OF_LABELS,
        },
        "annotations": {name: text for name, text in notes.items() if text},
    }
    if config.metadata.uid:
        metadata["ownerReferences"] = [make_owner_reference(config)]
    return {
        "apiVersion": machineosbuild.API_VERSION,
        "kind": machineosbuild.KIND,
        "metadata": metadata,
        "spec": {
            "machineConfig": {"name": wanted.config},
            "machineOSConfig": {"name": config.name},
            "renderedImagePushSpec": wanted.push_spec,
        },
    }


def make_owner_reference(config: machineosconfig.MachineOSConfig) -> decode.Json:
    """Return the owner reference of a build of this MachineOSConfig."""
    return {
        "apiVersion": machineosbuild.API_VERSION,
        "kind": MACHINEOSCONFIGS.kind,
        "name": config.name,
        "uid": config.metadata.uid,
        "controller": True,
    }


def encode_report(report: build_facts.BuildReport) -> str:
    """Encode a report in at most `REPORT_LIMIT_BYTES`; the begin of a long log is left out."""
    text = json.dumps(report.to_json(), separators=(",", ":"))
    while len(text) > REPORT_LIMIT_BYTES and report.failure is not None and report.failure.log:
        # Escapes take up to 6 bytes a character.
        log = report.failure.log[max((len(text) - REPORT_LIMIT_BYTES) // 6, 64) :]
        report = replace(report, failure=replace(report.failure, log=log))
        text = json.dumps(report.to_json(), separators=(",", ":"))
    return text


def decode_report(text: str) -> build_facts.BuildReport:
    """Decode a report; an unreadable one counts no attempt."""
    if not text or len(text) > 2 * REPORT_LIMIT_BYTES:
        return build_facts.BuildReport()
    try:
        document = decode.load_json(text, where="build report")
        return build_facts.BuildReport.from_json(document)
    except errors.ConfigError:
        return build_facts.BuildReport()


def make_config_facts(
    config: machineosconfig.MachineOSConfig, *, holds_rebuild: bool = False
) -> build_facts.ImageConfigFacts:
    """Extract the facts that decisions need; ``holds_rebuild`` hides the request for a rebuild."""
    notes = config.metadata.annotations
    build = decode.Fields.from_json(config.status, "status").get_object("machineOSBuild")
    return build_facts.ImageConfigFacts(
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


def make_build_facts(build: machineosbuild.MachineOSBuild) -> build_facts.BuildFacts:
    """Extract the facts that decisions need."""
    notes, condition = build.metadata.annotations, build.condition
    return build_facts.BuildFacts(
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
    failure: build_result.AttemptFailure | None = None
    digest: str = ""
    warning: str = ""
    """What the pod could not attach to the pushed image."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    created: str = ""

    @classmethod
    def from_json(cls, document: decode.Json) -> "ObservedPod":
        """Parse a pod; raises `ConfigError`."""
        fields = decode.Fields.from_json(document, "Pod")
        meta = fields.get_object("metadata").read(object_meta.ObjectMeta)
        status = fields.get_object("status")
        statuses = [
            *status.iter_objects("initContainerStatuses"),
            *status.iter_objects("containerStatuses"),
        ]
        results = list(filter(None, map(_read_result, statuses)))
        seconds: dict[str, float] = {}
        for result in results:
            seconds |= result.seconds
        pushed = next(
            (result for result in results if result.phase is build_result.BuildPhase.PUSH), None
        )
        failure = _find_pod_failure(status) or next(
            filter(None, map(_find_container_failure, statuses)), None
        )
        return cls(
            name=meta.name,
            # Kubernetes before 1.27 sets only the label without the prefix.
            job=meta.labels.get(JOB_NAME) or meta.labels.get("job-name", ""),
            job_uid=next(
                (
                    owner_reference.uid
                    for owner_reference in meta.owner_references
                    if owner_reference.kind == "Job"
                ),
                "",
            ),
            phase=_find_phase(statuses),
            unschedulable=next(
                (
                    condition.message
                    for condition in status.read_list("conditions", object_meta.Condition)
                    if (condition.type, condition.status) == ("PodScheduled", "False")
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

    facts: build_facts.JobFacts
    failure: build_result.AttemptFailure | None = None
    """Why the Job failed, if its conditions say more than its pods."""

    @classmethod
    def from_json(cls, document: decode.Json) -> "ObservedJob":
        """Parse a Job; raises `ConfigError`."""
        fields = decode.Fields.from_json(document, "Job")
        meta = fields.get_object("metadata").read(object_meta.ObjectMeta)
        status = fields.get_object("status")
        # A deleted Job may still succeed: the decision sees both facts.
        counts = build_result.JobStatus.from_json(document)
        started = status.get_text("startTime")
        attempt = meta.labels.get(key.BUILD_ATTEMPT, "")
        failed = counts.find_condition("Failed")
        return cls(
            build_facts.JobFacts(
                name=meta.name,
                uid=meta.uid,
                resource_version=meta.resource_version,
                share_key=meta.labels.get(key.BUILD_KEY, ""),
                image_config=meta.labels.get(key.IMAGE_CONFIG, ""),
                build=meta.labels.get(key.IMAGE_BUILD, ""),
                architecture=meta.labels.get(key.BUILD_ARCHITECTURE, ""),
                attempt=int(attempt) if attempt.isascii() and attempt.isdigit() else 1,
                state=build_facts.JobState(
                    build_result.compute_job_state(replace(counts, is_deleting=False)).value
                ),
                is_deleting=counts.is_deleting,
                owners=tuple(owner_reference.uid for owner_reference in meta.owner_references),
                started_at=clocks.parse_rfc3339(started) if started else None,
            ),
            _find_deadline_failure(meta.name, failed),
        )


def make_job_facts(
    job: ObservedJob, pods: Iterable[ObservedPod], existing: frozenset[str]
) -> build_facts.JobFacts:
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


def _find_deadline_failure(
    job: str, failed: object_meta.Condition | None
) -> build_result.AttemptFailure | None:
    if failed is None or failed.reason != "DeadlineExceeded":
        return None
    return build_result.AttemptFailure(
        build_result.BuildReason.DEADLINE_EXCEEDED,
        f"Job {job} ran longer than its activeDeadlineSeconds",
    )


def _read_result(container: decode.Fields) -> build_result.BuildResult | None:
    text = container.get_object("state").get_object("terminated").get_text("message")
    try:
        return build_result.BuildResult.from_text(text) if text else None
    except errors.ConfigError:
        return None


def _find_phase(statuses: list[decode.Fields]) -> str:
    states = [status.get_object("state").values for status in statuses]
    ended = sum(state.get("terminated") is not None for state in states)
    if ended == len(states):
        return ""
    is_running = any(state.get("running") is not None for state in states)
    # Containers run one after the other, so the number of ended ones is the index of the next.
    return statuses[ended].get_text("name") if ended or is_running else ""


def _find_pod_failure(status: decode.Fields) -> build_result.AttemptFailure | None:
    """Find a failure that the kubelet or the control plane caused, not a container."""
    message = status.get_text("message")[:_POD_MESSAGE_LIMIT]
    # The kubelet names the resource in the message (pkg/kubelet/eviction/helpers.go).
    if status.get_text("reason") == "Evicted":
        is_disk = "ephemeral" in message
        reason = build_result.BuildReason.DISK_FULL if is_disk else build_result.BuildReason.EVICTED
        return build_result.AttemptFailure(reason, message or "the kubelet evicted the pod")
    for condition in status.read_list("conditions", object_meta.Condition):
        if (condition.type, condition.status) == ("DisruptionTarget", "True"):
            what = condition.message[:_POD_MESSAGE_LIMIT] or condition.reason
            return build_result.AttemptFailure(
                build_result.BuildReason.EVICTED, f"the pod was ended: {what}"
            )
    return None


def _find_container_failure(container: decode.Fields) -> build_result.AttemptFailure | None:
    ended = container.get_object("state").get_object("terminated")
    code = ended.get_optional_integer("exitCode")
    if not code:
        return None
    name = container.get_text("name")
    result = _read_result(container)
    if ended.get_text("reason") == "OOMKilled":
        return build_result.AttemptFailure(
            build_result.BuildReason.OUT_OF_MEMORY, f"container {name} exceeded its memory limit"
        )
    if result is not None and result.reason is not None:
        head, _, log = result.message.partition("\n")
        return build_result.AttemptFailure(result.reason, head, result.line, log)
    if code == build_result.EXIT_USER:
        return build_result.AttemptFailure(
            build_result.BuildReason.CONTAINERFILE_INVALID,
            f"container {name} ended with code {code}",
        )
    if code == _OUT_OF_MEMORY_EXIT:
        return build_result.AttemptFailure(
            build_result.BuildReason.EVICTED, f"container {name} was killed"
        )
    return build_result.AttemptFailure(
        build_result.BuildReason.EVICTED,
        f"container {name} ended with code {code} and without a report",
    )


@dataclass(frozen=True, slots=True)
class PushedImage:
    """An image that a build pushed."""

    image: str
    """Pull spec by digest."""
    tag: str
    """The tag that the build gave it. An image with another tag stays."""

    @property
    def spec(self) -> pullspec.PullSpec:
        return pullspec.parse_pull_spec(self.image, where="pushed image")

    @property
    def is_complete(self) -> bool:
        """True unless it is the system part alone."""
        return not self.tag.startswith("system-")


def find_pushed_images(build: machineosbuild.MachineOSBuild) -> tuple[PushedImage, ...]:
    """Return the images that a build pushed, the system parts first."""
    systems = (
        (system.image, make_system_tag(system.content_key))
        for system in read_systems(build).values()
    )
    # A user pushed a pre-built image, and only a user deletes it.
    is_own = build.condition is None or build.condition.reason != build_result.PRE_BUILT_SEEDED
    tagged = (*systems, (build.pull_spec, build.name)) if is_own else tuple(systems)
    images = (_parse_image(image, tag) for image, tag in tagged if image)
    # A build may use a system part of another repository, which is not its own.
    return _filter_repository(filter(None, images), build.push_spec)


def _filter_repository(images: Iterable[PushedImage], push_spec: str) -> tuple[PushedImage, ...]:
    """Return the images in the repository of a push spec; none for an invalid one."""
    try:
        target = pullspec.parse_push_spec(push_spec, where="push spec")
    except errors.ConfigError:
        return ()
    prefix = f"{target.registry}/{target.repository}@"
    return tuple(image for image in images if image.image.startswith(prefix))


def add_pushed_images(
    known: tuple[PushedImage, ...], pushed: Iterable[PushedImage]
) -> tuple[PushedImage, ...]:
    """Return the images with more of them, the newest last."""
    new = tuple(pushed)
    return (*(image for image in known if image not in new), *new)[-MAX_PUSHED:]


def find_unrecorded_images(
    config: machineosconfig.MachineOSConfig, builds: Iterable[machineosbuild.MachineOSBuild]
) -> tuple[PushedImage, ...]:
    """Return the images of the config's builds that its annotation does not name, oldest first."""
    known = {image.image for image in read_pushed_images(config)}
    own = sorted(
        _filter_builds(config, builds), key=lambda build: (build.metadata.created, build.name)
    )
    pushed = (image for build in own for image in find_pushed_images(build))
    return tuple(image for image in pushed if image.image not in known)


def find_prune_candidates(
    config: machineosconfig.MachineOSConfig, builds: Iterable[machineosbuild.MachineOSBuild]
) -> tuple[PushedImage, ...]:
    """Return the images of its push repository that no build of the config names any longer."""
    own = _filter_builds(config, builds)
    named = {image.image for build in own for image in find_pushed_images(build)}
    unnamed = (image for image in read_pushed_images(config) if image.image not in named)
    return _filter_repository(unnamed, config.push_spec)


def _filter_builds(
    config: machineosconfig.MachineOSConfig, builds: Iterable[machineosbuild.MachineOSBuild]
) -> list[machineosbuild.MachineOSBuild]:
    return [build for build in builds if build.image_config == config.name]


def read_pushed_images(config: machineosconfig.MachineOSConfig) -> tuple[PushedImage, ...]:
    """Return the images of the annotation. Invalid entries count as none: they stay."""
    text = config.metadata.annotations.get(key.PUSHED_IMAGES, "")
    try:
        entries = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return ()
    if not isinstance(entries, dict):
        return ()
    images = (_parse_image(image, tag) for image, tag in entries.items())
    return tuple(image for image in images if image is not None)[-MAX_PUSHED:]


def encode_pushed_images(images: Iterable[PushedImage]) -> str:
    """Return the annotation."""
    return json.dumps({image.image: image.tag for image in images}, separators=(",", ":"))


def _parse_image(image: str, tag: object) -> PushedImage | None:
    if not isinstance(tag, str) or not _PUSHED_TAG.fullmatch(tag):
        return None
    try:
        pullspec.parse_pull_spec(image, where="pushed image")
    except errors.ConfigError:
        return None
    return PushedImage(image, tag)
