"""The stage ``bootstrap``: render, build, serve, publish, and hand over, in this order.

The order of effects is fixed here. What each step does is in its own module, and everything that
touches the host, a registry or the cluster comes in as `HostServices`.

The config server gets its inputs from `BootstrapSource`: nothing until the images of all pools
exist.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import controllerconfig, decode, machineconfigpool
from treenail.api.ignition.model import IgnitionFile
from treenail.controllers.render.render import CONTROLLER_CONFIG_KIND
from treenail.installer import install_steps
from treenail.installer.bootstrap import cluster_steps, host_services, image_steps
from treenail.installer.directory import (
    install_config,
    install_files,
    install_manifests,
    install_state,
)
from treenail.provisioning.content.source import (
    ObservedControllerConfig,
    PackedConfig,
    PoolMissingError,
    SelectedImage,
    ServedInputs,
    SourceError,
    SourceUnreadyError,
)

log = logging.getLogger(__name__)

"""Pools of the control plane, the only machines that reach the bootstrap host."""
_BUILD_RETRY_S = 10
_WORKER_RETRY_S = 30


class BootstrapSource:
    """A `PoolSource`, which each step extends. Thread-safe."""

    def __init__(self, describe_progress: Callable[[], str]) -> None:
        """``describe_progress`` says what the installation does now, in a few words."""
        self._describe_progress = describe_progress
        self._lock = threading.Lock()
        self._pools: Mapping[str, machineconfigpool.MachineConfigPool] | None = None
        self._inputs: Mapping[str, ServedInputs] | None = None

    def set_pools(self, pools: Iterable[machineconfigpool.MachineConfigPool]) -> None:
        """Set the pools of the manifests, and stop to serve those of earlier manifests."""
        with self._lock:
            self._pools = {pool.name: pool for pool in pools}
            self._inputs = None

    def serve(self, inputs: Iterable[ServedInputs]) -> None:
        """Serve these pools from now on."""
        with self._lock:
            self._inputs = {served.pool.name: served for served in inputs}

    def read_inputs(self, pool: str) -> ServedInputs:
        """Return the inputs; raise `PoolMissingError` or `SourceUnreadyError`."""
        with self._lock:
            pools, inputs = self._pools, self._inputs
        if inputs is not None and (served := inputs.get(pool)) is not None:
            return served
        if pools is not None and pool not in pools:
            raise PoolMissingError(f"no MachineConfigPool has the name {pool}")
        if pool not in machineconfigpool.CONTROL_PLANE_POOLS:
            # Ignition tries again after 503, and gives up after 404 (Ignition's http.go).
            served_pools = " and ".join(machineconfigpool.CONTROL_PLANE_POOLS)
            raise SourceUnreadyError(
                f"the bootstrap host serves pools {served_pools} only; the config server "
                f"of the cluster serves pool {pool} once the control plane runs",
                retry_after_s=_WORKER_RETRY_S,
            )
        raise SourceUnreadyError(
            f"the config of pool {pool} is not ready: {self._describe_progress()}",
            retry_after_s=_BUILD_RETRY_S,
        )

    def has_pool(self, name: str) -> bool:
        """Return whether the manifests have a pool of this name."""
        with self._lock:
            return self._pools is not None and name in self._pools

    def get_pools(self) -> Iterable[machineconfigpool.MachineConfigPool]:
        """Return the pools of the manifests."""
        with self._lock:
            return tuple((self._pools or {}).values())

    def describe_staleness(self) -> str:
        """Return an empty text: the manifests of a running installation do not change."""
        return ""

    def describe_unready(self) -> str:
        """Say what must happen before configs are served; empty while they are."""
        with self._lock:
            return "" if self._inputs is not None else self._describe_progress()


def make_served_inputs(
    rendered: install_manifests.RenderedPool,
    controller_config: decode.Json | None,
    image: str,
    appended: tuple[IgnitionFile, ...] = (),
    *,
    image_annotation: str = key.DESIRED_OS_IMAGE,
) -> ServedInputs:
    """Build the inputs of a pool; ``image`` is empty for the stock system of the rendered config.

    The image is served without the cluster's condition that one node runs it: the first machines
    of a cluster have no node before them. Raises `SourceError`.
    """
    config = PackedConfig.from_json(rendered.rendered.config.to_json())
    observed = None if controller_config is None else _read_controller_config(controller_config)
    reason = "the installation built it" if image else "the installation builds no image"
    selected = SelectedImage(image, reason, image or config.os_image_url)
    files = [(file.path, file.contents.source) for file in appended]
    versions = (
        config.name,
        config.version,
        "" if observed is None else observed.version,
        image,
        image_annotation,
        install_state.compute_checksum(files),
    )
    return ServedInputs(
        rendered.pool,
        config,
        None if observed is None else observed.contents,
        selected,
        versions,
        image_annotation,
        appended,
    )


def choose_controller_config(names: Collection[str], preferred: str) -> str:
    """Return the name of the ControllerConfig that machines read; empty without one.

    Raises `SourceError` for several.
    """
    if preferred in names or not names:
        return preferred if names else ""
    if len(names) > 1:
        raise SourceError(
            f"expected one ControllerConfig, found {', '.join(sorted(names))}",
            remedy=f"give the right one the name {preferred}",
        )
    return next(iter(names))


def _read_controller_config(document: decode.Json) -> ObservedControllerConfig:
    observed = ObservedControllerConfig.from_json(document)
    if observed.contents is None:
        raise SourceError(
            f"cannot read ControllerConfig {observed.metadata.name}: {observed.problem}"
        )
    return observed


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


class BootstrapStage:
    """One process of the stage; the caller holds the lock of the directory."""

    def __init__(
        self,
        directory: install_files.InstallDirectory,
        settings: BootstrapSettings,
        services: host_services.HostServices,
        files: install_files.InstallFiles,
        clock: clocks.Clock,
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._services = services
        self._files = files
        self._clock = clock
        self._rendered: tuple[install_manifests.RenderedPool, ...] = ()

    def run(self, *, should_stop: bool) -> None:
        """Install; then serve configs until a signal, unless ``should_stop``.

        Raises `TreenailError` when the installation failed; the status has the reason then.
        """
        try:
            state = install_state.InstallState(self._directory, self._files, self._clock)
        except errors.TreenailError as error:
            # Programs that wait must not see the progress of an earlier process.
            self._make_publisher("").fail(error)
            raise
        self._services.begin_log(state.id)
        publisher = self._make_publisher(state.id)
        try:
            self._install_cluster(state, publisher, should_stop=should_stop)
        except errors.TreenailError as error:
            publisher.fail(error)
            raise
        except Exception:
            text = "the program failed with an unexpected error, which its log has"
            publisher.fail(
                errors.HostError(text, remedy="report the error, and run the command again")
            )
            raise
        finally:
            if publisher.status.phase is install_steps.InstallPhase.RUNNING:
                publisher.stop()

    def _make_publisher(self, install_id: str) -> install_steps.StatusPublisher:
        return install_steps.StatusPublisher(
            self._directory, install_id, self._files, self._clock, self._services.notify_status
        )

    def _install_cluster(
        self,
        state: install_state.InstallState,
        publisher: install_steps.StatusPublisher,
        *,
        should_stop: bool,
    ) -> None:
        manifests = install_manifests.read_install_manifests(self._directory.root)
        self._services.check_host()
        machines = self._settings.machines
        if machines is None:
            machines = install_config.find_machine_count(
                manifests, install_files.read_config_content(self._directory)
            )
        source = BootstrapSource(publisher.describe_progress)
        source.set_pools(manifests.pools.values())
        runner = install_steps.InstallStepRunner(state, publisher, self._clock)
        with ExitStack() as stack:
            stack.enter_context(self._services.open_server(source, publisher.build_document))
            registry = stack.enter_context(ExitStack())
            store = registry.enter_context(self._services.open_images(manifests))
            self._services.notify_ready()
            runner.run_step(
                image_steps.RenderStep(self._directory, manifests, self._files, self._take_rendered)
            )
            publisher.set_pools(
                {
                    pool.pool.name: install_steps.InstalledPool(pool.rendered.name)
                    for pool in self._rendered
                }
            )
            images = self._provide_images(runner, store)
            self._serve_configs(source, manifests, images, store.list_node_files(images))
            publisher.set_pools(self._describe_pools(images))
            publisher.set_serving(is_serving=True)
            registry_address = self._hand_over_images(runner, store, images)
            self._release_nodes(runner, registry_address, machines)
            # The final registries have the images: late machines need no mirror.
            registry.close()
            self._serve_configs(source, manifests, images, ())
            publisher.complete(is_serving=not should_stop)
            log.info("the installation is complete: the bootstrap host may be removed")
            if not should_stop:
                self._services.wait_for_stop()

    def _take_rendered(self, pools: tuple[install_manifests.RenderedPool, ...]) -> None:
        self._rendered = pools

    def _provide_images(
        self, runner: install_steps.InstallStepRunner, store: image_steps.ImageStore
    ) -> list[image_steps.PoolImage]:
        seconds = self._settings.build_s + self._settings.push_s
        limit = install_steps.StepLimit(seconds, "--build-timeout and --push-timeout")
        images = []
        for pool in self._rendered:
            if pool.pool.name in machineconfigpool.CONTROL_PLANE_POOLS and (
                provider := store.find_provider(pool)
            ):
                step = image_steps.ImageStep(pool, provider, limit)
                runner.run_step(step)
                images.append(step.image)
        return images

    def _serve_configs(
        self,
        source: BootstrapSource,
        manifests: install_manifests.InstallManifests,
        images: Sequence[image_steps.PoolImage],
        appended: tuple[IgnitionFile, ...],
    ) -> None:
        names = [manifest.name for manifest in manifests.list_kind(CONTROLLER_CONFIG_KIND)]
        name = choose_controller_config(names, controllerconfig.NAME)
        controller_config = manifests.find(CONTROLLER_CONFIG_KIND, name)
        image_of = {image.pool: image.image for image in images}
        source.serve(
            make_served_inputs(
                pool,
                None if controller_config is None else controller_config.document,
                image_of.get(pool.pool.name, ""),
                appended,
                image_annotation=self._settings.image_annotation,
            )
            for pool in self._rendered
            if pool.pool.name in machineconfigpool.CONTROL_PLANE_POOLS
        )

    def _describe_pools(
        self, images: Sequence[image_steps.PoolImage]
    ) -> Mapping[str, install_steps.InstalledPool]:
        image_of = {image.pool: image.image for image in images}
        return {
            pool.pool.name: install_steps.InstalledPool(
                pool.rendered.name, image_of.get(pool.pool.name, "")
            )
            for pool in self._rendered
        }

    def _hand_over_images(
        self,
        runner: install_steps.InstallStepRunner,
        store: image_steps.ImageStore,
        images: Sequence[image_steps.PoolImage],
    ) -> str:
        """Hand the images over; return the bootstrap registry that nodes use, empty for none."""
        settings, connect = self._settings, self._services.connect()
        first_boot = install_steps.StepLimit(settings.first_boot_s, "--first-boot-timeout")
        handover = install_steps.StepLimit(settings.handover_s, "--handover-deadline")
        built = [image for image in images if image.push_spec]
        registry = store.make_handover(built).registry if built else ""
        runner.run_step(
            cluster_steps.FirstBootStep(
                connect, first_boot, lambda: self._services.describe_machines(registry)
            )
        )
        if not built:
            return ""
        runner.run_step(
            cluster_steps.PublishStep(connect, lambda: store.make_handover(built), handover)
        )
        runner.run_step(cluster_steps.HandoverStep(connect, built, handover, store.export_images))
        return registry

    def _release_nodes(
        self, runner: install_steps.InstallStepRunner, registry: str, machines: int | None
    ) -> None:
        limit = install_steps.StepLimit(self._settings.handover_s, "--handover-deadline")
        runner.run_step(
            cluster_steps.NodesStep(self._services.connect(), registry, machines, limit)
        )
