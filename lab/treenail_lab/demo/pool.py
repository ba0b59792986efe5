"""The lab's only pool: its manifest, its image build, and why its rollout halted.

``make demo ARGS=--build`` builds the image from a Containerfile.
"""

import re
from dataclasses import dataclass

from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosbuild import BuildState, MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.errors import HostError
from treenail.kube.api_client import Json, PatchType
from treenail.kube.resources import (
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    ROLLOUTPOLICIES,
    SECRETS,
)
from treenail.manifests.installation import InstallOptions
from treenail_lab.cluster import POOL, Lab, build_rendered_config
from treenail_lab.image_builds import LabRegistry, build_login_secret, find_build_refusal

CONTAINERFILE = """\
FROM configs AS final
RUN mkdir -p /usr/share/demo && echo "built in the lab" > /usr/share/demo/how
COPY motd /etc/motd
"""
_MOTD = "Welcome to a node whose image was built in its cluster.\n"
_CONTEXT = "image-context"
_PUSH_SECRET, _PULL_SECRET = "lab-push", "lab-pull"
_REPOSITORY = "os/node"


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """The state of the pool's build: the image by digest, or why there is none."""

    pull_spec: str = ""
    failure: str = ""


def check_builds() -> None:
    """Raise `HostError` where this host cannot build a Containerfile."""
    why, remedy = find_build_refusal()
    if why:
        raise HostError(f"cannot build an OS image: {why}", remedy=remedy)


class DemoBuild:
    """The MachineOSConfig of the lab's pool, and the state of its build."""

    def __init__(self, lab: Lab, registry: LabRegistry, containerfile: str) -> None:
        self._lab = lab
        self._registry = registry
        self._containerfile = containerfile
        self._namespace = InstallOptions().namespace

    def create_inputs(self) -> None:
        """Create the logins and the files of the build, as its user does with kubectl."""
        for name, login in (
            (_PUSH_SECRET, self._registry.push_login),
            (_PULL_SECRET, self._registry.pull_login),
        ):
            secret = build_login_secret(name, self._namespace, login)
            self._lab.client.create(SECRETS, secret, namespace=self._namespace)
        context: Json = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": _CONTEXT, "namespace": self._namespace},
            "data": {"motd": _MOTD},
        }
        self._lab.create_objects((context,))

    def request_build(self) -> None:
        """Create the MachineOSConfig: the pool moves to the image that is built from it."""
        content: Json = {"containerfileArch": "NoArch", "content": self._containerfile}
        spec: Json = {
            "machineConfigPool": {"name": POOL},
            "imageBuilder": {"imageBuilderType": "Job"},
            "baseImagePullSecret": {"name": _PULL_SECRET},
            "renderedImagePushSecret": {"name": _PUSH_SECRET},
            "renderedImagePushSpec": f"{self._registry.host}/{_REPOSITORY}:latest",
            "containerFile": [content],
        }
        self._lab.client.create(
            MACHINEOSCONFIGS,
            {
                "apiVersion": MACHINEOSCONFIGS.api_version,
                "kind": MACHINEOSCONFIGS.kind,
                "metadata": {"name": POOL, "annotations": {"treenail.io/context": _CONTEXT}},
                "spec": spec,
            },
        )

    def read_state(self) -> BuiltImage:
        """Return the built image, and why the build failed; both are empty while it runs."""
        config = MachineOSConfig.from_json(self._lab.client.get(MACHINEOSCONFIGS, POOL))
        if config.problem:
            return BuiltImage(failure=config.problem)
        builds = self._lab.client.list(MACHINEOSBUILDS).items
        for build in map(MachineOSBuild.from_json, builds):
            if build.name != config.current_build:
                continue
            if build.state in (BuildState.FAILED, BuildState.INTERRUPTED):
                return BuiltImage(failure=build.message or str(build.state))
            if build.state is BuildState.SUCCEEDED:
                return BuiltImage(pull_spec=config.pull_spec)
        return BuiltImage()


