"""Builds the system part of images with Jobs."""

import logging
import threading
import uuid
from contextlib import suppress

from treenail.api import annotations as key
from treenail.api.decode import Fields, Json
from treenail.api.machineosbuild import API_VERSION, KIND, MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.api.meta import ObjectMeta
from treenail.config.pullsecret import PullSecret, encode_pull_secret
from treenail.controllers.image_build.facts import JobFacts, JobState
from treenail.controllers.image_build.job import (
    BuildReference,
    JobSettings,
    build_inputs,
    build_job,
    build_login,
    make_input_name,
    make_login_name,
)
from treenail.controllers.image_build.observed import ObservedJob
from treenail.controllers.image_build.planning import BuildPlan, BuildPlanner, SystemPlan
from treenail.errors import AlreadyExistsError, ConflictError, NotFoundError
from treenail.kube.client import Client
from treenail.kube.fence import LateWrites
from treenail.kube.resources import CONFIGMAPS, JOBS, SECRETS, Resource, get_object

log = logging.getLogger(__name__)


class JobBuilder:
    """A `treenail.controllers.image_build.builders.SystemBuilder`."""

    def __init__(
        self,
        client: Client,
        planner: BuildPlanner,
        settings: JobSettings,
        late_writes: LateWrites | None = None,
    ) -> None:
        self._client = client
        self._late_writes = late_writes
        self._identity = uuid.uuid4().hex
        self._planner = planner
        self._settings = settings
        self._lock = threading.Lock()

    def start_attempt(
        self,
        plan: BuildPlan,
        system: SystemPlan,
        config: MachineOSConfig,
        build: MachineOSBuild,
        attempt: int,
    ) -> None:
        """Create the Job after what it mounts, with the logins as they are now."""
        owner = BuildReference(build.name, build.metadata.uid, config.name)
        # Builds of the same key are decided on different threads.
        with self._lock:
            self._check_none_runs(system.wanted.share_key, owner)
            self._put(CONFIGMAPS, build_inputs(plan, system, owner, self._settings))
            pull_login, push_login = self._prepare_logins(plan, system, config, owner)
            body = build_job(
                plan,
                system,
                owner,
                self._settings,
                attempt=attempt,
                pull_login=pull_login,
                push_login=push_login,
            )
            self._create_job(body, owner)

    def adopt_attempt(self, job: JobFacts, build: MachineOSBuild) -> None:
        """Add an owner, so that Job, inputs and logins stay as long as one of its builds does."""
        document = self._client.get(JOBS, job.name, namespace=self._settings.namespace)
        meta = ObjectMeta.from_fields(Fields.from_json(document, "Job").get_object("metadata"))
        if meta.uid != job.uid or meta.is_deleting:
            raise ConflictError(f"Job {job.name} was deleted meanwhile")
        if any(each.uid == build.metadata.uid for each in meta.owner_references):
            return
        owner: Json = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": build.name,
            "uid": build.metadata.uid,
        }
        for resource, name in _list_mounted(job):
            self._add_owner(resource, name, owner)
        body: Json = {
            "metadata": {
                "resourceVersion": meta.resource_version,
                "ownerReferences": [*(each.to_json() for each in meta.owner_references), owner],
            }
        }
        self._client.patch(JOBS, job.name, body, namespace=self._settings.namespace)
        log.info("%s waits for Job %s", build.name, job.name)

    def end_attempt(self, job: JobFacts, *, has_inputs: bool) -> None:
        """Delete a Job with its pods, unless another build adopted it meanwhile."""
        namespace = self._settings.namespace
        if has_inputs:
            for resource, name in _list_mounted(job):
                with suppress(NotFoundError):
                    self._client.delete(resource, name, namespace=namespace)
        with suppress(NotFoundError):
            self._client.delete(
                JOBS,
                job.name,
                namespace=namespace,
                uid=job.uid,
                resource_version=job.resource_version,
                propagation="Background",
            )

    def _add_owner(self, resource: Resource, name: str, owner: Json) -> None:
        """Add an owner to an object that exists; a build without a login has no Secret."""
        namespace = self._settings.namespace
        try:
            document = self._client.get(resource, name, namespace=namespace)
        except NotFoundError:
            return
        metadata = Fields.from_json(document, resource.kind).get_object("metadata")
        known = ObjectMeta.from_fields(metadata).owner_references
        if all(each.uid != owner["uid"] for each in known):
            owners: list[Json] = [*(each.to_json() for each in known), owner]
            body = {**document, "metadata": {**metadata.values, "ownerReferences": owners}}
            self._client.update(resource, name, body, namespace=namespace)

    def _prepare_logins(
        self, plan: BuildPlan, system: SystemPlan, config: MachineOSConfig, owner: BuildReference
    ) -> tuple[str, str]:
        """Return the Secrets that ``fetch`` and ``push`` mount."""
        names = []
        for is_push, login in (
            (False, self._planner.read_base_login(config)),
            (True, self._planner.read_push_login(config)),
        ):
            names.append(self._put_login(login, plan, system, owner, is_push=is_push))
        return names[0], names[1]

    def _put_login(
        self,
        login: PullSecret,
        plan: BuildPlan,
        system: SystemPlan,
        owner: BuildReference,
        *,
        is_push: bool,
    ) -> str:
        if not login.credentials:
            return ""
        content = encode_pull_secret(login)
        body = build_login(content, plan, system, owner, self._settings, is_push=is_push)
        self._put(SECRETS, body)
        return make_login_name(owner.name, system.wanted.name, is_push=is_push)

    def _put(self, resource: Resource, body: Json) -> None:
        """Create an object, or replace the one of an earlier attempt."""
        namespace = self._settings.namespace
        fields = Fields.from_json(body, resource.kind)
        metadata = fields.get_object("metadata").values
        notes = get_object(metadata, "annotations")
        # Another leader changes the object by its update, even if all else is equal.
        body = {
            **body,
            "metadata": {**metadata, "annotations": {**notes, key.WRITTEN_BY: self._identity}},
        }
        try:
            created = self._client.create(resource, body, namespace=namespace)
        except AlreadyExistsError:
            self._client.update(resource, str(metadata["name"]), body, namespace=namespace)
        else:
            if self._late_writes is not None:
                # The next leader may have ended the build, and deleted its inputs, already.
                self._late_writes.check_created(resource, created)

    def _check_none_runs(self, share_key: str, owner: BuildReference) -> None:
        """Raise `ConflictError` if a Job of the key runs that the watch does not show yet."""
        params = {"labelSelector": f"{key.BUILD_KEY}={share_key}"}
        listed = self._client.list(JOBS, namespace=self._settings.namespace, params=params)
        for document in listed.items:
            found = ObservedJob.from_json(document).facts
            is_running = found.state in (JobState.PREPARED, JobState.BUILDING)
            if is_running and owner.uid not in found.owners:
                raise ConflictError(f"Job {found.name} of the same key runs")

    def _create_job(self, body: Json, owner: BuildReference) -> None:
        namespace = self._settings.namespace
        name = Fields.from_json(body, "").get_object("metadata").get_text("name")
        try:
            self._client.create(JOBS, body, namespace=namespace)
        except AlreadyExistsError:
            document = self._client.get(JOBS, name, namespace=namespace)
            if owner.uid in ObservedJob.from_json(document).facts.owners:
                return
            raise ConflictError(f"Job {name} of an earlier build is being deleted") from None
        log.info("created Job %s", name)


def _list_mounted(job: JobFacts) -> tuple[tuple[Resource, str], ...]:
    """Return what the pods of a Job mount: the objects that were made for it."""
    return (
        (SECRETS, make_login_name(job.build, job.architecture, is_push=False)),
        (SECRETS, make_login_name(job.build, job.architecture, is_push=True)),
        (CONFIGMAPS, make_input_name(job.build, job.architecture)),
    )
