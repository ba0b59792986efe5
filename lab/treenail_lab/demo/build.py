"""The image build of ``make demo ARGS=--build``: from a Containerfile to the nodes of the pool."""

from dataclasses import dataclass

from treenail.api.machineosbuild import BuildState, MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.errors import HostError
from treenail.kube.client import Json
from treenail.kube.resources import MACHINEOSBUILDS, MACHINEOSCONFIGS, SECRETS
from treenail.manifests.installation import InstallOptions
from treenail_lab.cluster import POOL, Lab
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
