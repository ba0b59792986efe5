"""Inputs of served configs from a cluster, by informers."""

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from treenail.api import annotations as key
from treenail.api.decode import Fields, Json
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.clock import Clock, SystemClock
from treenail.controllers.runtime.informers import Informers
from treenail.kube.client import Client
from treenail.kube.resources import (
    CONTROLLERCONFIGS,
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    NODES,
)
from treenail.kube.watch import WatchScope
from treenail.provisioning.content.config_contents import ConfigContents
from treenail.provisioning.content.source import (
    ObservedControllerConfig,
    PackedConfig,
    RenderedConfigMissingError,
    ServedInputs,
    ServedPool,
    SourceSettings,
    SourceUnreadyError,
    read_pool_inputs,
)

_SETTLE_S = 30.0
"""Time for which the watch of MachineConfigs may be behind that of the pools."""


class ClusterSource:
    """A `PoolSource` that reads a cluster and never writes.

    While the API server does not answer, it continues with the last known objects.
    """

    def __init__(
        self,
        informers: Informers,
        settings: SourceSettings,
        client: Client,
        clock: Clock | None = None,
    ) -> None:
        """Add the views; the caller starts the informers.

        ``client`` reads a MachineConfig again that a pool returns to.
        """
        self._clock = clock or SystemClock()
        self._missing: dict[str, tuple[str, float]] = {}
        """Which rendered config is missing, and since when, by the name of the pool."""
        self._lock = threading.Lock()
        self._images: Counter[str] = Counter()
        """Number of Nodes that report an image, by its digest."""
        self._informers = informers
        self._settings = settings
        self._pools = informers.add_view(WatchScope(MACHINECONFIGPOOLS), ServedPool.from_json)
        self._contents = ConfigContents(
            lambda name: client.get(MACHINECONFIGS, name), self._list_named_configs
        )
        self._pools.add_list_handler(self._contents.begin_dropping)
        self._configs = informers.add_view(WatchScope(MACHINECONFIGS), self._contents.pack_config)
        self._configs.add_handler(self._handle_config)
        self._controller_configs = informers.add_view(
            WatchScope(CONTROLLERCONFIGS), ObservedControllerConfig.from_json, optional=True
        )
        self._image_configs = informers.add_view(
            WatchScope(MACHINEOSCONFIGS), MachineOSConfig.from_json, optional=True
        )
        self._image_builds = informers.add_view(
            WatchScope(MACHINEOSBUILDS), MachineOSBuild.from_json, optional=True
        )

        nodes = informers.add_view(WatchScope(NODES), read_current_images)
        nodes.add_handler(self._count_images)

    def read_inputs(self, pool: str) -> ServedInputs:
        """Read the inputs; raise `PoolMissingError`, `SourceError` or `SourceUnreadyError`.

        The watches of pools and of MachineConfigs are independent: a pool may name a rendered
        config that this source sees a moment later.
        """
        if reason := self.describe_unready():
            raise SourceUnreadyError(f"cannot read the cluster yet: {reason}")
        try:
            found = read_pool_inputs(self, pool, self._settings)
        except RenderedConfigMissingError as error:
            what, now = str(error), self._clock.monotonic()
            known, since = self._missing.get(pool, ("", now))
            since = since if known == what else now
            self._missing[pool] = what, since
            if now < since + _SETTLE_S:
                raise SourceUnreadyError(f"{error}; it may be created at this moment") from error
            raise
        self._missing.pop(pool, None)
        return found

    def has_pool(self, name: str) -> bool:
        """Return whether a pool of this name is known."""
        return self._pools.find(name) is not None

    def get_pools(self) -> Iterable[MachineConfigPool]:
        """Return all pools that can be read."""
        found = self._pools.get_all().values()
        return [each.pool for each in found if each.pool is not None]

    def describe_unready(self) -> str:
        """Name the kinds that are not listed yet; empty when all are."""
        return self._informers.unsynced_reason

    def describe_staleness(self) -> str:
        """Say why the inputs may be outdated, and for how long; empty when they are current."""
        reason = self._informers.summarize_problem()
        if not reason:
            return ""
        silence_s = self._informers.measure_silence_s(MACHINECONFIGPOOLS.plural)
        return f"{reason}; pools are {silence_s:.0f} s old"

    def find_pool(self, name: str) -> ServedPool | None:
        """Return the pool of this name."""
        return self._pools.find(name)

    def find_config(self, name: str) -> PackedConfig | None:
        """Return the MachineConfig of this name, without its contents."""
        return self._configs.find(name)

    def load_config(self, config: PackedConfig) -> PackedConfig:
        """Return a config with its contents; raise `ClusterError` or `SourceUnreadyError`."""
        return self._contents.load_config(config)

    def get_controller_configs(self) -> Mapping[str, ObservedControllerConfig]:
        """Return all ControllerConfigs by name."""
        return self._controller_configs.get_all()

    def get_image_configs(self) -> Iterable[MachineOSConfig]:
        """Return all MachineOSConfigs."""
        return self._image_configs.get_all().values()

    def _handle_config(
        self, name: str, _before: PackedConfig | None, after: PackedConfig | None
    ) -> None:
        if after is None:
            self._contents.forget_config(name)

    def _list_named_configs(self) -> Collection[str]:
        return {
            each.name
            for pool in self.get_pools()
            for each in (pool.configuration, pool.status_configuration)
        }

    def get_image_builds(self) -> Iterable[MachineOSBuild]:
        """Return all MachineOSBuilds."""
        return self._image_builds.get_all().values()

    def is_image_running(self, image: str) -> bool:
        """Return whether a Node reports the image as its current one."""
        return self._images[_find_digest(image)] > 0

    def _count_images(
        self, _: str, before: frozenset[str] | None, after: frozenset[str] | None
    ) -> None:
        with self._lock:
            self._images.subtract(before or ())
            self._images.update(after or ())
            self._images = +self._images


def read_current_images(document: Json) -> frozenset[str]:
    """Return the digests of the images that a Node reports; raise `ConfigError`."""
    metadata = Fields.from_json(document, "Node").get_object("metadata")
    annotations = metadata.get_text_map("annotations")
    return frozenset(
        _find_digest(image)
        for name in key.IMAGE_SPELLINGS.values()
        if (image := annotations.get(name))
    )


def _find_digest(image: str) -> str:
    """Return the digest of a pull spec; the pull spec itself if it has none."""
    return image.rpartition("@")[2]