ROLE_LABEL = "machineconfiguration.openshift.io/role"
POLICY = "careful"
CANARY_POLICY: Json = {"canary": {"nodes": 1, "soak": "2s"}, "maxFailures": 0}
"""One node first; the rollout halts at the first failure."""


def build_pool(image: str, *, paused: bool = False) -> Json:
    """Return the pool that requests the image for its nodes."""
    return {
        "apiVersion": MACHINECONFIGPOOLS.api_version,
        "kind": MACHINECONFIGPOOLS.kind,
        "metadata": {"name": POOL},
        "spec": {
            "osImage": image,
            "rolloutPolicy": POLICY,
            "paused": paused,
            "machineConfigSelector": {"matchLabels": {ROLE_LABEL: POOL}},
            "nodeSelector": {"matchLabels": {f"node-role.kubernetes.io/{POOL}": ""}},
        },
    }


def apply_policy(lab: Lab, spec: Json) -> None:
    """Apply the rollout policy of the pool."""
    wanted: Json = {
        "apiVersion": ROLLOUTPOLICIES.api_version,
        "kind": ROLLOUTPOLICIES.kind,
        "metadata": {"name": POLICY},
        "spec": spec,
    }
    lab.client.patch(ROLLOUTPOLICIES, POLICY, wanted, PatchType.APPLY)


def build_config(name: str, spec: Json | None = None) -> Json:
    """Return a MachineConfig of the pool."""
    config = build_rendered_config(name, spec)
    config["metadata"] = {"name": name, "labels": {ROLE_LABEL: POOL}}
    return config


def apply_pool(lab: Lab, wanted: Json) -> None:
    """Apply the pool as ``kubectl apply --server-side`` does."""
    lab.client.patch(MACHINECONFIGPOOLS, POOL, wanted, PatchType.APPLY)


def create_pool(lab: Lab, image: str) -> None:
    """Create the pool, its rollout policy and its first MachineConfig."""
    apply_policy(lab, CANARY_POLICY)
    lab.add_config(build_config(f"00-{POOL}"))
    apply_pool(lab, build_pool(image))


def create_pool_without_image(lab: Lab, base: str) -> None:
    """Create the pool with its policy and a MachineConfig that names the base of a build."""
    apply_policy(lab, CANARY_POLICY)
    lab.add_config(build_config(f"00-{POOL}", {"osImageURL": base}))
    wanted = build_pool("")
    spec = wanted["spec"]
    if isinstance(spec, dict):
        del spec["osImage"]
    apply_pool(lab, wanted)


def pause_pool(lab: Lab) -> None:
    """Pause the pool: no node is assigned a target until the pool is applied again."""
    lab.client.patch(MACHINECONFIGPOOLS, POOL, {"spec": {"paused": True}})


def add_config(lab: Lab, wanted: Json) -> None:
    """Add the spec of a MachineConfig to the pool."""
    spec = wanted.get("spec")
    config = build_config(f"50-{POOL}-change", spec if isinstance(spec, dict) else None)
    lab.client.create(MACHINECONFIGS, config)


def find_halt_message(pool: MachineConfigPool) -> str:
    """Return why the rollout continues only after a user has acted; empty while it does."""
    degraded = next(
        (condition for condition in pool.conditions if condition.type == "Degraded"), None
    )
    if degraded is None or degraded.status != "True" or degraded.reason == "NodeDegraded":
        return ""
    return f"{degraded.reason}: {degraded.message}"


_HALTED = re.compile(r"Halted: .* is halted: (.*); set another target, or resume: (.*)")
_LONG_DIGEST = re.compile(r"(sha256:[0-9a-f]{12})[0-9a-f]{52}")


def split_halt_message(message: str) -> tuple[str, str]:
    """Return why the rollout halted, and the command that resumes it; empty where none does."""
    found = _HALTED.fullmatch(message)
    cause, command = found.groups() if found else (message, "")
    return _LONG_DIGEST.sub(r"\1", cause), command
