"""A pool whose OS image the cluster builds.

The controller `build` creates Jobs, adds the config to what their pods push, and prunes images.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.controllers.image_build.site import CONFIG, CONTAINERFILE, NAMESPACE, BuildSite, Kubelet
from tests.simulation.cluster import DirectTransport, SimCluster
from tests.simulation.controllers import SimControllers
from tests.simulation.registries import SimRegistry, hold_registries
from tests.simulation.run import PODS, ClusterRun
from treenail.errors import ClusterError
from treenail.kube.api_client import Client
from treenail.kube.resources import MACHINEOSBUILDS, MACHINEOSCONFIGS, NAMESPACES
from treenail_lab.apiserver.store import StoreEvent

Json = dict[str, Any]
POOL = "worker"
SECOND = "rendered-worker-1"
BUILD_S = 5.0
OWN_SECRETS = {"push", "global-pull-secret-copy"}
IMAGE_CONFIGS = (MACHINEOSCONFIGS.group, MACHINEOSCONFIGS.plural)
BUILDS = (MACHINEOSBUILDS.group, MACHINEOSBUILDS.plural)


class SimBuildSite(BuildSite):
    """A build site on a simulated cluster; a user's requests are never disturbed."""

    def __init__(self, cluster: SimCluster, registry: SimRegistry) -> None:
        self.namespace = NAMESPACE
        self.registry = registry
        self.client = Client(DirectTransport(cluster))


class BuildingCluster:
    """A pool with a rendered config, the base image, and no build."""

    def __init__(self, directory: Path) -> None:
        self.cluster = SimCluster(directory)
        self.registry = SimRegistry(self.cluster, directory / "registry", "registry.example")
        self.cluster.install_kinds()
        self.site = SimBuildSite(self.cluster, self.registry)
        self.site.client.create(NAMESPACES, {"metadata": {"name": NAMESPACE}})
        with hold_registries(self.registry):
            self.site.prepare()
        self.site.add_config(SECOND, "y")
        self.site.add_pool(POOL)
        self.state = self.cluster.save()
        self.images = self.registry.save()


class Building(ClusterRun):
    """One run: a user asks for images, and changes the config after the first one."""

    def __init__(self, shared: BuildingCluster) -> None:
        super().__init__(shared.cluster, shared.state)
        self.shared, self.site = shared, shared.site
        self.registries = (shared.registry,)
        shared.registry.load(shared.images)
        self.kubelet = Kubelet(shared.site)
        self.pods = [
            SimControllers(self.cluster, name, ("build",), build_namespace=NAMESPACE)
            for name in PODS
        ]

    def begin_story(self) -> None:
        self.story.start("user", self._use_images)
        self.story.start("kubelet", self._run_pods)

    def _use_images(self) -> None:
        """Do what a user does, again after a restore."""
        while True:
            if self._find_image_config() is None:
                self.site.add_image_config(POOL, CONTAINERFILE)
            elif self._read_image() and self._read_wanted() == CONFIG:
                self.site.set_config(POOL, SECOND)
            self.simulation.park(2.0)

    def _run_pods(self) -> None:
        while True:
            self.simulation.park(BUILD_S)
            for pod in self.kubelet.find_pods():
                # A restore may take the pod, or what its build reads.
                with suppress(ClusterError):
                    self.kubelet.succeed(pod)

    def check_event(self, storage: tuple[str, str], event: StoreEvent) -> None:
        if storage != IMAGE_CONFIGS or event.type == "DELETED" or self.is_restored:
            return
        image = event.object.get("status", {}).get("currentImagePullSpec", "")
        if image and not self.shared.registry.has_image(image):
            self.note_problem(f"the pool's image {image} is not in the registry")

    def find_unsettled(self) -> Iterator[str]:
        image = self._read_image()
        if self._read_wanted() != SECOND:
            yield f"the pool has {self._read_wanted()}"
        if not image or not self.shared.registry.has_image(image):
            yield f"the image {image or 'of no build'} is not in the registry"
        built = [each for each in self.cluster.objects(*BUILDS) if _read_config(each) == SECOND]
        digests = [each.get("status", {}).get("digestedImagePushSpec") for each in built]
        if digests != [image]:
            yield f"builds of {SECOND}: {digests}, and the image is {image}"
        for each in self.cluster.objects(*BUILDS):
            true = [found["type"] for found in _read_conditions(each) if found["status"] == "True"]
            if true != ["Succeeded"]:
                yield f"{each['metadata']['name']}: {true}"
        names = {each["metadata"]["name"] for each in self._list_own("secrets")} - OWN_SECRETS
        left = [*names, *(each["metadata"]["name"] for each in self._list_own("configmaps"))]
        left += [each["metadata"]["name"] for each in self.cluster.objects("batch", "jobs")]
        if left:
            yield f"left over: {left}"

    def _list_own(self, plural: str) -> list[Json]:
        found = self.cluster.objects("", plural)
        return [each for each in found if each["metadata"]["namespace"] == NAMESPACE]

    def _find_image_config(self) -> Json | None:
        return self.cluster.api.store.find_object(IMAGE_CONFIGS, ("", POOL))

    def _read_image(self) -> str:
        found = self._find_image_config() or {}
        return str(found.get("status", {}).get("currentImagePullSpec", ""))

    def _read_wanted(self) -> str:
        where = (MACHINEOSCONFIGS.group, "machineconfigpools")
        pool = self.cluster.api.store.find_object(where, ("", POOL)) or {}
        return str(pool["spec"]["configuration"]["name"])


def _read_config(build: Json) -> str:
    return str(build["spec"]["machineConfig"]["name"])


def _read_conditions(build: Json) -> list[Json]:
    return build.get("status", {}).get("conditions", [])
