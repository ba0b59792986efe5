"""Manifests of a Job that builds the system part of an image, and of what it mounts.

Three containers run one after the other: ``fetch`` pulls the base and has the pull Secret,
``build`` runs the user's instructions and has no login, ``push`` has the push Secret. None has a
service account token or a path of the node.
"""

import base64
import json
from dataclasses import dataclass

from treenail.api import annotations as key
from treenail.api.decode import Json
from treenail.api.machineosbuild import API_VERSION, KIND
from treenail.controllers.image_build.job_name import make_job_name
from treenail.controllers.image_build.planning import BuildPlan, EntitlementMount, SystemPlan
from treenail.controllers.pools.select import CONTROL_PLANE_LABELS
from treenail.image.build_result import EXIT_USER

BACKOFF_LIMIT = 3
"""Pods that may fail before the Job fails, not counting evictions."""
RESULT_PATH = "/dev/termination-log"
INPUTS, WORK, SECRETS = "/build-inputs", "/build-work", "/build-secrets"
ARCHITECTURE_LABEL = "kubernetes.io/arch"
LOGIN_KEY = ".dockerconfigjson"
_LOGIN_FILE = "config.json"
_MODE = 0o440
_RESERVE_S = 30
"""Seconds of the deadline that are left for the start of the pod, the pull and the report."""
_CONTROL_PLANE_TOLERATIONS: list[Json] = [
    {"key": label, "operator": "Exists", "effect": "NoSchedule"} for label in CONTROL_PLANE_LABELS
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


def build_inputs(
    plan: BuildPlan, system: SystemPlan, build: BuildReference, settings: JobSettings
) -> Json:
    """Build the ConfigMap with the Containerfile and the facts of the build."""
    facts = {
        "pushSpec": system.wanted.push_spec,
        "architecture": system.architecture,
        "cacheRepository": settings.cache_repository,
        "userLine": system.user_line,
        **({"mirrors": plan.mirrors.to_json()} if plan.mirrors.rules else {}),
    }
    data: Json = {"Containerfile": system.containerfile, "build.json": json.dumps(facts)}
    if plan.ca_pem:
        data["ca.pem"] = plan.ca_pem
    body: Json = {
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


def build_login(
    content: bytes,
    plan: BuildPlan,
    system: SystemPlan,
    build: BuildReference,
    settings: JobSettings,
    *,
    is_push: bool,
) -> Json:
    """Build the Secret with a login in the form that the builder reads."""
    name = make_login_name(build.name, system.wanted.name, is_push=is_push)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/dockerconfigjson",
        "metadata": _build_metadata(name, plan, build, settings),
        "data": {LOGIN_KEY: base64.b64encode(content).decode()},
    }


def build_job(
    plan: BuildPlan,
    system: SystemPlan,
    build: BuildReference,
    settings: JobSettings,
    *,
    attempt: int,
    pull_login: str,
    push_login: str,
) -> Json:
    """Build the Job of an attempt for one architecture.

    The logins are names of Secrets; empty for anonymous access.
    """
    name = make_job_name(build.name, attempt, system.wanted.name)
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
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {"operator": "In", "values": [EXIT_USER]},
                    },
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                ]
            },
            "template": {
                "metadata": {"labels": labels},
                "spec": _build_pod(plan, system, build, settings, pull_login, push_login),
            },
        },
    }


