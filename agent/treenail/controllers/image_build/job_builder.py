"""Jobs that build the system part of images.

The functions that make the manifests of a Job, and of what it mounts, are pure.
"""

import base64
import hashlib
import json
import logging
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from treenail import errors
from treenail.api import annotations as key
from treenail.api import decode, machineosbuild, machineosconfig, object_meta
from treenail.api.component_names import PART_OF_LABELS
from treenail.config import pullsecret
from treenail.controllers.image_build import build_facts, build_objects, build_planner
from treenail.controllers.pools import node_selection
from treenail.image.build_result import EXIT_USER
from treenail.kube import api_client, lease, resources

log = logging.getLogger(__name__)

BACKOFF_LIMIT = 3
"""Pods that may fail before the Job fails, not counting evictions."""
# The kubelet copies at most 4096 bytes of a container's file into the status of the pod
# (Kubernetes, "Determine the Reason for Pod Failure").
RESULT_PATH = "/dev/termination-log"
INPUTS, WORK, SECRETS_DIRECTORY = "/build-inputs", "/build-work", "/build-secrets"
LOGIN_KEY = ".dockerconfigjson"
_LOGIN_FILE = "config.json"
_MODE = 0o440
_RESERVE_S = 30
"""Seconds of the deadline that are left for the start of the pod, the pull and the report."""
_CONTROL_PLANE_TOLERATIONS: list[decode.Json] = [
    {"key": label, "operator": "Exists", "effect": "NoSchedule"}
    for label in node_selection.CONTROL_PLANE_LABELS
]


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Settings that hold for all Jobs."""

    image: str = "localhost/treenail-builder:latest"
    """Image with the builder and buildah."""
    namespace: str = ""
    account: str = "treenail-builder"
    cpu: str = "1"
    memory: str = "1Gi"
    """Request, and limit of ``build``."""
    storage: str = "20Gi"
    """Limit of ephemeral storage of the pod's containers."""
    cache_repository: str = ""
    """Repository for the layers of earlier builds; empty without a cache."""


@dataclass(frozen=True, slots=True)
class BuildReference:
    """The MachineOSBuild that owns the objects."""

    name: str
    uid: str
    image_config: str


def make_input_name(build: str, architecture: str) -> str:
    """Return the name of the ConfigMap with the inputs of a Job.

    ``architecture`` is empty for a build with only one.
    """
    return f"containerfile-{build}" + (f"-{architecture}" if architecture else "")


def make_login_name(build: str, architecture: str, *, is_push: bool) -> str:
    """Return the name of the Secret with a converted login.

    ``architecture`` is empty for a build with only one. Jobs of several end at different times.
    """
    suffix = f"-{architecture}" if architecture else ""
    return f"{'final' if is_push else 'base'}-{build}{suffix}"


def build_input_configmap(
    plan: build_planner.BuildPlan,
    system: build_planner.SystemPlan,
    build: BuildReference,
    settings: JobSettings,
) -> decode.Json:
    """Build the ConfigMap with the Containerfile and the facts of the build."""
    # Imported late: most starts of the controller build nothing.
    from treenail.builder import build_spec  # noqa: PLC0415  see the comment

    spec = build_spec.BuildSpec(
        system.wanted.push_spec,
        system.architecture,
        settings.cache_repository and f"{settings.cache_repository}/{build.image_config}",
        system.user_line,
        mirrors=plan.mirrors,
        labels=system.labels,
    )
    data: decode.Json = {
        "Containerfile": system.containerfile,
        "build.json": json.dumps(spec.to_json()),
    }
    if plan.ca_pem:
        data["ca.pem"] = plan.ca_pem
    body: decode.Json = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _build_metadata(
            make_input_name(build.name, system.wanted.name), plan, build, settings
        ),
        "data": data,
    }
    if system.own_files:
        body["binaryData"] = {
            name: base64.b64encode(content).decode() for name, content in system.own_files.items()
        }
    return body


