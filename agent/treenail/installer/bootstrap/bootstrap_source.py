"""Inputs of served configs on the bootstrap host: nothing until the images of all pools exist."""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping

from treenail.api import annotations as key
from treenail.api.decode import Json
from treenail.api.ignition_model import IgnitionFile
from treenail.api.machineconfigpool import ARBITER, MASTER, MachineConfigPool
from treenail.installer.steps.render_step import RenderedPool, compute_digest
from treenail.provisioning.content.selection import SelectedImage
from treenail.provisioning.content.source import (
    ObservedControllerConfig,
    PackedConfig,
    PoolMissingError,
    ServedInputs,
    SourceError,
    SourceUnreadyError,
)

SERVED_POOLS = (MASTER, ARBITER)
"""Pools of the control plane, the only machines that reach the bootstrap host."""
_BUILD_RETRY_S = 10
_WORKER_RETRY_S = 30


class BootstrapSource:
    """A `PoolSource`, which each step extends. Thread-safe."""

    def __init__(self, describe_progress: Callable[[], str]) -> None:
        """``describe_progress`` says what the installation does now, in a few words."""
        self._describe_progress = describe_progress
        self._lock = threading.Lock()
        self._pools: Mapping[str, MachineConfigPool] | None = None
        self._inputs: Mapping[str, ServedInputs] | None = None

    def set_pools(self, pools: Iterable[MachineConfigPool]) -> None:
        """Set the pools of the manifests, and stop to serve those of earlier manifests."""
        with self._lock:
            self._pools = {each.name: each for each in pools}
            self._inputs = None

    def serve(self, inputs: Iterable[ServedInputs]) -> None:
        """Serve these pools from now on."""
        with self._lock:
            self._inputs = {each.pool.name: each for each in inputs}

    def read_inputs(self, pool: str) -> ServedInputs:
        """Return the inputs; raise `PoolMissingError` or `SourceUnreadyError`."""
        with self._lock:
            pools, inputs = self._pools, self._inputs
        if inputs is not None and (found := inputs.get(pool)) is not None:
            return found
        if pools is not None and pool not in pools:
            raise PoolMissingError(f"no MachineConfigPool has the name {pool}")
        if pool not in SERVED_POOLS:
            # Ignition tries again after 503, and gives up after 404 (Ignition's http.go).
            raise SourceUnreadyError(
                f"the bootstrap host serves pools {' and '.join(SERVED_POOLS)} only; the config "
                f"server of the cluster serves pool {pool} once the control plane runs",
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

    def get_pools(self) -> Iterable[MachineConfigPool]:
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
    rendered: RenderedPool,
    controller_config: Json | None,
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
    found = None if controller_config is None else _read_controller_config(controller_config)
    reason = "the installation built it" if image else "the installation builds no image"
    selected = SelectedImage(image, reason, image or config.os_image_url)
    files = [(each.path, each.contents.source) for each in appended]
    versions = (
        config.name,
        config.version,
        "" if found is None else found.version,
        image,
        image_annotation,
        compute_digest(files),
    )
    return ServedInputs(
        rendered.pool,
        config,
        None if found is None else found.contents,
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


def _read_controller_config(document: Json) -> ObservedControllerConfig:
    found = ObservedControllerConfig.from_json(document)
    if found.contents is None:
        raise SourceError(f"cannot read ControllerConfig {found.metadata.name}: {found.problem}")
    return found
