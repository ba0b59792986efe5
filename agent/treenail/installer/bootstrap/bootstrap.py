"""The stage ``bootstrap``: render, build, serve, publish, and hand over, in this order.

The order of effects is fixed here. What each step does is in its own module, and everything that
touches the host, a registry or the cluster comes in as `BootstrapServices`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Protocol

from treenail.api import annotations as key
from treenail.api import controllerconfig
from treenail.api.decode import Json
from treenail.api.ignition_model import IgnitionFile
from treenail.clock import Clock
from treenail.controllers.handover.handover_objects import Handover
from treenail.controllers.render.render import CONTROLLER_CONFIG_KIND
from treenail.errors import HostError, TreenailError
from treenail.installer.bootstrap.bootstrap_source import (
    SERVED_POOLS,
    BootstrapSource,
    choose_controller_config,
    make_served_inputs,
)
from treenail.installer.inputs.install_directory import InstallDirectory
from treenail.installer.inputs.install_files import InstallFiles
from treenail.installer.inputs.install_manifests import InstallManifests, read_install_manifests
from treenail.installer.inputs.machine_count import find_machine_count, read_install_config
from treenail.installer.steps.cluster_steps import (
    ConnectCluster,
    FirstBootStep,
    HandoverStep,
    PublishStep,
)
from treenail.installer.steps.image_step import ImageStep, PoolImage, PoolImageProvider
from treenail.installer.steps.install_state import InstallState
from treenail.installer.steps.install_status import InstalledPool, InstallPhase, StatusPublisher
from treenail.installer.steps.node_step import NodesStep
from treenail.installer.steps.render_step import RenderedPool, RenderStep
from treenail.installer.steps.steps import InstallStepRunner, StepLimit

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BootstrapSettings:
    """Time limits, and what machines receive."""

    build_s: float = 3600.0
    push_s: float = 1800.0
    first_boot_s: float = 1800.0
    handover_s: float = 3600.0
    image_annotation: str = key.DESIRED_OS_IMAGE
    machines: int | None = None
    """Machines of the control plane; None for what the files of the installation say."""


class ImageStore(Protocol):
    """Provides images, and the registry that nodes pull them from; open while it is entered."""

    def find_provider(self, pool: RenderedPool) -> PoolImageProvider | None:
        """Return the provider of a pool's image; None for a pool with the stock system."""

    def list_node_files(self, images: Sequence[PoolImage]) -> tuple[IgnitionFile, ...]:
        """Return the files with which nodes pull these images; none for an external registry."""

    def make_handover(self, images: Sequence[PoolImage]) -> Handover:
        """Return what the cluster adopts; raise `TreenailError`."""

    def export_images(self) -> str:
        """Save the images as OCI directories; return their names. Raises `TreenailError`."""


class BootstrapServices(Protocol):
    """The host, the registry and the cluster, as the stage uses them."""

    def check_host(self, manifests: InstallManifests) -> None:
        """Raise `TreenailError` for what would end the installation later: space, clock."""

    def open_server(
        self, source: BootstrapSource, describe_status: Callable[[], Json]
    ) -> AbstractContextManager[object]:
        """Return the config server; it serves while it is entered. Raises `UsageError`."""

    def open_images(self, manifests: InstallManifests) -> AbstractContextManager[ImageStore]:
        """Return the images; entering starts the registry if a pool needs it."""

    def connect(self) -> ConnectCluster:
        """Return a function that connects to the cluster, which does not exist yet."""

    def describe_machines(self, registry: str) -> str:
        """Say which machines got config and image; ``registry`` is empty without one."""

    def notify_ready(self) -> None:
        """Report to the service manager that machines may send requests."""

    def notify_status(self, text: str) -> None:
        """Report to the service manager what the installation does."""

    def begin_log(self, install_id: str) -> None:
        """Add the ID of the installation to each line of the log from now on."""

    def wait_for_stop(self) -> None:
        """Wait until a signal requests the end."""


