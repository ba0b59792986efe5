"""Between updates: the machine is kept as its current config says."""

import json
import logging
from collections.abc import Collection
from dataclasses import replace

from treenail.api.machineconfig import MachineConfig
from treenail.clock import Clock
from treenail.config import names
from treenail.config.drift import Drift
from treenail.config.wanted import WantedState, read_wanted_state
from treenail.daemon.configuration.config_cache import ConfigCache
from treenail.daemon.configuration.drift import BootedState, DriftCheck, DriftMonitor, ExpectedState
from treenail.daemon.configuration.machine import NodeConfiguration
from treenail.daemon.configuration.mcd_state import CURRENT_CONFIG
from treenail.daemon.configuration.path_watcher import PathWatcher
from treenail.errors import ClusterError, ConfigError
from treenail.host.filesystem.files import HostFiles
from treenail.log import MessageId
from treenail.update.drift.drift_policy import DriftAssessment, DriftPolicy
from treenail.update.drift.drift_repair import plan_repair
from treenail.update.impact.os_change import list_required_packages
from treenail.update.state.record import Target

log = logging.getLogger(__name__)

_LIMIT = 64 * 1024 * 1024


class NodeConfigs:
    """What the config of a target says about its machine, now that nothing changes."""

    def __init__(self, files: HostFiles, configs: ConfigCache) -> None:
        self._files = files
        self._configs = configs

    def load_wanted(self, current: Target) -> WantedState | None:
        """All of it; None when nobody knows it. Raises `FileError`, `ConfigError`.

        In image mode files and units are those of the config that is baked into the image, which
        says itself which one that is; an image that says nothing, or another one, has none.
        """
        try:
            config = self._configs.find_config(current.config)
        except ClusterError as error:
            log.info("can't read %s now, and look for no drift meanwhile: %s", current, error)
            return None
        if config is None:
            return None
        wish = read_wanted_state(config)
        if not current.image:
            return wish
        baked = self._read_baked_config(current.config)
        return replace(baked or WantedState(), users=wish.users, os=wish.os)

    def load_expected(self, current: Target) -> ExpectedState | None:
        """The same, to compare with; its contents are let go of."""
        wish = self.load_wanted(current)
        if wish is None:
            return None
        return ExpectedState.from_wanted(
            wish, frozenset() if current.image else list_required_packages(wish.os)
        )

    def _read_baked_config(self, name: str) -> WantedState | None:
        content = self._files.read_file(CURRENT_CONFIG, limit=_LIMIT)
        if content is None:
            return None
        try:
            config = MachineConfig.from_json(json.loads(content))
        except (ValueError, ConfigError) as error:
            log.warning("the config in this image, %s, can't be read: %s", CURRENT_CONFIG, error)
            return None
        return read_wanted_state(config) if config.name == name else None


class DriftRepairer:
    """Finds drift, and heals it. Raises `HostError` and `ConfigError`."""

    def __init__(
        self,
        node_configs: NodeConfigs,
        check: DriftCheck,
        watcher: PathWatcher,
        configuration: NodeConfiguration,
        files: HostFiles,
        clock: Clock,
        *,
        policy: DriftPolicy,
        full_check_s: float,
    ) -> None:
        self._node_configs = node_configs
        self._configuration = configuration
        self._files = files
        self._monitor = DriftMonitor(
            check,
            watcher,
            node_configs.load_expected,
            clock,
            policy=policy,
            full_check_s=full_check_s,
        )

    def find_drift(self, current: Target, booted: BootedState) -> DriftAssessment:
        """What drifted from the current config, as of now."""
        return self._monitor.find_drift(current, booted)

    def repair_drift(self, current: Target, drifts: Collection[Drift]) -> None:
        """Have these as the config says, all or none; an attempt counts, also when it fails."""
        wish = self._node_configs.load_wanted(current)
        self._monitor.record_repairs(drifts)
        if wish is None:
            return
        steps = plan_repair(self._configuration.plan_steps(wish, current.config).steps, drifts)
        self._configuration.apply_repair(steps)
        for drift in drifts:
            log.info("healed: %s", drift, extra={"message_id": MessageId.DRIFT_REPAIRED})

    def is_apply_forced(self) -> bool:
        """Whether somebody asks for the config to be applied whatever the machine is like."""
        return self._files.has_entry(names.FORCE_FILE)

    def remove_force_file(self) -> None:
        """Return once that is asked no more."""
        if self._files.remove_file(names.FORCE_FILE):
            log.info("the config is applied anew, because of %s", names.FORCE_FILE)