def compute_inputs_digest(
    plan: build_planner.BuildPlan, system: build_planner.SystemPlan, configmap: decode.Json
) -> str:
    """Return the digest of the files of `_build_sources`, which users may change."""
    from treenail.builder import build_spec  # noqa: PLC0415  as above

    files = {f"context/{name}": content for name, content in system.own_files.items()}
    own = decode.Fields.from_json(configmap, "ConfigMap").get_text_map("data")
    files |= {name: text.encode() for name, text in own.items()}
    context = {f"context/{name}": digest for name, digest in plan.context_files.items()}
    return build_spec.compute_inputs_digest(
        context | {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}
    )


def build_login(
    content: bytes,
    plan: build_planner.BuildPlan,
    system: build_planner.SystemPlan,
    build: BuildReference,
    settings: JobSettings,
    *,
    is_push: bool,
) -> decode.Json:
    """Build the Secret with a login in the form that the builder reads."""
    name = make_login_name(build.name, system.wanted.name, is_push=is_push)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/dockerconfigjson",
        "metadata": _build_metadata(name, plan, build, settings),
        "data": {LOGIN_KEY: base64.b64encode(content).decode()},
    }


def make_proxy_name(build: str, architecture: str) -> str:
    """Return the name of the Secret with the proxy of a Job: its URL may have a login."""
    return f"proxy-{build}" + (f"-{architecture}" if architecture else "")


def build_proxy(
    variables: Mapping[str, str],
    plan: build_planner.BuildPlan,
    system: build_planner.SystemPlan,
    build: BuildReference,
    settings: JobSettings,
) -> decode.Json:
    """Build the Secret with the variables of the proxy."""
    name = make_proxy_name(build.name, system.wanted.name)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _build_metadata(name, plan, build, settings),
        "data": {
            name: base64.b64encode(value.encode()).decode() for name, value in variables.items()
        },
    }


def build_job(
    plan: build_planner.BuildPlan,
    system: build_planner.SystemPlan,
    build: BuildReference,
    settings: JobSettings,
    *,
    attempt: int,
    pull_login: str,
    push_login: str,
    proxy: str = "",
) -> decode.Json:
    """Build the Job of an attempt for one architecture.

    The logins are names of Secrets; empty for anonymous access. ``proxy`` is one, too.
    """
    name = build_facts.make_job_name(build.name, attempt, system.wanted.name)
    metadata = _build_metadata(name, plan, build, settings)
    labels = {
        **_get_labels(plan, build),
        key.BUILD_KEY: system.wanted.share_key,
        key.BUILD_ATTEMPT: str(attempt),
    }
    if system.wanted.name:
        labels[key.BUILD_ARCHITECTURE] = system.wanted.name
    metadata["labels"] = labels
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "backoffLimit": BACKOFF_LIMIT,
            "completions": 1,
            "parallelism": 1,
            "activeDeadlineSeconds": plan.deadline_s,
            # The first rule that matches counts. The API server requires restartPolicy Never.
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {"operator": "In", "values": [EXIT_USER]},
                    },
                    # Of an eviction, a preemption or a node that is gone.
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                ]
            },
            "template": {
                "metadata": {"labels": labels},
                "spec": _build_pod(plan, system, build, settings, pull_login, push_login, proxy),
            },
        },
    }


def _build_pod(
    plan: build_planner.BuildPlan,
    system: build_planner.SystemPlan,
    build: BuildReference,
    settings: JobSettings,
    pull_login: str,
    push_login: str,
    proxy: str,
) -> decode.Json:
    volumes: list[decode.Json] = [
        {"name": "work", "emptyDir": {}},
        {"name": "inputs", "projected": {"sources": _build_sources(plan, system, build)}},
    ]
    for kind, login in (("pull", pull_login), ("push", push_login)):
        if login:
            items: list[decode.Json] = [{"key": LOGIN_KEY, "path": _LOGIN_FILE}]
            secret: decode.Json = {"secretName": login, "items": items, "defaultMode": _MODE}
            volumes.append({"name": f"{kind}-login", "secret": secret})
    inputs = build_input_configmap(plan, system, build, settings)
    build_container = partial(
        _build_container, plan, settings, compute_inputs_digest(plan, system, inputs), proxy
    )
    volumes += [_build_entitlement_volume(entitlement) for entitlement in plan.entitlements]
    return {
        "restartPolicy": "Never",
        "serviceAccountName": settings.account,
        # The instructions of a user run in this pod.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "nodeSelector": {"kubernetes.io/arch": system.architecture},
        **({"tolerations": _CONTROL_PLANE_TOLERATIONS} if plan.can_use_control_plane else {}),
        "initContainers": [
            build_container("fetch", login=pull_login and "pull"),
            build_container("build"),
        ],
        "containers": [build_container("push", login=push_login and "push")],
        "volumes": volumes,
    }