def _build_pod(
    plan: BuildPlan,
    system: SystemPlan,
    build: BuildReference,
    settings: JobSettings,
    pull_login: str,
    push_login: str,
) -> Json:
    volumes: list[Json] = [
        {"name": "work", "emptyDir": {}},
        {"name": "inputs", "projected": {"sources": _build_sources(plan, system, build)}},
    ]
    for kind, login in (("pull", pull_login), ("push", push_login)):
        if login:
            items: list[Json] = [{"key": LOGIN_KEY, "path": _LOGIN_FILE}]
            secret: Json = {"secretName": login, "items": items, "defaultMode": _MODE}
            volumes.append({"name": f"{kind}-login", "secret": secret})
    volumes += [_build_entitlement_volume(each) for each in plan.entitlements]
    return {
        "restartPolicy": "Never",
        "serviceAccountName": settings.account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "nodeSelector": {ARCHITECTURE_LABEL: system.architecture},
        **({"tolerations": _CONTROL_PLANE_TOLERATIONS} if plan.can_use_control_plane else {}),
        "initContainers": [
            _build_container("fetch", plan, settings, login=pull_login and "pull"),
            _build_container("build", plan, settings),
        ],
        "containers": [_build_container("push", plan, settings, login=push_login and "push")],
        "volumes": volumes,
    }


def _build_container(
    phase: str, plan: BuildPlan, settings: JobSettings, *, login: str = ""
) -> Json:
    arguments = [phase, "--inputs", INPUTS, "--work", WORK, "--result", RESULT_PATH]
    mounts: list[Json] = [
        {"name": "work", "mountPath": WORK},
        {"name": "inputs", "mountPath": INPUTS, "readOnly": True},
    ]
    if login:
        place = f"{SECRETS}/{login}"
        mounts.append({"name": f"{login}-login", "mountPath": place, "readOnly": True})
        arguments += [f"--{login}-secret", f"{place}/{_LOGIN_FILE}"]
    if phase == "build":
        arguments += ["--timeout", str(_compute_build_limit(plan.deadline_s))]
        for entitlement in plan.entitlements:
            place = f"{SECRETS}/{entitlement.name}"
            mounts.append({"name": entitlement.name, "mountPath": place, "readOnly": True})
            arguments += ["--mount", f"{place}:{entitlement.path}"]
    elif plan.ca_pem:
        arguments += ["--ca", f"{INPUTS}/ca.pem"]
    limits: Json = {"ephemeral-storage": settings.storage}
    if phase == "build":
        limits["memory"] = settings.memory
    return {
        "name": phase,
        "image": settings.image,
        "command": ["python3", "-m", "treenail.builder"],
        "args": arguments,
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


def _build_sources(plan: BuildPlan, system: SystemPlan, build: BuildReference) -> list[Json]:
    names = ["Containerfile", "build.json", *(["ca.pem"] if plan.ca_pem else [])]
    items: list[Json] = [{"key": name, "path": name} for name in names]
    items += [{"key": name, "path": f"context/{name}"} for name in system.own_files]
    own_name = make_input_name(build.name, system.wanted.name)
    sources: list[Json] = [{"configMap": {"name": own_name, "items": items}}]
    if plan.context:
        copied: list[Json] = [
            {"key": name, "path": f"context/{name}"} for name in plan.context_files
        ]
        sources.append({"configMap": {"name": plan.context, "items": copied}})
    return sources


def _build_entitlement_volume(mount: EntitlementMount) -> Json:
    if mount.is_secret:
        return {"name": mount.name, "secret": {"secretName": mount.name, "defaultMode": _MODE}}
    return {"name": mount.name, "configMap": {"name": mount.name}}


def _build_metadata(
    name: str, plan: BuildPlan, build: BuildReference, settings: JobSettings
) -> Json:
    owner: Json = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": build.name,
        "uid": build.uid,
    }
    return {
        "name": name,
        "namespace": settings.namespace,
        "labels": _get_labels(plan, build),
        "ownerReferences": [owner],
    }


def _get_labels(plan: BuildPlan, build: BuildReference) -> dict[str, str]:
    return {
        key.EPHEMERAL_BUILD_OBJECT: "",
        key.IMAGE_CONFIG: build.image_config,
        key.IMAGE_BUILD: build.name,
        key.RENDERED_CONFIG: plan.wanted.config,
        key.BUILD_KEY: plan.wanted.share_key,
    }
