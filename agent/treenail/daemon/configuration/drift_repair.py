"""Finds and repairs drift from the current config between updates."""

import json
import logging
from collections.abc import Collection
from dataclasses import replace

from treenail.api.machineconfig import MachineConfig
from treenail.config import node_paths
from treenail.config.drift import Drift
from treenail.config.wanted import WantedState, read_wanted_state
from treenail.daemon.configuration.config_cache import ConfigCache
from treenail.daemon.configuration.drift import BootedState, DriftCheck, DriftMonitor, ExpectedState
from treenail.daemon.configuration.machine import NodeConfiguration
from treenail.daemon.configuration.mcd_state import CURRENT_CONFIG
from treenail.daemon.configuration.path_watcher import PathWatcher
from treenail.errors import ClusterError, ConfigError
from treenail.host.filesystem.files import HostFiles
from treenail.host.machine import Machine
from treenail.log import MessageId
from treenail.update.drift.drift_policy import DriftAssessment, DriftPolicy
from treenail.update.drift.drift_repair import plan_repair
from treenail.update.impact.os_change import list_required_packages
from treenail.update.state.record import Target

log = logging.getLogger(__name__)

_LIMIT = 64 * 1024 * 1024


class NodeConfigs:
    """The state that the current target's config wants of this machine."""

    def __init__(self, files: HostFiles, configs: ConfigCache) -> None:
        self._files = files
        self._configs = configs

    def load_wanted(self, current: Target) -> WantedState | None:
        """Load the wanted state; None when the config is unavailable.

        In image mode files and units are those of the config in the image. The image names that
        config in its currentconfig file; an image without the file, or with another config, has no
        files to compare. Raises `FileError` and `ConfigError`.
        """
        try:
            config = self._configs.find_config(current.config)
        except ClusterError as error:
            log.info("cannot read %s, no drift check until then: %s", current, error)
            return None
        if config is None:
            return None
        wanted = read_wanted_state(config)
        if not current.image:
            return wanted
        baked = self._read_baked_config(current.config)
        return replace(baked or WantedState(), users=wanted.users, os=wanted.os)

    def load_expected(self, current: Target) -> ExpectedState | None:
        """Load the wanted state as digests, without the contents of files."""
        wanted = self.load_wanted(current)
        if wanted is None:
            return None
        return ExpectedState.from_wanted(
            wanted, frozenset() if current.image else list_required_packages(wanted.os)
        )

    def _read_baked_config(self, name: str) -> WantedState | None:
        content = self._files.read_file(CURRENT_CONFIG, limit=_LIMIT)
        if content is None:
            return None
        try:
            config = MachineConfig.from_json(json.loads(content))
        except (ValueError, ConfigError) as error:
            log.warning("cannot read %s, the config in this image: %s", CURRENT_CONFIG, error)
            return None
        return read_wanted_state(config) if config.name == name else None


class DriftRepairer:
    """Finds drift, and repairs it. Raises `HostError` and `ConfigError`."""

    def __init__(
        self,
        machine: Machine,
        node_configs: NodeConfigs,
        check: DriftCheck,
        watcher: PathWatcher,
        configuration: NodeConfiguration,
        *,
        policy: DriftPolicy,
        full_check_s: float,
    ) -> None:
        self._node_configs = node_configs
        self._configuration = configuration
        self._files = machine.files
        self._monitor = DriftMonitor(
            check,
            watcher,
            node_configs.load_expected,
            machine.clock,
            policy=policy,
            full_check_s=full_check_s,
        )

    def find_drift(self, current: Target, booted: BootedState) -> DriftAssessment:
        """Return what differs from the current config."""
        return self._monitor.find_drift(current, booted)

    def repair_drift(self, current: Target, drifts: Collection[Drift]) -> None:
        """Restore these as the config says, all or none; a failed attempt counts as well."""
        wanted = self._node_configs.load_wanted(current)
        self._monitor.record_repairs(drifts)
        if wanted is None:
            return
        steps = plan_repair(self._configuration.plan_steps(wanted, current.config).steps, drifts)
        self._configuration.apply_repair(steps)
        for drift in drifts:
            log.info("repaired drift: %s", drift, extra={"message_id": MessageId.DRIFT_REPAIRED})

    def is_apply_forced(self) -> bool:
        """Return whether the force file exists, which demands a full apply of the config."""
        return self._files.has_entry(node_paths.FORCE_FILE)

    def remove_force_file(self) -> None:
        """Remove the force file, if it exists."""
        if self._files.remove_file(node_paths.FORCE_FILE):
            log.info("applying the whole config again because %s exists", node_paths.FORCE_FILE)