class BootstrapStage:
    """One process of the stage; the caller holds the lock of the directory."""

    def __init__(
        self,
        directory: InstallDirectory,
        settings: BootstrapSettings,
        services: BootstrapServices,
        files: InstallFiles,
        clock: Clock,
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._services = services
        self._files = files
        self._clock = clock
        self._rendered: tuple[RenderedPool, ...] = ()

    def run(self, *, should_stop: bool) -> None:
        """Install; then serve configs until a signal, unless ``should_stop``.

        Raises `TreenailError` when the installation failed; the status has the reason then.
        """
        try:
            state = InstallState(self._directory, self._files, self._clock)
        except TreenailError as error:
            # Programs that wait must not see the progress of an earlier process.
            self._make_publisher("").fail(error)
            raise
        self._services.begin_log(state.id)
        publisher = self._make_publisher(state.id)
        try:
            self._install(state, publisher, should_stop=should_stop)
        except TreenailError as error:
            publisher.fail(error)
            raise
        except Exception:
            text = "the program failed with an unexpected error, which its log has"
            publisher.fail(HostError(text, remedy="report the error, and run the command again"))
            raise
        finally:
            if publisher.status.phase is InstallPhase.RUNNING:
                publisher.stop()

    def _make_publisher(self, install_id: str) -> StatusPublisher:
        return StatusPublisher(
            self._directory, install_id, self._files, self._clock, self._services.notify_status
        )

    def _install(
        self, state: InstallState, publisher: StatusPublisher, *, should_stop: bool
    ) -> None:
        manifests = read_install_manifests(self._directory.root)
        self._services.check_host(manifests)
        machines = self._settings.machines
        if machines is None:
            machines = find_machine_count(manifests, read_install_config(self._directory))
        source = BootstrapSource(publisher.describe_progress)
        source.set_pools(manifests.pools.values())
        runner = InstallStepRunner(state, publisher, self._clock)
        with ExitStack() as stack:
            stack.enter_context(self._services.open_server(source, publisher.build_document))
            registry = stack.enter_context(ExitStack())
            store = registry.enter_context(self._services.open_images(manifests))
            self._services.notify_ready()
            runner.run_step(
                RenderStep(self._directory, manifests, self._files, self._take_rendered)
            )
            publisher.set_pools(
                {each.pool.name: InstalledPool(each.rendered.name) for each in self._rendered}
            )
            images = self._provide_images(runner, store)
            self._serve(source, manifests, images, store.list_node_files(images))
            publisher.set_pools(self._describe_pools(images))
            publisher.set_serving(is_serving=True)
            registry_address = self._hand_over(runner, store, images)
            self._release_nodes(runner, registry_address, machines)
            # The final registries have the images: late machines need no mirror.
            registry.close()
            self._serve(source, manifests, images, ())
            publisher.complete(is_serving=not should_stop)
            log.info("the installation is complete: the bootstrap host may be removed")
            if not should_stop:
                self._services.wait_for_stop()

    def _take_rendered(self, pools: tuple[RenderedPool, ...]) -> None:
        self._rendered = pools

    def _provide_images(self, runner: InstallStepRunner, store: ImageStore) -> list[PoolImage]:
        seconds = self._settings.build_s + self._settings.push_s
        limit = StepLimit(seconds, "--build-timeout and --push-timeout")
        images = []
        for each in self._rendered:
            if each.pool.name in SERVED_POOLS and (provider := store.find_provider(each)):
                step = ImageStep(each, provider, limit)
                runner.run_step(step)
                images.append(step.image)
        return images

    def _serve(
        self,
        source: BootstrapSource,
        manifests: InstallManifests,
        images: Sequence[PoolImage],
        appended: tuple[IgnitionFile, ...],
    ) -> None:
        names = [each.name for each in manifests.list_kind(CONTROLLER_CONFIG_KIND)]
        name = choose_controller_config(names, controllerconfig.NAME)
        found = manifests.find(CONTROLLER_CONFIG_KIND, name)
        image_of = {each.pool: each.image for each in images}
        source.serve(
            make_served_inputs(
                each,
                None if found is None else found.document,
                image_of.get(each.pool.name, ""),
                appended,
                image_annotation=self._settings.image_annotation,
            )
            for each in self._rendered
            if each.pool.name in SERVED_POOLS
        )

    def _describe_pools(self, images: Sequence[PoolImage]) -> Mapping[str, InstalledPool]:
        image_of = {each.pool: each.image for each in images}
        return {
            each.pool.name: InstalledPool(each.rendered.name, image_of.get(each.pool.name, ""))
            for each in self._rendered
        }

    def _hand_over(
        self, runner: InstallStepRunner, store: ImageStore, images: Sequence[PoolImage]
    ) -> str:
        """Hand the images over; return the bootstrap registry that nodes use, empty for none."""
        settings, connect = self._settings, self._services.connect()
        first_boot = StepLimit(settings.first_boot_s, "--first-boot-timeout")
        handover = StepLimit(settings.handover_s, "--handover-deadline")
        built = [each for each in images if each.push_spec]
        registry = store.make_handover(built).registry if built else ""
        runner.run_step(
            FirstBootStep(connect, first_boot, lambda: self._services.describe_machines(registry))
        )
        if not built:
            return ""
        runner.run_step(PublishStep(connect, lambda: store.make_handover(built), handover))
        runner.run_step(HandoverStep(connect, built, handover, store.export_images))
        return registry

    def _release_nodes(
        self, runner: InstallStepRunner, registry: str, machines: int | None
    ) -> None:
        limit = StepLimit(self._settings.handover_s, "--handover-deadline")
        runner.run_step(NodesStep(self._services.connect(), registry, machines, limit))
