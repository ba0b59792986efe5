"""Carries out the actions of an adoption."""

import logging
from collections.abc import Iterable

from treenail.api.decode import Json
from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.api.meta import Condition, merge_conditions
from treenail.clock import Clock, format_rfc3339
from treenail.controllers.handover.adoption import (
    AdoptionAction,
    AnnotateConfig,
    CreateObject,
    DeleteFailedBuild,
    FinishBuild,
    ServeImage,
    can_replace,
)
from treenail.controllers.runtime.own_writes import OwnWrites
from treenail.errors import AlreadyExistsError, ForbiddenError, NotFoundError
from treenail.installer.inputs.image_mode import NAMESPACE
from treenail.kube.client import Client
from treenail.kube.resources import MACHINEOSBUILDS, MACHINEOSCONFIGS, SECRETS, get_object

log = logging.getLogger(__name__)


class AdoptionWriter:
    """Writes objects; a write to a changed object fails with `ConflictError`."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self.configs: OwnWrites[MachineOSConfig] = OwnWrites(clock)
        self.builds: OwnWrites[MachineOSBuild] = OwnWrites(clock)
        self.created: set[tuple[str, str, str, str]] = set()
        """Keys of objects that exist, as attempts to create them found."""

    def forget_writes(self) -> None:
        """Forget what was written: a restored etcd may lack it."""
        self.created.clear()
        self.configs.forget_writes()
        self.builds.forget_writes()

    def execute(self, action: AdoptionAction) -> None:
        """Execute one action; raise `ClusterError`."""
        match action:
            case CreateObject():
                self._create(action)
            case DeleteFailedBuild(build):
                try:
                    self._client.delete(MACHINEOSBUILDS, build.name, uid=build.metadata.uid)
                except NotFoundError:
                    return
                self.builds.record_deletion(build.name, build.metadata.uid)
                log.info("deleted %s, which has no image: the installation built it", build.name)
            case FinishBuild(build, status):
                body: Json = {
                    "metadata": {"resourceVersion": build.metadata.resource_version},
                    "status": status,
                }
                written = self._client.patch(
                    MACHINEOSBUILDS, build.name, body, subresource="status"
                )
                self.builds.record_write(build, MachineOSBuild.from_json(written))
                log.info("adopted the image of MachineOSBuild %s", build.name)
            case AnnotateConfig(config, annotations):
                meta: Json = {
                    "resourceVersion": config.metadata.resource_version,
                    "annotations": dict(annotations),
                }
                written = self._client.patch(MACHINEOSCONFIGS, config.name, {"metadata": meta})
                self.configs.record_write(config, MachineOSConfig.from_json(written))
            case ServeImage(config, build, conditions):
                self.write_conditions(
                    config,
                    conditions,
                    {
                        "currentImagePullSpec": build.pull_spec,
                        "machineOSBuild": {
                            "group": MACHINEOSBUILDS.group,
                            "resource": MACHINEOSBUILDS.plural,
                            "name": build.name,
                        },
                        "observedGeneration": config.metadata.generation,
                    },
                )
                log.info("pool %s has the image %s", config.pool, build.pull_spec)

    def write_conditions(
        self,
        config: MachineOSConfig,
        conditions: Iterable[Condition],
        status: Json | None = None,
    ) -> None:
        """Write conditions of a MachineOSConfig beside those of other writers."""
        now = format_rfc3339(self._clock.now())
        merged = merge_conditions(config.conditions, list(conditions), now=now)
        body: Json = {
            # A merge patch replaces the whole list, so it must fail if another writer changed it.
            "metadata": {"resourceVersion": config.metadata.resource_version},
            "status": {**(status or {}), "conditions": [each.to_json() for each in merged]},
        }
        written = self._client.patch(MACHINEOSCONFIGS, config.name, body, subresource="status")
        self.configs.record_write(config, MachineOSConfig.from_json(written))

    def _create(self, action: CreateObject) -> None:
        kind, resource = action.resource.kind, action.resource
        place = action.namespace or (NAMESPACE if resource.namespaced else "")
        try:
            created = self._client.create(resource, action.document, namespace=place)
        except AlreadyExistsError:
            log.debug("%s %s exists", kind, action.name)
            if resource == SECRETS:
                self._replace_secret(action, place)
        except ForbiddenError as error:
            if action.resource != SECRETS:
                raise
            # In a namespace that is not that of builds. The installer creates it there, too.
            log.warning("did not adopt Secret %s/%s: %s", place, action.name, error)
        else:
            if resource == MACHINEOSCONFIGS:
                self.configs.record_write(None, MachineOSConfig.from_json(created))
            elif resource == MACHINEOSBUILDS:
                self.builds.record_write(None, MachineOSBuild.from_json(created))
            log.info("created %s %s of the installation", kind, action.name)
        self.created.add(action.key)

    def _replace_secret(self, action: CreateObject, place: str) -> None:
        """Replace a Secret of an earlier hand-over: the user has corrected its login."""
        present = self._client.get(SECRETS, action.name, namespace=place)
        if not can_replace(present, action.document):
            return
        version = get_object(present, "metadata").get("resourceVersion")
        metadata = {**get_object(action.document, "metadata"), "resourceVersion": version}
        body: Json = {**action.document, "metadata": metadata}
        self._client.update(SECRETS, action.name, body, namespace=place)
        log.info("replaced Secret %s by that of the newest installation", action.name)
