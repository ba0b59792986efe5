"""The steps before machines boot: ``render``, and ``build:POOL`` for each control-plane pool.

Pools are rendered under the names that the cluster's render controller will give. Files and
directories are those of the Machine Config Operator's bootstrap (bootstrap.go). One field differs:
``spec.configuration.source`` of a pool lists the MachineConfigs of this pool, as in a cluster. The
operator lists those of all pools, so that its first sync in the cluster rewrites the pool and
starts a second build of an equal image.

`StockImages` stands here, because an installation with it loads no module of builds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from treenail import __version__
from treenail.api import decode, documents, machineconfigpool
from treenail.api.ignition.model import IgnitionFile
from treenail.api.machineconfig import KIND as MACHINE_CONFIG_KIND
from treenail.controllers.handover.handover_objects import Handover
from treenail.controllers.render.render import CONTROLLER_CONFIG_KIND
from treenail.installer import install_steps
from treenail.installer.directory import install_files, install_manifests, install_state

_RENDERED_KINDS = (MACHINE_CONFIG_KIND, machineconfigpool.KIND, CONTROLLER_CONFIG_KIND)
_READABLE, _SECRET = 0o644, 0o600
"""MachineConfigs may contain passwords, and a ControllerConfig has a pull secret."""


def list_rendered_files(
    pools: tuple[install_manifests.RenderedPool, ...],
    manifests: install_manifests.InstallManifests,
    directory: install_files.InstallDirectory,
) -> dict[Path, tuple[bytes, int]]:
    """Return content and mode of all files in the order of writing: pools last. Pure."""
    files = {
        directory.machine_configs / f"{pool.rendered.name}.yaml": (
            _encode_document(pool.rendered.config.to_json()),
            _SECRET,
        )
        for pool in pools
    }
    for manifest in manifests.list_kind(CONTROLLER_CONFIG_KIND):
        path = directory.controller_config / f"{manifest.name}.yaml"
        files[path] = _encode_document(manifest.document), _SECRET
    for pool in pools:
        path = directory.machine_pools / f"{pool.pool.name}.yaml"
        files[path] = _encode_document(pool.document), _READABLE
    return files


class RenderStep:
    """A `treenail.installer.install_steps.Step`."""

    name = "render"
    title = "render the pools"
    limit = None

    def __init__(
        self,
        directory: install_files.InstallDirectory,
        manifests: install_manifests.InstallManifests,
        files: install_files.InstallFiles,
        use_pools: Callable[[tuple[install_manifests.RenderedPool, ...]], None],
    ) -> None:
        """``use_pools`` receives the pools, also those of an earlier process."""
        self._directory = directory
        self._manifests = manifests
        self._files = files
        self._use_pools = use_pools

    def compute_inputs(self) -> install_steps.StepInputs:
        """Compute the digest of each object that a rendered config depends on."""
        digests = {
            f"{manifest.title} in {manifest.file}": install_state.compute_checksum(
                manifest.document
            )
            for manifest in self._manifests.objects.values()
            if manifest.kind in _RENDERED_KINDS
        }
        return {**digests, "treenail": __version__}

    def resume(self, result: install_steps.StepResult) -> bool:
        """Render in memory; return whether the files of the earlier process are equal."""
        pools = install_manifests.render_install_pools(self._manifests)
        if _list_names(pools) != result:
            return False
        expected = list_rendered_files(pools, self._manifests, self._directory)
        if any(self._files.read(path) != content for path, (content, _) in expected.items()):
            return False
        self._use_pools(pools)
        return True

    def run(self, context: install_steps.StepContext) -> install_steps.StepResult:
        """Render, and write all files; remove those of earlier inputs."""
        pools = install_manifests.render_install_pools(self._manifests)
        expected = list_rendered_files(pools, self._manifests, self._directory)
        for path, (content, mode) in expected.items():
            self._files.write(path, content, mode=mode)
        for directory, prefix in (
            (self._directory.machine_pools, ""),
            (self._directory.machine_configs, "rendered-"),
        ):
            for name in self._files.list_names(directory):
                path = directory / name
                if name.startswith(prefix) and name.endswith(".yaml") and path not in expected:
                    self._files.remove(path)
        self._use_pools(pools)
        names = _list_names(pools)
        context.report(f"rendered {', '.join(names.values())}")
        return names


def _list_names(pools: tuple[install_manifests.RenderedPool, ...]) -> Mapping[str, str]:
    return {pool.pool.name: pool.rendered.name for pool in pools}


def _encode_document(document: decode.Json) -> bytes:
    return documents.dump_document(document).encode()


_FIELDS = ("image", "push_spec", "build_name")


@dataclass(frozen=True, slots=True)
class PoolImage:
    """The image of a pool."""

    pool: str
    image: str
    """Pull spec by digest, with the final name."""
    push_spec: str = ""
    """Final name with its tag; empty for an image that was built before the installation."""
    build_name: str = ""
    """Name of the MachineOSBuild; empty likewise."""

    @property
    def digest(self) -> str:
        """Digest of the manifest."""
        return self.image.rpartition("@")[2]


class PoolImageProvider(Protocol):
    """Provides the image of a pool: builds it, or finds one that exists."""

    def compute_inputs(self, pool: install_manifests.RenderedPool) -> install_steps.StepInputs:
        """Compute the digests of everything that the image depends on; raise `TreenailError`."""

    def has_image(self, image: PoolImage) -> bool:
        """Return whether the image of an earlier process can still be pulled."""

    def provide_image(
        self, pool: install_manifests.RenderedPool, context: install_steps.StepContext
    ) -> PoolImage:
        """Return the image; raise `TreenailError`. Finds what an earlier process has built."""


class ImageStore(Protocol):
    """Provides images, and the registry that nodes pull them from; open while it is entered."""

    def find_provider(self, pool: install_manifests.RenderedPool) -> PoolImageProvider | None:
        """Return the provider of a pool's image; None for a pool with the stock system."""

    def list_node_files(self, images: Sequence[PoolImage]) -> tuple[IgnitionFile, ...]:
        """Return the files with which nodes pull these images; none for an external registry."""

    def make_handover(self, images: Sequence[PoolImage]) -> Handover:
        """Return what the cluster adopts; raise `TreenailError`."""

    def export_images(self) -> str:
        """Save the images as OCI directories; return their names. Raises `TreenailError`."""