def _build_container(
    plan: build_planner.BuildPlan,
    settings: JobSettings,
    inputs_digest: str,
    proxy: str,
    phase: str,
    *,
    login: str = "",
) -> decode.Json:
    arguments = [phase, "--inputs", INPUTS, "--work", WORK, "--result", RESULT_PATH]
    arguments += ["--inputs-digest", inputs_digest]
    mounts: list[decode.Json] = [
        {"name": "work", "mountPath": WORK},
        {"name": "inputs", "mountPath": INPUTS, "readOnly": True},
    ]
    if login:
        place = f"{SECRETS_DIRECTORY}/{login}"
        mounts.append({"name": f"{login}-login", "mountPath": place, "readOnly": True})
        arguments += [f"--{login}-secret", f"{place}/{_LOGIN_FILE}"]
    if phase == "build":
        arguments += ["--timeout", str(_compute_build_limit(plan.deadline_s))]
        for entitlement in plan.entitlements:
            place = f"{SECRETS_DIRECTORY}/{entitlement.name}"
            mounts.append({"name": entitlement.name, "mountPath": place, "readOnly": True})
            arguments += ["--mount", f"{place}:{entitlement.path}"]
    elif plan.ca_pem:
        arguments += ["--ca", f"{INPUTS}/ca.pem"]
    limits: decode.Json = {"ephemeral-storage": settings.storage}
    if phase == "build":
        limits["memory"] = settings.memory
    return {
        "name": phase,
        "image": settings.image,
        "command": ["python3", "-m", "treenail.builder"],
        "args": arguments,
        # Instructions that install packages need the proxy too. The spec of a pod is no place for
        # the login of its URL.
        **({"envFrom": [{"secretRef": {"name": proxy}}]} if proxy else {}),
        "terminationMessagePath": RESULT_PATH,
        "terminationMessagePolicy": "File",
        "resources": {
            "requests": {"cpu": settings.cpu, "memory": settings.memory},
            "limits": limits,
        },
        "volumeMounts": mounts,
        # As root, a container's default capabilities suffice to map IDs: newuidmap, which gains
        # privileges, is for other users.
        "securityContext": {"allowPrivilegeEscalation": False, "runAsUser": 0},
    }


