"""An install directory with a pool, a base image in a registry, and builds of its image."""

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.controllers.image_build.site import MovableClock
from tests.installer.directories import make_config, make_pool, write_manifest
from tests.installer.registries import CLOCK
from tests.registry.images import make_client, push_image
from tests.registry.real_registry import PULLER, PUSHER, RegistryService
from treenail.clocks import Clock
from treenail.installer.directory.install_files import InstallDirectory, InstallFiles
from treenail.installer.directory.install_manifests import (
    read_install_manifests,
    render_install_pools,
)
from treenail.installer.images.build_attempt import PoolBuildSettings, PushRegistry
from treenail.installer.images.built_image import BuiltPoolImage
from treenail.installer.images.pool_image import (
    PoolImageBuilder,
    PoolImageInputs,
    make_build_inputs,
)
from treenail.installer.install_steps import StepOverdueError

GROUP = "machineconfiguration.openshift.io/v1"
NAMESPACE = "builds"
FINAL = "registry.example.invalid"
Document = dict[str, object]


@dataclass(slots=True)
class RecordingContext:
    """A `treenail.installer.install_steps.StepContext` whose waits pass at once."""

    clock: MovableClock | None = None
    """Moves by each wait."""
    limit_s: float = float("inf")
    on_wait: Callable[[float], None] = lambda _: None
    reports: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def report(self, text: str) -> None:
        self.reports.append(text)

    def wait(self, seconds: float) -> None:
        if self.remaining_s() <= 0:
            raise StepOverdueError("the time limit has passed")
        self.waits.append(seconds)
        self.on_wait(seconds)
        if self.clock is not None:
            self.clock.move(seconds)

    def remaining_s(self) -> float:
        return self.limit_s - sum(self.waits)


def make_secret(name: str, content: bytes, namespace: str = NAMESPACE) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/dockerconfigjson",
        "metadata": {"name": name, "namespace": namespace},
        "data": {".dockerconfigjson": base64.b64encode(content).decode()},
    }


class InstallSite:
    """An install directory; ``registry`` has the base image, and is the final one if `final` is."""

    def __init__(
        self,
        root: Path,
        registry: RegistryService,
        *,
        final: str = FINAL,
        namespace: str = NAMESPACE,
    ) -> None:
        self.namespace = namespace
        self.root = root
        self.registry = registry
        self.final = final
        self.directory = InstallDirectory(root)
        self.files = InstallFiles()
        self.text = ""
        self.base = ""
        self.base_annotation = ""
        self.extra: list[Document] = []
        self.spec: Document = {}
        self.pusher = PUSHER

    def push_base(self, tag: str = "1") -> str:
        """Push a small base image, and use it; return its digest."""
        client = make_client(self.registry)
        digest = push_image(client, "os/base", tag).digest
        client.close()
        self.base = f"{self.registry.host}/os/base@{digest}"
        return digest

    def write(self) -> None:
        """Write the manifests."""
        ca = base64.b64encode(self.registry.ca_file.read_bytes()).decode()
        controller = {
            "apiVersion": GROUP,
            "kind": "ControllerConfig",
            "metadata": {"name": "machine-config-controller"},
            "spec": {
                "osImageURL": self.base,
                "imageRegistryBundleUserData": [
                    {"file": self.registry.host.replace(":", ".."), "data": ca}
                ],
            },
        }
        files = [{"containerfileArch": "NoArch", "content": self.text}] if self.text else []
        notes = {"treenail.io/base-image": self.base_annotation} if self.base_annotation else {}
        image_config = {
            "apiVersion": GROUP,
            "kind": "MachineOSConfig",
            "metadata": {"name": "master", "annotations": notes},
            "spec": {
                "machineConfigPool": {"name": "master"},
                "imageBuilder": {"imageBuilderType": "Job"},
                "baseImagePullSecret": {"name": "pull"},
                "renderedImagePushSecret": {"name": "push"},
                "renderedImagePushSpec": f"{self.final}/os/node:latest",
                **({"containerFile": files} if files else {}),
                **self.spec,
            },
        }
        motd = {"path": "/etc/motd", "contents": {"source": "data:,x"}, "mode": 0o644}
        config = {"ignition": {"version": "3.5.0"}, "storage": {"files": [motd]}}
        push = self.registry.make_auth_json(self.pusher, host=self.final)
        write_manifest(
            self.directory.manifests,
            "99-image-mode.yaml",
            make_pool("master"),
            make_pool("worker"),
            make_config("00-master", "master", config=config, osImageURL=self.base),
            make_config("00-worker", "worker", osImageURL=self.base),
            controller,
            image_config,
            make_secret("pull", self.registry.make_auth_json(PULLER), self.namespace),
            make_secret("push", push, self.namespace),
            *self.extra,
        )

    def read_inputs(self) -> PoolImageInputs:
        manifests = read_install_manifests(self.root)
        pools = render_install_pools(manifests)
        return make_build_inputs(manifests, pools, "master", namespace=self.namespace)

    def make_builder(
        self, registry: PushRegistry | None, *, clock: Clock = CLOCK, **settings: object
    ) -> PoolImageBuilder:
        return PoolImageBuilder(
            self.directory,
            registry,
            PoolBuildSettings(**settings),  # type: ignore[arg-type]
            clock,
            self.files,
        )

    def build(
        self, registry: PushRegistry | None, context: RecordingContext | None = None
    ) -> BuiltPoolImage:
        builder = self.make_builder(registry)
        return builder.build_pool_image(self.read_inputs(), context or RecordingContext())

    def read_report(self, attempt: int = 1) -> Document:
        path = self.directory.get_build_logs("master", attempt) / "report.json"
        return json.loads(path.read_text())

    def read_object(self) -> Document:
        """Return the MachineOSBuild."""
        path = self.directory.cluster_objects / "machineosbuild-master.json"
        return json.loads(path.read_text())
