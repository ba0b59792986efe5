"""Images of an installation: builds on this host, the registry with them, and their hand-over."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Self

from treenail import clocks, errors
from treenail.api import component_names, decode, machineconfigpool, machineosconfig, pullspec
from treenail.api.ignition.model import IgnitionFile
from treenail.config.bootstrap_registry import list_node_files
from treenail.controllers.handover import handover_objects, image_mode
from treenail.installer import install_steps
from treenail.installer.bootstrap import bootstrap_registry, image_steps
from treenail.installer.directory import (
    install_files,
    install_manifests,
    install_state,
    manifest_checks,
)
from treenail.installer.images import build_attempt, built_image, pool_image
from treenail.kube.resources import SECRETS


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """Options of the registry and of builds."""

    registry: bootstrap_registry.BootstrapRegistrySettings
    build: build_attempt.PoolBuildSettings = field(default_factory=build_attempt.PoolBuildSettings)


class InstallImages:
    """A `treenail.installer.bootstrap.image_steps.ImageStore` while entered."""

    def __init__(
        self,
        directory: install_files.InstallDirectory,
        manifests: install_manifests.InstallManifests,
        settings: ImageSettings,
        files: install_files.InstallFiles,
        clock: clocks.Clock,
    ) -> None:
        self._directory = directory
        self._manifests = manifests
        self._settings = settings
        self._files = files
        self._clock = clock
        self._stack = ExitStack()
        self._registry: bootstrap_registry.BootstrapRegistry | None = None

    def __enter__(self) -> Self:
        if self._needs_registry():
            registry = bootstrap_registry.BootstrapRegistry(
                self._directory, self._settings.registry, self._clock, files=self._files
            )
            self._registry = self._stack.enter_context(registry)
        return self

    def __exit__(self, *_: object) -> None:
        self._registry = None
        self._stack.close()

    def find_provider(
        self, pool: install_manifests.RenderedPool
    ) -> image_steps.PoolImageProvider | None:
        """Return the provider of a pool's image; None for a pool with the stock system."""
        config = self._find_config(pool.pool.name)
        if config is None:
            return None
        if config.pre_built_image:
            return PrebuiltImageProvider(config.pre_built_image)
        builder = pool_image.PoolImageBuilder(
            self._directory, self._registry, self._settings.build, self._clock, self._files
        )
        return BuiltImageProvider(builder, self._make_inputs)

    def list_node_files(self, images: Sequence[image_steps.PoolImage]) -> tuple[IgnitionFile, ...]:
        """Return the files with which nodes pull from the bootstrap registry."""
        built = [image for image in images if image.push_spec]
        if self._registry is None or not built:
            return ()
        record = handover_objects.make_node_record(self.make_handover(built))
        self._registry.record_address()
        return list_node_files(record, self._registry.ca_pem.encode())

    def make_handover(self, images: Sequence[image_steps.PoolImage]) -> handover_objects.Handover:
        """Return what the cluster adopts; raise `TreenailError`."""
        handover_images = tuple(
            handover_objects.HandoverImage(
                image.pool,
                image.digest,
                pullspec.parse_push_spec(image.push_spec, where=image.pool),
            )
            for image in images
        )
        objects = tuple(self._list_objects(images))
        registry = self._registry
        if registry is None:
            return handover_objects.Handover(handover_images, objects=objects)
        login = registry.pull_login
        return handover_objects.Handover(
            handover_images, registry.address, registry.ca_pem, login.user, login.password, objects
        )

    def export_images(self) -> str:
        """Write an OCI directory for each image of the registry; return their names for skopeo.

        Raises `TreenailError`.
        """
        names = []
        for pool in machineconfigpool.CONTROL_PLANE_POOLS:
            image = pool_image.read_built_image(self._directory, self._files, pool)
            if image is not None and self._registry is not None:
                target = self._directory.images / pool
                name = built_image.export_pool_image(image, self._registry.storage, target)
                names.append(f"oci:{target}:{name}")
        return ", ".join(names) or str(self._directory.images)

    def _needs_registry(self) -> bool:
        settings = self._manifests.settings
        is_external = settings is not None and settings.registry is image_mode.RegistryType.EXTERNAL
        return not is_external and any(
            (config := self._find_config(pool)) and not config.pre_built_image
            for pool in machineconfigpool.CONTROL_PLANE_POOLS
        )

    def _find_config(self, pool: str) -> machineosconfig.MachineOSConfig | None:
        """Return the MachineOSConfig of a pool; None without one, and without image mode."""
        if self._manifests.settings is not None and not self._manifests.settings.is_enabled:
            return None
        configs = self._manifests.image_configs.values()
        return next((config for config in configs if config.pool == pool), None)

    def _make_inputs(self, pool: install_manifests.RenderedPool) -> pool_image.PoolImageInputs:
        return pool_image.make_build_inputs(
            self._manifests, [pool], pool.pool.name, namespace=self._find_namespace(pool.pool.name)
        )

    def _find_namespace(self, pool: str) -> str:
        """Return the namespace of builds in the future cluster: that of their Secrets."""
        config = self._find_config(pool)
        secret = config and manifest_checks.find_namespaced(
            self._manifests, SECRETS.kind, config.push_secret
        )
        return (
            component_names.MCO_NAMESPACE
            if secret and secret.namespace == component_names.MCO_NAMESPACE
            else component_names.NAMESPACE
        )

    def _list_objects(self, images: Sequence[image_steps.PoolImage]) -> list[decode.Json]:
        """List the MachineOSConfigs, the Secrets that they name, and the finished builds."""
        objects = [
            manifest.document for manifest in self._manifests.list_kind(machineosconfig.KIND)
        ]
        names = {
            name
            for config in self._manifests.image_configs.values()
            for name in (config.push_secret, config.base_pull_secret)
        }
        objects += [
            manifest.document
            for manifest in self._manifests.list_kind(SECRETS.kind)
            if manifest.name in names
        ]
        for image in images:
            path = pool_image.get_object_path(self._directory, image.pool)
            content = self._files.read(path, limit=pool_image.OBJECT_LIMIT)
            if content is None:
                raise errors.FileError(f"cannot read {path}: the file does not exist")
            document = decode.load_json(content, where=str(path))
            if isinstance(document, dict):
                objects.append(document)
        return objects


