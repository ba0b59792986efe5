"""Inputs of served configs from a cluster, by informers."""

from collections.abc import Iterable, Mapping

from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.controllers.ignition.source import (
    ObservedControllerConfig,
    PackedConfig,
    ServedInputs,
    ServedPool,
    SourceSettings,
    SourceUnreadyError,
    read_pool_inputs,
)
from treenail.controllers.runtime.informers import Informers
from treenail.kube.resources import (
    CONTROLLERCONFIGS,
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
)
from treenail.kube.watch import WatchScope


class ClusterSource:
    """A `treenail.controllers.ignition.source.PoolSource` that reads a cluster and never writes.

    While the API server does not answer, it continues with the last known objects.
    """

    def __init__(self, informers: Informers, settings: SourceSettings) -> None:
        """Add the views; the caller starts the informers."""
        self._informers = informers
        self._settings = settings
        self._pools = informers.add_view(WatchScope(MACHINECONFIGPOOLS), ServedPool.from_json)
        self._configs = informers.add_view(WatchScope(MACHINECONFIGS), PackedConfig.from_json)
        self._controller_configs = informers.add_view(
            WatchScope(CONTROLLERCONFIGS), ObservedControllerConfig.from_json, optional=True
        )
        self._image_configs = informers.add_view(
            WatchScope(MACHINEOSCONFIGS), MachineOSConfig.from_json, optional=True
        )
        self._image_builds = informers.add_view(
            WatchScope(MACHINEOSBUILDS), MachineOSBuild.from_json, optional=True
        )

    def read_inputs(self, pool: str) -> ServedInputs:
        """Read the inputs; raise `PoolMissingError`, `SourceError` or `SourceUnreadyError`."""
        if reason := self.describe_unready():
            raise SourceUnreadyError(f"cannot read the cluster yet: {reason}")
        return read_pool_inputs(self, pool, self._settings)

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
        """Return the MachineConfig of this name."""
        return self._configs.find(name)

    def get_controller_configs(self) -> Mapping[str, ObservedControllerConfig]:
        """Return all ControllerConfigs by name."""
        return self._controller_configs.get_all()

    def get_image_configs(self) -> Iterable[MachineOSConfig]:
        """Return all MachineOSConfigs."""
        return self._image_configs.get_all().values()

    def get_image_builds(self) -> Iterable[MachineOSBuild]:
        """Return all MachineOSBuilds."""
        return self._image_builds.get_all().values()
