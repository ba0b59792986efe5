"""A cluster, a bootstrap host with an image, and the final registry, for the hand-over."""

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.builder.builds import push_base
from tests.controllers.clusters import Place
from tests.controllers.image_build.site import BuildSite, MortalTransport, open_site
from tests.fixtures.controllers import CLOCK, run_controllers
from tests.installer.adoption import create_rendered_pool
from tests.installer.pool_builds import InstallSite
from tests.installer.registries import make_registry
from tests.registry.real_registry import RegistryService
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.component_names import NAMESPACE
from treenail.api.decode import Json
from treenail.api.pullspec import parse_push_spec
from treenail.clocks import Clock
from treenail.controllers.handover.controller import InstallController
from treenail.controllers.handover.handover_objects import (
    HANDED_OVER,
    HANDOVER_SECRET,
    RESULT_CONFIGMAP,
    Handover,
    HandoverImage,
    HandoverResult,
    build_handover_secret,
    read_result_configmap,
)
from treenail.controllers.handover.image_mode import ImageMode
from treenail.controllers.handover.image_mode_field import build_settings_configmap
from treenail.controllers.handover.image_mover import ImageMover
from treenail.controllers.image_build.cluster_reader import ClusterReader
from treenail.controllers.runtime.controller_metrics import ControllerMetrics
from treenail.errors import AlreadyExistsError, NotFoundError
from treenail.installer.bootstrap.bootstrap_registry import BootstrapRegistry
from treenail.installer.directory.install_manifests import read_install_manifests
from treenail.installer.images.built_image import BuiltPoolImage
from treenail.kube.api_client import Client
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.resources import (
    CONFIGMAPS,
    CONTROLLERCONFIGS,
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    MACHINEOSCONFIGS,
    NAMESPACES,
    NODES,
    SECRETS,
    Resource,
    get_object,
)
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport


class HandoverSite:
    """An installed control plane whose image only the bootstrap host has."""

    def __init__(
        self,
        cluster: BuildSite,
        install: InstallSite,
        registry: BootstrapRegistry,
        *,
        namespace: str = NAMESPACE,
    ) -> None:
        self.namespace = namespace
        self.cluster = cluster
        self.install = install
        self.registry = registry
        self.image: BuiltPoolImage
        self.metrics = ControllerMetrics()

    @property
    def client(self) -> Client:
        return self.cluster.client

    def build(self) -> None:
        """Build the image, and create what the installer applies: pool, config and settings."""
        self.install.write()
        self.image = self.install.build(self.registry)
        create_rendered_pool(self.client, self.install)
        with suppress(AlreadyExistsError):
            self.client.create(NAMESPACES, {"metadata": {"name": self.namespace}})
        settings = build_settings_configmap(ImageMode())
        self._create_here(CONFIGMAPS, settings)

    def _create_here(self, resource: Resource, document: Json) -> None:
        metadata = {**get_object(document, "metadata"), "namespace": self.namespace}
        body = {**document, "metadata": metadata}
        self.client.create(resource, body, namespace=self.namespace)

    def add_master(self, name: str) -> None:
        """Create a Node whose agent uses the bootstrap registry, and that runs the image."""
        self.cluster.add_node(name, "amd64", pool="master")
        notes = {key.BOOTSTRAP_REGISTRY: self.registry.address}
        self.client.patch(NODES, name, {"metadata": {"annotations": notes}})

    def publish(self, *, has_registry: bool = True, address: str = "") -> None:
        """Publish the Secret as the bootstrap host does."""
        manifests = read_install_manifests(self.install.root)
        own = [*manifests.list_kind("MachineOSConfig"), *manifests.list_kind("Secret")]
        image = HandoverImage(
            "master", self.image.digest, parse_push_spec(self.image.push_spec, where="the test")
        )
        login = self.registry.pull_login
        handover = Handover(
            (image,),
            (address or self.registry.address) if has_registry else "",
            self.registry.ca_pem if has_registry else "",
            login.user if has_registry else "",
            login.password if has_registry else "",
            (*(each.document for each in own), self.install.read_object()),
        )
        self._create_here(SECRETS, build_handover_secret(handover))

    def find_condition(self) -> tuple[str, str, str]:
        try:
            return self.cluster.condition(HANDED_OVER, "master")
        except NotFoundError:
            return "", "", ""

    def wait_condition(self, reason: str) -> str:
        """Wait for the reason of the condition; return its message."""
        wait_until(lambda: self.find_condition()[1] == reason, limit_s=60.0)
        return self.find_condition()[2]

    def find_result(self) -> HandoverResult | None:
        try:
            found = self.client.get(CONFIGMAPS, RESULT_CONFIGMAP, namespace=self.namespace)
        except NotFoundError:
            return None
        return read_result_configmap(found)

    def wait_result(self) -> HandoverResult:
        found = wait_until(self.find_result, limit_s=60.0)
        assert isinstance(found, HandoverResult)
        return found

    def has_secret(self) -> bool:
        try:
            self.client.get(SECRETS, HANDOVER_SECRET, namespace=self.namespace)
        except NotFoundError:
            return False
        return True

    def notes(self, node: str) -> dict[str, str]:
        found: Any = self.client.get(NODES, node)
        return found["metadata"].get("annotations", {})

    def image_config(self) -> Json:
        return self.client.get(MACHINEOSCONFIGS, "master")

    @contextmanager
    def controller(
        self, *, clock: Clock = CLOCK, deadline_s: float = 3600.0, **wire: Any
    ) -> Iterator[MortalTransport]:
        """Run the install controller as the only leader; ``wire`` are fields of its transport."""
        http = HttpTransport(read_kubeconfig(str(self.cluster.kubeconfig)), CLOCK, max_kept=16)
        transport = MortalTransport(http, **wire)
        client = Client(transport)
        self.metrics = ControllerMetrics()
        controller = InstallController(
            client,
            clock,
            EventRecorder(client, "treenail-controller", "test", CLOCK),
            ImageMover(ClusterReader(client, CLOCK, namespace=self.cluster.namespace), CLOCK),
            deadline_s=deadline_s,
            metrics=self.metrics,
        )
        with closing(transport), run_controllers(client, controller, workers=1):
            yield transport


@contextmanager
def open_handover(
    directory: Path, final: RegistryService, *, text: str = ""
) -> Iterator[HandoverSite]:
    """Install a cluster, and build its image on a bootstrap host; a Containerfile needs buildah."""
    install = InstallSite(directory / "install", final, final=final.host)
    with open_site(directory, final) as cluster:
        if text:
            install.base, install.text = push_base(final, directory), text
        else:
            install.push_base()
        install.write()
        with make_registry(install.root) as registry:
            found = HandoverSite(cluster, install, registry)
            found.build()
            yield found


@contextmanager
def open_place(kubeconfig: Path, folder: Path, controllers: tuple[str, ...]) -> Iterator[Place]:
    """An installed cluster, the lab's or a real one, for the objects of an installation."""
    found = Place(kubeconfig, folder, controllers)
    try:
        found.install()
        yield found
    finally:
        for resource, name in (
            (MACHINEOSCONFIGS, "master"),
            (MACHINECONFIGPOOLS, "master"),
            (CONTROLLERCONFIGS, "machine-config-controller"),
            (NODES, f"{found.prefix}-m0"),
        ):
            with suppress(NotFoundError):
                found.client.delete(resource, name)
        for each in found.client.list(MACHINECONFIGS).items:
            with suppress(NotFoundError):
                found.client.delete(MACHINECONFIGS, str(each["metadata"]["name"]))
        found.remove()