def _compute_build_limit(deadline_s: int) -> int:
    """Return the seconds for instructions: less than the Job has.

    A pod that its Job ends at the deadline cannot report the line and the output.
    """
    return deadline_s - min(_RESERVE_S, deadline_s // 2)


def _build_sources(
    plan: build_planner.BuildPlan, system: build_planner.SystemPlan, build: BuildReference
) -> list[decode.Json]:
    names = ["Containerfile", "build.json", *(["ca.pem"] if plan.ca_pem else [])]
    items: list[decode.Json] = [{"key": name, "path": name} for name in names]
    items += [{"key": name, "path": f"context/{name}"} for name in system.own_files]
    own_name = make_input_name(build.name, system.wanted.name)
    sources: list[decode.Json] = [{"configMap": {"name": own_name, "items": items}}]
    if plan.context:
        copied: list[decode.Json] = [
            {"key": name, "path": f"context/{name}"} for name in plan.context_files
        ]
        sources.append({"configMap": {"name": plan.context, "items": copied}})
    return sources


def _build_entitlement_volume(mount: build_planner.EntitlementMount) -> decode.Json:
    if mount.is_secret:
        return {"name": mount.name, "secret": {"secretName": mount.name, "defaultMode": _MODE}}
    return {"name": mount.name, "configMap": {"name": mount.name}}


def _build_metadata(
    name: str, plan: build_planner.BuildPlan, build: BuildReference, settings: JobSettings
) -> decode.Json:
    owner: decode.Json = {
        "apiVersion": machineosbuild.API_VERSION,
        "kind": machineosbuild.KIND,
        "name": build.name,
        "uid": build.uid,
    }
    return {
        "name": name,
        "namespace": settings.namespace,
        "labels": _get_labels(plan, build),
        "ownerReferences": [owner],
    }


def _get_labels(plan: build_planner.BuildPlan, build: BuildReference) -> dict[str, str]:
    return {
        **PART_OF_LABELS,
        key.EPHEMERAL_BUILD_OBJECT: "",
        key.IMAGE_CONFIG: build.image_config,
        key.IMAGE_BUILD: build.name,
        key.RENDERED_CONFIG: plan.wanted.config,
        key.BUILD_KEY: plan.wanted.share_key,
    }


class JobBuilder:
    """Builds the system part of an image. All methods can be repeated, and raise `ClusterError`."""

    def __init__(
        self,
        client: api_client.Client,
        planner: build_planner.BuildPlanner,
        settings: JobSettings,
        late_writes: lease.LateWrites | None = None,
    ) -> None:
        self._client = client
        self._late_writes = late_writes
        self._identity = uuid.uuid4().hex
        self._planner = planner
        self._settings = settings
        self._lock = threading.Lock()

    def start_attempt(
        self,
        plan: build_planner.BuildPlan,
        system: build_planner.SystemPlan,
        config: machineosconfig.MachineOSConfig,
        build: machineosbuild.MachineOSBuild,
        attempt: int,
    ) -> None:
        """Create the Job after what it mounts, with the logins as they are now."""
        owner = BuildReference(build.name, build.metadata.uid, config.name)
        # Builds of the same key are decided on different threads.
        with self._lock:
            self._check_none_runs(system.wanted.share_key, owner)
            self._put(
                resources.CONFIGMAPS, build_input_configmap(plan, system, owner, self._settings)
            )
            pull_login, push_login = self._prepare_logins(plan, system, config, owner)
            proxy = self._put_proxy(plan, system, owner)
            body = build_job(
                plan,
                system,
                owner,
                self._settings,
                attempt=attempt,
                pull_login=pull_login,
                push_login=push_login,
                proxy=proxy,
            )
            self._create_job(body, owner)

    def adopt_attempt(
        self, job: build_facts.JobFacts, build: machineosbuild.MachineOSBuild
    ) -> None:
        """Add an owner, so that Job, inputs and logins stay as long as one of its builds does."""
        document = self._client.get(resources.JOBS, job.name, namespace=self._settings.namespace)
        meta = object_meta.read_metadata(document, "Job")
        if meta.uid != job.uid or meta.is_deleting:
            raise errors.ConflictError(f"Job {job.name} was deleted meanwhile")
        if any(reference.uid == build.metadata.uid for reference in meta.owner_references):
            return
        owner: decode.Json = {
            "apiVersion": machineosbuild.API_VERSION,
            "kind": machineosbuild.KIND,
            "name": build.name,
            "uid": build.metadata.uid,
        }
        for resource, name in _list_mounted(job):
            self._add_owner(resource, name, owner)
        body: decode.Json = {
            "metadata": {
                "resourceVersion": meta.resource_version,
                "ownerReferences": [
                    *(reference.to_json() for reference in meta.owner_references),
                    owner,
                ],
            }
        }
        self._client.patch(resources.JOBS, job.name, body, namespace=self._settings.namespace)
        log.info("%s waits for Job %s", build.name, job.name)

    def end_attempt(self, job: build_facts.JobFacts, *, has_inputs: bool) -> None:
        """Delete a Job with its pods, unless another build adopted it meanwhile."""
        namespace = self._settings.namespace
        if has_inputs:
            for resource, name in _list_mounted(job):
                with suppress(errors.NotFoundError):
                    self._client.delete(resource, name, namespace=namespace)
        with suppress(errors.NotFoundError):
            self._client.delete(
                resources.JOBS,
                job.name,
                namespace=namespace,
                uid=job.uid,
                resource_version=job.resource_version,
                # Without it the API server orphans the pods of a batch/v1 Job
                # (pkg/registry/batch/job/strategy.go).
                propagation="Background",
            )

    def _add_owner(self, resource: resources.Resource, name: str, owner: decode.Json) -> None:
        """Add an owner to an object that exists; a build without a login has no Secret."""
        namespace = self._settings.namespace
        try:
            document = self._client.get(resource, name, namespace=namespace)
        except errors.NotFoundError:
            return
        metadata = decode.Fields.from_json(document, resource.kind).get_object("metadata")
        known = metadata.read(object_meta.ObjectMeta).owner_references
        if all(reference.uid != owner["uid"] for reference in known):
            owners: list[decode.Json] = [*(reference.to_json() for reference in known), owner]
            body = {**document, "metadata": {**metadata.values, "ownerReferences": owners}}
            self._client.update(resource, name, body, namespace=namespace)

    def _prepare_logins(
        self,
        plan: build_planner.BuildPlan,
        system: build_planner.SystemPlan,
        config: machineosconfig.MachineOSConfig,
        owner: BuildReference,
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
        login: pullsecret.PullSecret,
        plan: build_planner.BuildPlan,
        system: build_planner.SystemPlan,
        owner: BuildReference,
        *,
        is_push: bool,
    ) -> str:
        if not login.credentials:
            return ""
        content = pullsecret.encode_pull_secret(login)
        body = build_login(content, plan, system, owner, self._settings, is_push=is_push)
        self._put(resources.SECRETS, body)
        return make_login_name(owner.name, system.wanted.name, is_push=is_push)

    def _put_proxy(
        self, plan: build_planner.BuildPlan, system: build_planner.SystemPlan, owner: BuildReference
    ) -> str:
        if not (variables := self._planner.read_proxies()):
            return ""
        body = build_proxy(variables, plan, system, owner, self._settings)
        self._put(resources.SECRETS, body)
        return make_proxy_name(owner.name, system.wanted.name)

    def _put(self, resource: resources.Resource, body: decode.Json) -> None:
        """Create an object, or replace the one of an earlier attempt."""
        namespace = self._settings.namespace
        fields = decode.Fields.from_json(body, resource.kind)
        metadata = fields.get_object("metadata").values
        notes = resources.get_object(metadata, "annotations")
        # Another leader changes the object by its update, even if all else is equal.
        body = {
            **body,
            "metadata": {**metadata, "annotations": {**notes, key.WRITTEN_BY: self._identity}},
        }
        try:
            created = self._client.create(resource, body, namespace=namespace)
        except errors.AlreadyExistsError:
            self._client.update(resource, str(metadata["name"]), body, namespace=namespace)
        else:
            if self._late_writes is not None:
                # The next leader may have ended the build, and deleted its inputs, already.
                self._late_writes.check_created(resource, created)

    def _check_none_runs(self, share_key: str, owner: BuildReference) -> None:
        """Raise `ConflictError` if a Job of the key runs that the watch does not show yet."""
        params = {"labelSelector": f"{key.BUILD_KEY}={share_key}"}
        listed = self._client.list(
            resources.JOBS, namespace=self._settings.namespace, params=params
        )
        for document in listed.items:
            job = build_objects.ObservedJob.from_json(document).facts
            is_running = job.state in (
                build_facts.JobState.PREPARED,
                build_facts.JobState.BUILDING,
            )
            if is_running and owner.uid not in job.owners:
                raise errors.ConflictError(f"Job {job.name} of the same key runs")

    def _create_job(self, body: decode.Json, owner: BuildReference) -> None:
        namespace = self._settings.namespace
        name = decode.Fields.from_json(body, "").get_object("metadata").get_text("name")
        try:
            self._client.create(resources.JOBS, body, namespace=namespace)
        except errors.AlreadyExistsError:
            document = self._client.get(resources.JOBS, name, namespace=namespace)
            if owner.uid in build_objects.ObservedJob.from_json(document).facts.owners:
                return
            raise errors.ConflictError(f"Job {name} of an earlier build is being deleted") from None
        log.info("created Job %s", name)


def _list_mounted(job: build_facts.JobFacts) -> tuple[tuple[resources.Resource, str], ...]:
    """Return what the pods of a Job mount: the objects that were made for it."""
    return (
        (resources.SECRETS, make_login_name(job.build, job.architecture, is_push=False)),
        (resources.SECRETS, make_login_name(job.build, job.architecture, is_push=True)),
        (resources.SECRETS, make_proxy_name(job.build, job.architecture)),
        (resources.CONFIGMAPS, make_input_name(job.build, job.architecture)),
    )
