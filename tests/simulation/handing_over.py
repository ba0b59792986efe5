"""An installation in image mode whose image only the bootstrap host has.

The controller `install` adopts its objects, copies the image to the final registry, and asks the
nodes to drop the registry of the bootstrap host.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.controllers.handover.handover_site import HandoverSite
from tests.controllers.image_build.site import NAMESPACE as BUILDS_NAMESPACE
from tests.installer.pool_builds import InstallSite
from tests.registry.real_registry import PULLER, PUSHER
from tests.simulation.building import SimBuildSite
from tests.simulation.cluster import ClusterState, SimCluster
from tests.simulation.controllers import SimControllers
from tests.simulation.registries import SimRegistry, hold_registries
from tests.simulation.run import PODS, ClusterRun
from treenail.api import annotations as key
from treenail.api.component_names import NAMESPACE
from treenail.controllers.handover.handover_objects import (
    DONE,
    HANDOVER_SECRET,
    RESULT_CONFIGMAP,
    read_result_configmap,
)
from treenail.errors import NotFoundError
from treenail.kube.resources import MACHINEOSBUILDS, NAMESPACES, NODES
from treenail.registry.authorization import Login
from treenail_lab.apiserver.store import StoreEvent

Json = dict[str, Any]
MASTERS, LATE = ("m0", "m1"), "m2"
LATE_S = 30.0
BUILDS = (MACHINEOSBUILDS.group, MACHINEOSBUILDS.plural)


class BootstrapHostRegistry(SimRegistry):
    """The registry of the bootstrap host, as a build and the hand-over use it."""

    @property
    def address(self) -> str:
        return self.host

    @property
    def push_address(self) -> str:
        return self.host

    @property
    def push_login(self) -> Login:
        return Login(PUSHER, self.passwords[PUSHER])

    @property
    def pull_login(self) -> Login:
        return Login(PULLER, self.passwords[PULLER])

    @property
    def ca_pem(self) -> str:
        return self.ca_file.read_text()

    def find_problem(self) -> str:
        return ""

    def check_room(self, image_bytes: int) -> None:
        """There is room."""

    def sync_storage(self) -> None:
        """Nothing of it is lost."""


class HandoverCluster:
    """A control plane that runs the image of the bootstrap host."""

    def __init__(self, directory: Path) -> None:
        self.cluster = SimCluster(directory)
        self.final = SimRegistry(self.cluster, directory / "final", "registry.example")
        self.bootstrap = BootstrapHostRegistry(
            self.cluster, directory / "bootstrap", "bootstrap.example:5000"
        )
        self.cluster.install_kinds()
        build_site = SimBuildSite(self.cluster, self.final)
        build_site.client.create(NAMESPACES, {"metadata": {"name": BUILDS_NAMESPACE}})
        install = InstallSite(directory / "install", self.final, final=self.final.host)
        self.site = HandoverSite(build_site, install, self.bootstrap)  # type: ignore[arg-type]  # a part
        with hold_registries(self.final, self.bootstrap):
            build_site.prepare()
            install.push_base()
            self.site.build()
        for name in MASTERS:
            self.site.add_master(name)
        self.state = self.cluster.save()
        self.images = self.final.save()


class HandingOver(ClusterRun):
    """One run: the bootstrap host publishes its image, and waits for the result."""

    def __init__(self, shared: HandoverCluster) -> None:
        super().__init__(shared.cluster, shared.state)
        self.shared, self.site = shared, shared.site
        self.registries = (shared.final, shared.bootstrap)
        shared.final.load(shared.images)
        self.pods = [
            SimControllers(self.cluster, name, ("install",), build_namespace=BUILDS_NAMESPACE)
            for name in PODS
        ]
        self._began_at = 0.0
        self._dropped: set[str] = set()
        """Nodes whose agent no longer uses the bootstrap registry."""

    def begin_story(self) -> None:
        self._began_at = self.simulation.time
        self.story.start("bootstrap host", self._publish)
        self.story.start("agents", self._run_agents)

    def restore(self, state: ClusterState, *, skipped_versions: int = 0) -> None:
        """Restore etcd; the bootstrap host publishes again, and agents report again."""
        super().restore(state, skipped_versions=skipped_versions)

    def _publish(self) -> None:
        while True:
            if self.site.find_result() is None and not self.site.has_secret():
                self.site.publish()
            self.simulation.park(2.0)

    def _run_agents(self) -> None:
        while True:
            if self.simulation.time > self._began_at + LATE_S:
                with suppress(NotFoundError):
                    self._join_late()
            for name in (*MASTERS, LATE):
                with suppress(NotFoundError):
                    self._report_node(name)
            self.simulation.park(2.0)

    def _join_late(self) -> None:
        if self.cluster.api.store.find_object(("", "nodes"), ("", LATE)) is None:
            self.site.add_master(LATE)

    def _report_node(self, name: str) -> None:
        notes = self.site.notes(name)
        if notes.get(key.REMOVE_BOOTSTRAP_REGISTRY) == self.shared.bootstrap.host:
            self._dropped.add(name)
        if name in self._dropped and key.BOOTSTRAP_REGISTRY in notes:
            body: Json = {"metadata": {"annotations": {key.BOOTSTRAP_REGISTRY: None}}}
            self.site.client.patch(NODES, name, body)

    def check_event(self, storage: tuple[str, str], event: StoreEvent) -> None:
        name = event.object["metadata"]["name"]
        notes = event.object["metadata"].get("annotations") or {}
        if storage == ("", "nodes") and key.REMOVE_BOOTSTRAP_REGISTRY in notes:
            self._check_image(f"{name} must drop the bootstrap registry")
        elif storage == ("", "configmaps") and name == RESULT_CONFIGMAP:
            self._check_image("the result is written")
        elif storage == ("", "secrets") and name == HANDOVER_SECRET and event.type == "DELETED":
            self._check_image("the Secret of the hand-over is gone")

    def _check_image(self, what: str) -> None:
        if not self._has_image():
            self.note_problem(f"{what}, and the final registry does not have the image")

    def _has_image(self) -> bool:
        return self.shared.final.has_image(self._image)

    @property
    def _image(self) -> str:
        repository = self.site.image.push_spec.rpartition(":")[0]
        return f"{repository}@{self.site.image.digest}"

    def find_unsettled(self) -> Iterator[str]:
        find = self.cluster.api.store.find_object
        result = find(("", "configmaps"), (NAMESPACE, RESULT_CONFIGMAP))
        if result is None:
            yield "no result"
        elif read_result_configmap(result).digests != {"master": self.site.image.digest}:
            yield f"another result: {result}"
        if find(("", "secrets"), (NAMESPACE, HANDOVER_SECRET)) is not None:
            yield "the logins of the bootstrap registry are still in the cluster"
        if not self._has_image():
            yield "the final registry does not have the image"
        if self.site.find_condition()[:2] != ("True", DONE):
            yield f"the condition is {self.site.find_condition()}"
        for name in (*MASTERS, LATE):
            node = find(("", "nodes"), ("", name))
            if node is None or key.BOOTSTRAP_REGISTRY in node["metadata"].get("annotations", {}):
                yield f"{name} uses the bootstrap registry"
        builds = [each.get("status", {}).get("digestedImagePushSpec") for each in
                  self.cluster.objects(*BUILDS)]  # fmt: skip
        if builds != [self._image]:
            yield f"the builds have {builds}, not {self._image}"