class ImageStep:
    """A `treenail.installer.install_steps.Step` for one pool."""

    def __init__(
        self,
        pool: install_manifests.RenderedPool,
        provider: PoolImageProvider,
        limit: install_steps.StepLimit | None,
    ) -> None:
        self._pool = pool
        self._provider = provider
        self._image: PoolImage | None = None
        self.name = f"build:{pool.pool.name}"
        self.title = f"provide the image of pool {pool.pool.name}"
        self.limit = limit

    @property
    def image(self) -> PoolImage:
        """The image of a step that is done."""
        if self._image is None:
            raise RuntimeError(f"step {self.name} is not done")
        return self._image

    def compute_inputs(self) -> install_steps.StepInputs:
        """Compute the digests of the rendered config and of the inputs of the image."""
        rendered = {f"rendered config of pool {self._pool.pool.name}": self._pool.rendered.name}
        return {**self._provider.compute_inputs(self._pool), **rendered}

    def resume(self, result: install_steps.StepResult) -> bool:
        """Take over the image of an earlier process if it still exists."""
        if set(result) != set(_FIELDS):
            return False
        image = PoolImage(self._pool.pool.name, *(result[name] for name in _FIELDS))
        if not self._provider.has_image(image):
            return False
        self._image = image
        return True

    def run(self, context: install_steps.StepContext) -> install_steps.StepResult:
        """Build or find the image."""
        self._image = image = self._provider.provide_image(self._pool, context)
        return {"image": image.image, "push_spec": image.push_spec, "build_name": image.build_name}


class StockImages:
    """A `treenail.installer.bootstrap.image_steps.ImageStore` without images."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Do nothing."""

    def find_provider(self, pool: install_manifests.RenderedPool) -> PoolImageProvider | None:  # noqa: ARG002  # interface
        """Return None."""
        return None

    def list_node_files(self, images: Sequence[PoolImage]) -> tuple[IgnitionFile, ...]:  # noqa: ARG002  # interface
        """Return no files."""
        return ()

    def make_handover(self, images: Sequence[PoolImage]) -> Handover:  # noqa: ARG002  # interface
        """Return an empty hand-over."""
        return Handover(())

    def export_images(self) -> str:
        """Return an empty text."""
        return ""
