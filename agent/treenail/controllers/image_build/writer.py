"""Executes the actions of a decision that change MachineOSConfigs, MachineOSBuilds and pools."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from treenail.api import annotations as key
from treenail.api.decode import Json
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.api.meta import Condition, merge_conditions
from treenail.clock import Clock, format_rfc3339, parse_rfc3339
from treenail.controllers.image_build.actions import (
    AcceptRebuild,
    CreateBuild,
    DeleteBuild,
    FinishRebuild,
    ReportPool,
    SetBuildStatus,
    SetConfigStatus,
    SetCurrentBuild,
    SetReport,
    SetSystems,
)
from treenail.controllers.image_build.build_object import make_build_object
from treenail.controllers.image_build.pushed_images import (
    PushedImage,
    add_pushed_images,
    encode_pushed_images,
    find_unrecorded_images,
    read_pushed_images,
)
from treenail.controllers.image_build.report import encode_report
from treenail.controllers.image_build.systems import encode_systems
from treenail.controllers.runtime.own_writes import OwnWrites
from treenail.errors import AlreadyExistsError, NotFoundError
from treenail.image.job_status import compute_build_conditions
from treenail.kube.client import Client
from treenail.kube.resources import MACHINECONFIGPOOLS, MACHINEOSBUILDS, MACHINEOSCONFIGS

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CachedObjects:
    """Objects of one MachineOSConfig as the controller last observed them."""

    config: MachineOSConfig
    builds: dict[str, MachineOSBuild]
    pool: MachineConfigPool | None = None

    def has_ended(self, name: str) -> bool:
        """Return whether the build of this name exists and has ended."""
        build = self.builds.get(name)
        return build is not None and build.state.has_ended


ObjectAction = (
    CreateBuild
    | DeleteBuild
    | SetCurrentBuild
    | AcceptRebuild
    | FinishRebuild
    | SetReport
    | SetSystems
    | SetBuildStatus
    | SetConfigStatus
    | ReportPool
)


class BuildWriter:
    """Writes objects. Each write carries the resourceVersion that the decision was based on."""

    def __init__(
        self,
        client: Client,
        clock: Clock,
        configs: OwnWrites[MachineOSConfig],
        builds: OwnWrites[MachineOSBuild],
        *,
        namespace: str,
    ) -> None:
        self._client = client
        self._clock = clock
        self._configs = configs
        self._builds = builds
        self._namespace = namespace

    def execute(self, action: ObjectAction, found: CachedObjects) -> None:
        """Execute one action; raise `ClusterError`."""
        match action:
            case CreateBuild():
                self._create_build(action, found)
            case DeleteBuild(name, uid, why):
                # Before the deletion: afterwards nothing says that the images are treenail's.
                deleted = [each for each in found.builds.values() if each.name == name]
                self.record_images(found.config, find_unrecorded_images(found.config, deleted))
                self._delete_build(name, uid, why)
            case SetCurrentBuild(build):
                self._annotate_config(found.config, {key.CURRENT_BUILD: build})
            case AcceptRebuild(uid):
                self._annotate_config(found.config, {key.REBUILD: None, key.REBUILD_OF: uid})
            case FinishRebuild():
                self._annotate_config(found.config, {key.REBUILD_OF: None})
            case SetReport(build, report):
                note: Json = {key.BUILD_REPORT: encode_report(report)}
                self._patch_build(found.builds[build], {"metadata": {"annotations": note}})
            case SetSystems(build, systems):
                system_notes: Json = {**encode_systems(systems)}
                self._patch_build(found.builds[build], {"metadata": {"annotations": system_notes}})
            case SetBuildStatus():
                self._set_build_status(action, found.builds[action.build])
            case SetConfigStatus():
                self._set_config_status(action, found.config)
            case ReportPool(reason, message):
                if found.pool is not None:
                    self._report_pool(found.pool, reason, message)

    def record_base(self, config: MachineOSConfig, text: str) -> None:
        """Store how the tag of the base image was resolved; an empty text removes the record."""
        self._annotate_config(config, {key.RESOLVED_BASE: text or None})
        log.info("recorded the base image of %s: %s", config.name, text or "none")

    def _create_build(self, action: CreateBuild, found: CachedObjects) -> None:
        wanted = action.wanted
        body = make_build_object(
            wanted,
            found.config,
            rebuild_of=action.rebuild_of,
            previous_failure=action.previous_failure,
        )
        try:
            created = self._client.create(MACHINEOSBUILDS, body)
        except AlreadyExistsError:
            # Another process, or a request without an answer, created it, and the watch lags.
            created = self._client.get(MACHINEOSBUILDS, wanted.name)
            self._builds.record_write(None, MachineOSBuild.from_json(created))
            log.debug("%s exists already", wanted.name)
            return
        self._builds.record_write(None, MachineOSBuild.from_json(created))
        log.info("created MachineOSBuild %s for %s", wanted.name, wanted.config)

    def forget_images(self, config: MachineOSConfig, gone: frozenset[str]) -> None:
        """Remove images that the registry no longer has from the annotation."""
        known = read_pushed_images(config)
        self._write_pushed(config, known, tuple(each for each in known if each.image not in gone))

    def record_images(self, config: MachineOSConfig, images: Iterable[PushedImage]) -> None:
        """Name images in the annotation, the newest last."""
        known = read_pushed_images(config)
        self._write_pushed(config, known, add_pushed_images(known, images))

    def _write_pushed(
        self,
        config: MachineOSConfig,
        before: tuple[PushedImage, ...],
        after: tuple[PushedImage, ...],
    ) -> None:
        if before != after:
            text = encode_pushed_images(after) if after else None
            self._annotate_config(config, {key.PUSHED_IMAGES: text})

    def _delete_build(self, name: str, uid: str, why: str) -> None:
        try:
            self._client.delete(MACHINEOSBUILDS, name, uid=uid)
        except NotFoundError:
            log.debug("%s is deleted already", name)
        else:
            log.info("deleted MachineOSBuild %s: %s", name, why)
        self._builds.record_deletion(name, uid)

    def _annotate_config(self, config: MachineOSConfig, notes: Json) -> None:
        body: Json = {
            "metadata": {
                "resourceVersion": config.metadata.resource_version,
                "annotations": notes,
            }
        }
        written = self._client.patch(MACHINEOSCONFIGS, config.name, body)
        self._configs.record_write(config, MachineOSConfig.from_json(written))

    def _patch_build(self, build: MachineOSBuild, body: Json, subresource: str = "") -> None:
        metadata = body.get("metadata")
        meta: Json = {**metadata} if isinstance(metadata, dict) else {}
        meta["resourceVersion"] = build.metadata.resource_version
        written = self._client.patch(
            MACHINEOSBUILDS, build.name, {**body, "metadata": meta}, subresource=subresource
        )
        self._builds.record_write(build, MachineOSBuild.from_json(written))

    def _set_build_status(self, action: SetBuildStatus, build: MachineOSBuild) -> None:
        now = format_rfc3339(self._clock.now())
        status: Json = {
            "conditions": [
                each.to_json()
                for each in merge_conditions(
                    build.conditions,
                    compute_build_conditions(action.state, action.reason, action.message),
                    now=now,
                )
            ],
        }
        if action.job:
            job: Json = {
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
            start = parse_rfc3339(build.start or now) or 0.0
            status["buildEnd"] = format_rfc3339(max(self._clock.now(), start + 1.0))
        if action.digest:
            status["digestedImagePushSpec"] = action.digest
        self._patch_build(build, {"status": status}, "status")
        log.info("%s is %s: %s", build.name, action.state.value, action.message or action.digest)

    def _set_config_status(self, action: SetConfigStatus, config: MachineOSConfig) -> None:
        now = format_rfc3339(self._clock.now())
        conditions = merge_conditions(config.conditions, action.conditions, now=now)
        status: Json = {
            "observedGeneration": max(config.metadata.generation, config.observed_generation),
            "conditions": [each.to_json() for each in conditions],
        }
        if action.pull_spec:
            status["currentImagePullSpec"] = action.pull_spec
        if action.build:
            group = MACHINEOSBUILDS.group
            plural = MACHINEOSBUILDS.plural
            status["machineOSBuild"] = {"group": group, "resource": plural, "name": action.build}
        body: Json = {
            "metadata": {"resourceVersion": config.metadata.resource_version},
            "status": status,
        }
        written = self._client.patch(MACHINEOSCONFIGS, config.name, body, subresource="status")
        self._configs.record_write(config, MachineOSConfig.from_json(written))

    def _report_pool(self, pool: MachineConfigPool, reason: str, message: str) -> None:
        now = format_rfc3339(self._clock.now())
        condition = Condition("ImageBuildDegraded", "True", reason, message)
        conditions = merge_conditions(pool.conditions, [condition], now=now)
        body: Json = {
            # A merge patch replaces the whole list, so it must fail if another writer changed it.
            "metadata": {"resourceVersion": pool.metadata.resource_version},
            "status": {"conditions": [each.to_json() for each in conditions]},
        }
        self._client.patch(MACHINECONFIGPOOLS, pool.name, body, subresource="status")
        log.warning("pool %s: %s", pool.name, message)
