"""Finds and repairs drift from the current config between updates."""

import logging
from collections.abc import Collection

from treenail.config import node_paths
from treenail.config.drift import Drift
from treenail.daemon.configuration.drift import BootedState, DriftCheck
from treenail.daemon.configuration.drift_monitor import DriftMonitor
from treenail.daemon.configuration.machine import NodeConfiguration
from treenail.daemon.configuration.node_configs import NodeConfigs
from treenail.daemon.configuration.path_watcher import PathWatcher
from treenail.host.machine import Machine
from treenail.log import MessageId
from treenail.update.drift.drift_policy import DriftAssessment, DriftPolicy
from treenail.update.drift.drift_repair import plan_repair
from treenail.update.state.record import Target

log = logging.getLogger(__name__)


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
        split = self._node_configs.load_split(current)
        self._monitor.record_repairs(drifts)
        if split is None:
            return
        planned = self._configuration.plan_steps(split.wanted, current.config, split.provided)
        steps = plan_repair(planned.steps, drifts)
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
