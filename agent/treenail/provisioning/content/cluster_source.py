"""Inputs of served configs from a cluster, by informers.

Contents of MachineConfigs are in memory where a pool uses them, else read on request. `WorkerWait`
reads whether the installation lets workers wait for their image.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from treenail import clocks, errors, memory
from treenail.api import annotations as key
from treenail.api import component_names, decode, machineconfigpool, machineosbuild, machineosconfig
from treenail.controllers.handover import image_mode
from treenail.controllers.pools import pool_views
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.kube import api_client, resources, watch
from treenail.provisioning.content import source

log = logging.getLogger(__name__)


_SETTLE_S = 30.0
"""Time for which the watch of MachineConfigs may be behind that of the pools."""


class ClusterSource:
    """A `PoolSource` that reads a cluster and never writes.

    While the API server does not answer, it continues with the last known objects.
    """

    def __init__(
        self,
        informers: InformerSet,
        settings: source.SourceSettings,
        client: api_client.Client,
        clock: clocks.Clock | None = None,
    ) -> None:
        """Add the views; the caller starts the informers.

        ``client`` reads a MachineConfig again that a pool returns to.
        """
        self._clock = clock or clocks.SystemClock()
        self._missing: dict[str, tuple[str, float]] = {}
        """Which rendered config is missing, and since when, by the name of the pool."""
        self._lock = threading.Lock()
        self._images: Counter[str] = Counter()
        """Number of Nodes that report an image, by its digest."""
        self._informers = informers
        self._settings = settings
        self._pools = informers.add_view(
            watch.WatchScope(resources.MACHINECONFIGPOOLS), source.ServedPool.from_json
        )
        self._contents = ConfigContents(
            lambda name: client.get(resources.MACHINECONFIGS, name), self._list_named_configs
        )
        self._pools.add_list_handler(self._contents.begin_dropping)
        self._configs = informers.add_view(
            watch.WatchScope(resources.MACHINECONFIGS), self._contents.pack_config
        )
        self._configs.add_handler(self._handle_config)
        self._controller_configs = informers.add_view(
            watch.WatchScope(resources.CONTROLLERCONFIGS),
            source.ObservedControllerConfig.from_json,
            optional=True,
        )
        self._image_configs, self._image_builds = pool_views.add_build_views(informers)

        nodes = informers.add_view(watch.WatchScope(resources.NODES), read_current_images)
        nodes.add_handler(self._count_images)

    def read_inputs(self, pool: str) -> source.ServedInputs:
        """Read the inputs; raise `PoolMissingError`, `SourceError` or `SourceUnreadyError`.

        The watches of pools and of MachineConfigs are independent: a pool may name a rendered
        config that this source sees a moment later.
        """
        if reason := self.describe_unready():
            raise source.SourceUnreadyError(f"cannot read the cluster yet: {reason}")
        try:
            inputs = source.read_pool_inputs(self, pool, self._settings)
        except source.RenderedConfigMissingError as error:
            what, now = str(error), self._clock.monotonic()
            known, since = self._missing.get(pool, ("", now))
            since = since if known == what else now
            self._missing[pool] = what, since
            if now < since + _SETTLE_S:
                raise source.SourceUnreadyError(
                    f"{error}; it may be created at this moment"
                ) from error
            raise
        self._missing.pop(pool, None)
        return inputs

    def has_pool(self, name: str) -> bool:
        """Return whether a pool of this name is known."""
        return self._pools.find(name) is not None

    def get_pools(self) -> Iterable[machineconfigpool.MachineConfigPool]:
        """Return all pools that can be read."""
        pools = self._pools.get_all().values()
        return [served.pool for served in pools if served.pool is not None]

    def describe_unready(self) -> str:
        """Name the kinds that are not listed yet; empty when all are."""
        return self._informers.unsynced_reason

    def describe_staleness(self) -> str:
        """Say why the inputs may be outdated, and for how long; empty when they are current."""
        reason = self._informers.summarize_problem()
        if not reason:
            return ""
        silence_s = self._informers.measure_silence_s(resources.MACHINECONFIGPOOLS.plural)
        return f"{reason}; pools are {silence_s:.0f} s old"

    def find_pool(self, name: str) -> source.ServedPool | None:
        """Return the pool of this name."""
        return self._pools.find(name)

    def find_config(self, name: str) -> source.PackedConfig | None:
        """Return the MachineConfig of this name, without its contents."""
        return self._configs.find(name)

    def load_config(self, config: source.PackedConfig) -> source.PackedConfig:
        """Return a config with its contents; raise `ClusterError` or `SourceUnreadyError`."""
        return self._contents.load_config(config)

    def get_controller_configs(self) -> Mapping[str, source.ObservedControllerConfig]:
        """Return all ControllerConfigs by name."""
        return self._controller_configs.get_all()

    def get_image_configs(self) -> Iterable[machineosconfig.MachineOSConfig]:
        """Return all MachineOSConfigs."""
        return self._image_configs.get_all().values()

    def _handle_config(
        self, name: str, _before: source.PackedConfig | None, after: source.PackedConfig | None
    ) -> None:
        if after is None:
            self._contents.forget_config(name)

    def _list_named_configs(self) -> Collection[str]:
        return {
            configuration.name
            for pool in self.get_pools()
            for configuration in (pool.configuration, pool.status_configuration)
        }

    def get_image_builds(self) -> Iterable[machineosbuild.MachineOSBuild]:
        """Return all MachineOSBuilds."""
        return self._image_builds.get_all().values()

    def is_image_running(self, image: str) -> bool:
        """Return whether a Node reports the image as its current one."""
        return self._images[image.rpartition("@")[2]] > 0

    def _count_images(
        self, _: str, before: frozenset[str] | None, after: frozenset[str] | None
    ) -> None:
        with self._lock:
            self._images.subtract(before or ())
            self._images.update(after or ())
            self._images = +self._images


def read_current_images(document: decode.Json) -> frozenset[str]:
    """Return the digests of the images that a Node reports; raise `ConfigError`."""
    metadata = decode.Fields.from_json(document, "Node").get_object("metadata")
    annotations = metadata.get_text_map("annotations")
    return frozenset(
        image.rpartition("@")[2]
        for name in key.IMAGE_SPELLINGS.values()
        if (image := annotations.get(name))
    )


_CHECK_S = 30.0


class WorkerWait:
    """Reads the settings of the installation every 30 s at most. Thread-safe."""

    def __init__(self, client: api_client.Client, clock: clocks.Clock) -> None:
        self._client = client
        self._clock = clock
        self._lock = threading.Lock()
        self._next_check = float("-inf")
        self._waits = False

    def has_waiting_workers(self) -> bool:
        """Return whether workers wait; the last known answer while the API server has none."""
        with self._lock:
            if self._clock.monotonic() >= self._next_check:
                try:
                    self._waits = self._read_mode() is image_mode.WorkerMode.WAIT
                except (errors.ClusterError, errors.ConfigError) as error:
                    log.warning("cannot read whether workers wait for their image: %s", error)
                self._next_check = self._clock.monotonic() + _CHECK_S
            return self._waits

    def _read_mode(self) -> image_mode.WorkerMode | None:
        try:
            document = self._client.get(
                resources.CONFIGMAPS, image_mode.CONFIGMAP, namespace=component_names.NAMESPACE
            )
        except (errors.NotFoundError, errors.ForbiddenError):
            # A cluster without such an installation, or a role of an older version.
            return None
        # Imported late: it loads PyYAML, 2 MiB in the server of a cluster without the ConfigMap.
        from treenail.controllers.handover.image_mode_field import (  # noqa: PLC0415
            read_settings_configmap,
        )

        settings = read_settings_configmap(document, where=f"ConfigMap {image_mode.CONFIGMAP}")
        return settings.workers if settings.is_enabled else None


UNUSED_LIMIT = memory.MIB
"""Bytes of contents that no pool names. The newest are kept: a pool names a config later."""


class ConfigContents:
    """Keeps the contents of few MachineConfigs; clusters keep hundreds. Thread-safe.

    A pool that returns to an older config names one whose contents were dropped: `load_config`
    reads it again.
    """

    def __init__(
        self,
        fetch_config: Callable[[str], decode.Json],
        get_named: Callable[[], Collection[str]],
        *,
        unused_limit: int = UNUSED_LIMIT,
    ) -> None:
        """``fetch_config`` reads a MachineConfig from the API server; it may raise.

        ``get_named`` returns the names of the configs that pools name.
        """
        self._fetch_config = fetch_config
        self._get_named = get_named
        self._unused_limit = unused_limit
        self._lock = threading.Lock()
        self._contents: dict[str, source.PackedConfig] = {}
        self._is_dropping = False

    def pack_config(self, document: decode.Json) -> source.PackedConfig:
        """Keep the contents of a new or changed object; return the rest. Raises `ConfigError`."""
        packed = source.PackedConfig.from_json(document)
        self._keep_config(packed)
        return replace(packed, content=b"")

    def forget_config(self, name: str) -> None:
        """Drop the contents of a deleted object."""
        with self._lock:
            self._contents.pop(name, None)

    def begin_dropping(self) -> None:
        """Drop contents that no pool names, now that the pools are known."""
        self._is_dropping = True
        self._drop_unused()

    def load_config(self, config: source.PackedConfig) -> source.PackedConfig:
        """Return a config with its contents.

        Raises `ClusterError` when the API server does not return them, and `SourceUnreadyError`
        when they have changed.
        """
        with self._lock:
            loaded_config = self._contents.get(config.name)
        if loaded_config is None or loaded_config.version != config.version:
            loaded_config = source.PackedConfig.from_json(self._fetch_config(config.name))
            if loaded_config.version != config.version:
                raise source.SourceUnreadyError(f"MachineConfig {config.name} has just changed")
            self._keep_config(loaded_config)
        return loaded_config

    def _keep_config(self, packed: source.PackedConfig) -> None:
        with self._lock:
            self._contents.pop(packed.name, None)
            self._contents[packed.name] = packed
        if self._is_dropping:
            self._drop_unused()

    def _drop_unused(self) -> None:
        named = self._get_named()
        with self._lock:
            # The newest one stays whatever its size is.
            rest = self._unused_limit
            for name in reversed([*self._contents][:-1]):
                if name in named:
                    continue
                rest -= len(self._contents[name].content)
                if rest < 0:
                    del self._contents[name]