class BuiltImageProvider:
    """A `treenail.installer.bootstrap.image_steps.PoolImageProvider` that builds."""

    def __init__(
        self,
        builder: pool_image.PoolImageBuilder,
        make_inputs: Callable[[install_manifests.RenderedPool], pool_image.PoolImageInputs],
    ) -> None:
        self._builder = builder
        self._make_inputs = make_inputs
        self._pools: dict[str, install_manifests.RenderedPool] = {}

    def compute_inputs(self, pool: install_manifests.RenderedPool) -> install_steps.StepInputs:
        """Compute the digests of the inputs; logins are none of them."""
        self._pools[pool.pool.name] = pool
        inputs = self._make_inputs(pool)
        wanted = self._builder.plan_image(inputs).wanted
        name = pool.pool.name
        return {
            f"MachineOSConfig {inputs.config.name}": install_state.compute_checksum(
                inputs.config.spec
            ),
            f"base image of pool {name}": wanted.base_image,
            f"content of the image of pool {name}": wanted.content_key,
            f"MachineOSBuild of pool {name}": wanted.name,
        }

    def has_image(self, image: image_steps.PoolImage) -> bool:
        """Return whether the registry still has the image."""
        pool = self._pools[image.pool]
        known = self._builder.find_image(self._make_inputs(pool))
        return known is not None and known.pull_spec == image.image

    def provide_image(
        self, pool: install_manifests.RenderedPool, context: install_steps.StepContext
    ) -> image_steps.PoolImage:
        """Build the image, or return the one of an earlier process."""
        built = self._builder.build_pool_image(self._make_inputs(pool), context)
        return image_steps.PoolImage(
            pool.pool.name, built.pull_spec, built.push_spec, built.build_name
        )


class PrebuiltImageProvider:
    """A `treenail.installer.bootstrap.image_steps.PoolImageProvider` of a known image."""

    def __init__(self, image: str) -> None:
        self._image = image

    def compute_inputs(self, pool: install_manifests.RenderedPool) -> install_steps.StepInputs:
        """Return the pull spec."""
        return {f"pre-built image of pool {pool.pool.name}": self._image}

    def has_image(self, image: image_steps.PoolImage) -> bool:
        """Return whether it is the image of the annotation."""
        return image.image == self._image

    def provide_image(
        self, pool: install_manifests.RenderedPool, context: install_steps.StepContext
    ) -> image_steps.PoolImage:
        """Return the image."""
        context.report(f"pool {pool.pool.name} has the pre-built image {self._image}")
        return image_steps.PoolImage(pool.pool.name, self._image)
