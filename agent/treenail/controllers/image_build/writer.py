"""Execute the actions of a decision on objects, and report them as events and metrics.

The metrics have the names that the Machine Config Operator gives them.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import decode, machineconfigpool, machineosbuild, machineosconfig, object_meta
from treenail.controllers.image_build import build_facts, build_objects
from treenail.controllers.image_build.status import UNSCHEDULABLE
from treenail.controllers.pools.image_tags import TagChange
from treenail.controllers.runtime import controller_metrics, own_writes
from treenail.image import build_result, input_checks
from treenail.kube import api_client, event_recorder, resources

log = logging.getLogger(__name__)

STATES = tuple(
    state for state in machineosbuild.BuildState if state is not machineosbuild.BuildState.INITIAL
)
ReadObjects = Callable[
    [],
    tuple[Iterable[machineosconfig.MachineOSConfig], Mapping[str, machineosbuild.MachineOSBuild]],
]
ObjectAction = (
    build_facts.CreateBuild
    | build_facts.DeleteBuild
    | build_facts.SetCurrentBuild
    | build_facts.AcceptRebuild
    | build_facts.FinishRebuild
    | build_facts.SetReport
    | build_facts.SetSystems
    | build_facts.SetBuildStatus
    | build_facts.SetConfigStatus
    | build_facts.ReportPool
)


class BuildMetrics:
    """Counts what ends, and computes the gauges of pools at each scrape."""

    def __init__(
        self, metrics: controller_metrics.ControllerMetrics, read_objects: ReadObjects
    ) -> None:
        self._total = metrics.add_counter(
            "ocl_build_total", "Builds that ended, by result.", ("pool", "result"), prefix=""
        )
        self._retries = metrics.add_counter(
            "ocl_build_retries_total",
            "Failed attempts that are retried, by reason.",
            ("pool", "reason"),
            prefix="",
        )
        self._durations = metrics.add_histogram(
            "ocl_build_duration_seconds",
            "Time from the begin to the end of a build.",
            ("pool",),
            buckets=controller_metrics.SLOW_BUCKETS_S,
            prefix="",
        )
        self._pushes = metrics.add_histogram(
            "ocl_image_push_duration_seconds",
            "Time of the push alone.",
            ("pool",),
            buckets=controller_metrics.SLOW_BUCKETS_S,
            prefix="",
        )
        metrics.add_tables(lambda: compute_build_tables(*read_objects()))

    def record_status(
        self,
        action: build_facts.SetBuildStatus,
        before: machineosbuild.MachineOSBuild,
        pool: str,
        now: float,
    ) -> None:
        """Count a status that was written. ``before`` is the build before the write."""
        if action.state.has_ended:
            self._total.increment(pool, action.state.value)
            began = clocks.parse_rfc3339(before.start) if before.start else None
            self._durations.observe(max(0.0, now - (began or now)), pool)
        elif action.reason not in ("", UNSCHEDULABLE):
            self._retries.increment(pool, action.reason)

    def record_push(self, pool: str, seconds: float) -> None:
        """Record the duration of a push."""
        self._pushes.observe(seconds, pool)


def compute_build_tables(
    configs: Iterable[machineosconfig.MachineOSConfig],
    builds: Mapping[str, machineosbuild.MachineOSBuild],
) -> Iterator[controller_metrics.MetricTable]:
    """Return the gauges of all MachineOSConfigs, by the pool that they build for."""

    def make_table(name: str, about: str, *labels: str) -> controller_metrics.MetricTable:
        return controller_metrics.MetricTable(name, about, ("pool", *labels), prefix="")

    state = make_table("ocl_build_state", "1 for the state of the current build.", "state")
    begin = make_table("ocl_build_start_timestamp_seconds", "Begin of the current build.")
    end = make_table("ocl_build_end_timestamp_seconds", "End of the current build.")
    active = make_table("ocl_active_builds", "Builds that have not ended.")
    count = controller_metrics.MetricTable("mco_mosc_count", "MachineOSConfigs.", (), prefix="")
    running: dict[str, int] = {}
    for build in builds.values():
        if not build.state.has_ended:
            running[build.image_config] = running.get(build.image_config, 0) + 1
    number = 0
    for config in configs:
        number += 1
        active.values[(config.pool,)] = float(running.get(config.name, 0))
        current = builds.get(config.current_build)
        for build_state in STATES:
            is_current = current is not None and current.state is build_state
            state.values[(config.pool, build_state.value)] = float(is_current)
        for table, text in ((begin, current and current.start), (end, current and current.end)):
            at = clocks.parse_rfc3339(text) if text else None
            if at is not None:
                table.values[(config.pool,)] = at
    count.values[()] = float(number)
    yield from (state, begin, end, active, count)


class BuildEvents:
    """Records an Event for each change of the state or the reason of a build."""

    def __init__(self, recorder: event_recorder.EventRecorder) -> None:
        self._recorder = recorder

    def record_prune_problem(self, config: machineosconfig.MachineOSConfig, message: str) -> None:
        """Record that images cannot be deleted."""
        owner = event_recorder.ObjectReference(
            resources.MACHINEOSCONFIGS.kind,
            config.name,
            config.metadata.uid,
            api_version=machineosbuild.API_VERSION,
        )
        self._recorder.record_warning(owner, "ImagesNotPruned", message)

    def record_refusal(self, config: machineosconfig.MachineOSConfig, message: str) -> None:
        """Record that the API server refuses a write."""
        owner = event_recorder.ObjectReference(
            resources.MACHINEOSCONFIGS.kind,
            config.name,
            config.metadata.uid,
            api_version=machineosbuild.API_VERSION,
        )
        self._recorder.record_warning(owner, input_checks.InputReason.REQUEST_REFUSED, message)

    def record_tag_change(self, config: machineosconfig.MachineOSConfig, change: TagChange) -> None:
        """Record that the tag of the base image moved, or is not followed."""
        owner = event_recorder.ObjectReference(
            resources.MACHINEOSCONFIGS.kind,
            config.name,
            config.metadata.uid,
            api_version=machineosbuild.API_VERSION,
        )
        if change.is_warning:
            self._recorder.record_warning(owner, change.reason, change.message)
        else:
            self._recorder.record_normal(owner, change.reason, change.message)

    def record_status(
        self,
        action: build_facts.SetBuildStatus,
        before: machineosbuild.MachineOSBuild,
        config: machineosconfig.MachineOSConfig,
    ) -> None:
        """Record what a written status says. ``before`` is the build before the write."""
        known = before.condition
        if known is not None and (known.type, known.reason) == (action.state, action.reason):
            return
        build = event_recorder.ObjectReference(
            machineosbuild.KIND,
            before.name,
            before.metadata.uid,
            api_version=machineosbuild.API_VERSION,
        )
        owner = event_recorder.ObjectReference(
            resources.MACHINEOSCONFIGS.kind,
            config.name,
            config.metadata.uid,
            api_version=machineosbuild.API_VERSION,
        )
        if action.reason:
            self._recorder.record_warning(build, action.reason, action.message)
            self._recorder.record_warning(owner, action.reason, f"{before.name}: {action.message}")
        elif action.state is machineosbuild.BuildState.SUCCEEDED:
            text = f"built {action.digest}"
            self._recorder.record_normal(build, "BuildSucceeded", text)
            self._recorder.record_normal(owner, "BuildSucceeded", f"{before.name}: {text}")
            # Written before the status.
            if warning := build_objects.make_build_facts(before).report.warning:
                self._recorder.record_warning(build, "ProvenanceNotAttached", warning)
                text = f"{before.name}: {warning}"
                self._recorder.record_warning(owner, "ProvenanceNotAttached", text)
        elif before.state is not action.state:
            self._recorder.record_normal(build, f"Build{action.state.value}", action.message)


@dataclass(frozen=True, slots=True)
class CachedObjects:
    """Objects of one MachineOSConfig as the controller last observed them."""

    config: machineosconfig.MachineOSConfig
    builds: dict[str, machineosbuild.MachineOSBuild]
    pool: machineconfigpool.MachineConfigPool | None = None

    def has_ended(self, name: str) -> bool:
        """Return whether the build of this name exists and has ended."""
        build = self.builds.get(name)
        return build is not None and build.state.has_ended


class BuildWriter:
    """Writes objects. Each write carries the resourceVersion that the decision was based on."""

    def __init__(
        self,
        client: api_client.Client,
        clock: clocks.Clock,
        configs: own_writes.OwnWrites[machineosconfig.MachineOSConfig],
        builds: own_writes.OwnWrites[machineosbuild.MachineOSBuild],
        *,
        namespace: str,
    ) -> None:
        self._client = client
        self._clock = clock
        self._configs = configs
        self._builds = builds
        self._namespace = namespace

    def execute(self, action: ObjectAction, objects: CachedObjects) -> None:
        """Execute one action; raise `ClusterError`."""
        match action:
            case build_facts.CreateBuild():
                self._create_build(action, objects)
            case build_facts.DeleteBuild(name, uid, why):
                # Before the deletion: afterwards nothing says that the images are treenail's.
                deleted = [build for build in objects.builds.values() if build.name == name]
                self.record_images(
                    objects.config, build_objects.find_unrecorded_images(objects.config, deleted)
                )
                self._delete_build(name, uid, why)
            case build_facts.SetCurrentBuild(build):
                self._annotate_config(objects.config, {key.CURRENT_BUILD: build})
            case build_facts.AcceptRebuild(uid):
                self._annotate_config(objects.config, {key.REBUILD: None, key.REBUILD_OF: uid})
            case build_facts.FinishRebuild():
                self._annotate_config(objects.config, {key.REBUILD_OF: None})
            case build_facts.SetReport(build, report):
                note: decode.Json = {key.BUILD_REPORT: build_objects.encode_report(report)}
                self._patch_build(objects.builds[build], {"metadata": {"annotations": note}})
            case build_facts.SetSystems(build, systems):
                system_notes: decode.Json = {**build_objects.encode_systems(systems)}
                self._patch_build(
                    objects.builds[build], {"metadata": {"annotations": system_notes}}
                )
            case build_facts.SetBuildStatus():
                self._set_build_status(action, objects.builds[action.build])
            case build_facts.SetConfigStatus():
                self._set_config_status(action, objects.config)
            case build_facts.ReportPool(reason, message):
                if objects.pool is not None:
                    self._report_pool(objects.pool, reason, message)

    def record_base(self, config: machineosconfig.MachineOSConfig, text: str) -> None:
        """Store how the tag of the base image was resolved; an empty text removes the record."""
        self._annotate_config(config, {key.RESOLVED_BASE: text or None})
        log.info("recorded the base image of %s: %s", config.name, text or "none")

    def _create_build(self, action: build_facts.CreateBuild, objects: CachedObjects) -> None:
        wanted = action.wanted
        body = build_objects.make_build_object(
            wanted,
            objects.config,
            rebuild_of=action.rebuild_of,
            previous_failure=action.previous_failure,
        )
        try:
            created = self._client.create(resources.MACHINEOSBUILDS, body)
        except errors.AlreadyExistsError:
            # Another process, or a request without an answer, created it, and the watch lags.
            created = self._client.get(resources.MACHINEOSBUILDS, wanted.name)
            self._builds.record_write(None, machineosbuild.MachineOSBuild.from_json(created))
            log.debug("%s exists already", wanted.name)
            return
        self._builds.record_write(None, machineosbuild.MachineOSBuild.from_json(created))
        log.info("created MachineOSBuild %s for %s", wanted.name, wanted.config)

    def forget_images(self, config: machineosconfig.MachineOSConfig, gone: frozenset[str]) -> None:
        """Remove images that the registry no longer has from the annotation."""
        known = build_objects.read_pushed_images(config)
        self._write_pushed(
            config, known, tuple(image for image in known if image.image not in gone)
        )

    def record_images(
        self, config: machineosconfig.MachineOSConfig, images: Iterable[build_objects.PushedImage]
    ) -> None:
        """Name images in the annotation, the newest last."""
        known = build_objects.read_pushed_images(config)
        self._write_pushed(config, known, build_objects.add_pushed_images(known, images))

    def _write_pushed(
        self,
        config: machineosconfig.MachineOSConfig,
        before: tuple[build_objects.PushedImage, ...],
        after: tuple[build_objects.PushedImage, ...],
    ) -> None:
        if before != after:
            text = build_objects.encode_pushed_images(after) if after else None
            self._annotate_config(config, {key.PUSHED_IMAGES: text})

    def _delete_build(self, name: str, uid: str, why: str) -> None:
        try:
            self._client.delete(resources.MACHINEOSBUILDS, name, uid=uid)
        except errors.NotFoundError:
            log.debug("%s is deleted already", name)
        else:
            log.info("deleted MachineOSBuild %s: %s", name, why)
        self._builds.record_deletion(name, uid)

    def _annotate_config(self, config: machineosconfig.MachineOSConfig, notes: decode.Json) -> None:
        body: decode.Json = {
            "metadata": {
                "resourceVersion": config.metadata.resource_version,
                "annotations": notes,
            }
        }
        written = self._client.patch(resources.MACHINEOSCONFIGS, config.name, body)
        self._configs.record_write(config, machineosconfig.MachineOSConfig.from_json(written))

    def _patch_build(
        self, build: machineosbuild.MachineOSBuild, body: decode.Json, subresource: str = ""
    ) -> None:
        metadata = body.get("metadata")
        meta: decode.Json = {**metadata} if isinstance(metadata, dict) else {}
        meta["resourceVersion"] = build.metadata.resource_version
        written = self._client.patch(
            resources.MACHINEOSBUILDS,
            build.name,
            {**body, "metadata": meta},
            subresource=subresource,
        )
        self._builds.record_write(build, machineosbuild.MachineOSBuild.from_json(written))

    def _set_build_status(
        self, action: build_facts.SetBuildStatus, build: machineosbuild.MachineOSBuild
    ) -> None:
        now = clocks.format_rfc3339(self._clock.now())
        status: decode.Json = {
            "conditions": [
                condition.to_json()
                for condition in object_meta.merge_conditions(
                    build.conditions,
                    build_result.compute_build_conditions(
                        action.state, action.reason, action.message
                    ),
                    now=now,
                )
            ],
        }
        if action.job:
            job: decode.Json = {
                "group": "batch",
                "resource": "jobs",
                "namespace": self._namespace,
                "name": action.job,
            }
            status["builder"] = {"imageBuilderType": "Job", "job": job}
        if not build.start:
            status["buildStart"] = now
        if action.state.has_ended and not build.end:
            # The CRD of the Machine Config Operator requires an end after the start.
            start = clocks.parse_rfc3339(build.start or now) or 0.0
            status["buildEnd"] = clocks.format_rfc3339(max(self._clock.now(), start + 1.0))
        if action.digest:
            status["digestedImagePushSpec"] = action.digest
        self._patch_build(build, {"status": status}, "status")
        log.info("%s is %s: %s", build.name, action.state.value, action.message or action.digest)

    def _set_config_status(
        self, action: build_facts.SetConfigStatus, config: machineosconfig.MachineOSConfig
    ) -> None:
        now = clocks.format_rfc3339(self._clock.now())
        conditions = object_meta.merge_conditions(config.conditions, action.conditions, now=now)
        status: decode.Json = {
            "observedGeneration": max(config.metadata.generation, config.observed_generation),
            "conditions": [condition.to_json() for condition in conditions],
        }
        if action.pull_spec:
            status["currentImagePullSpec"] = action.pull_spec
        if action.build:
            group = resources.MACHINEOSBUILDS.group
            plural = resources.MACHINEOSBUILDS.plural
            status["machineOSBuild"] = {"group": group, "resource": plural, "name": action.build}
        body: decode.Json = {
            "metadata": {"resourceVersion": config.metadata.resource_version},
            "status": status,
        }
        written = self._client.patch(
            resources.MACHINEOSCONFIGS, config.name, body, subresource="status"
        )
        self._configs.record_write(config, machineosconfig.MachineOSConfig.from_json(written))

    def _report_pool(
        self, pool: machineconfigpool.MachineConfigPool, reason: str, message: str
    ) -> None:
        now = clocks.format_rfc3339(self._clock.now())
        condition = object_meta.Condition("ImageBuildDegraded", "True", reason, message)
        conditions = object_meta.merge_conditions(pool.conditions, [condition], now=now)
        body: decode.Json = {
            # A merge patch replaces the whole list, so it must fail if another writer changed it.
            "metadata": {"resourceVersion": pool.metadata.resource_version},
            "status": {"conditions": [condition.to_json() for condition in conditions]},
        }
        self._client.patch(resources.MACHINECONFIGPOOLS, pool.name, body, subresource="status")
        log.warning("pool %s: %s", pool.name, message)
