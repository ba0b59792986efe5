"""Find and repair drift from the current config between updates."""

import logging
from collections.abc import Collection, Iterable
from dataclasses import replace

from treenail.config import drift_comparison, node_paths
from treenail.daemon.configuration import config_cache, path_watcher
from treenail.daemon.configuration.drift import BootedState, DriftCheck, ExpectedState
from treenail.daemon.configuration.node_configuration import NodeConfiguration
from treenail.host.machine import Machine
from treenail.log import MessageId
from treenail.update.drift import drift_policy, drift_repair
from treenail.update.state.ledger_record import Target

log = logging.getLogger(__name__)


class DriftMonitor:
    """Tracks and repairs drift from the current config while no update is in progress.

    Raises `HostError` and `ConfigError`.
    """

    def __init__(
        self,
        machine: Machine,
        node_configs: config_cache.NodeConfigs,
        check: DriftCheck,
        watcher: path_watcher.PathWatcher,
        configuration: NodeConfiguration,
        *,
        policy: drift_policy.DriftPolicy,
        full_check_s: float,
    ) -> None:
        self._files = machine.files
        self._clock = machine.clock
        self._node_configs = node_configs
        self._check = check
        self._watcher = watcher
        self._configuration = configuration
        self._policy = policy
        self._full_check_s = full_check_s
        self._current = Target()
        self._expected: ExpectedState | None = None
        """None while the current config is unavailable."""
        self._found: dict[str, tuple[drift_comparison.Drift, ...]] = {}
        self._checked_at = float("-inf")
        self._needs_full_check = True
        """Nothing was checked yet, or a check failed: what it had to compare is unknown."""
        self._repairs: dict[str, tuple[float, ...]] = {}

    def find_drift(self, current: Target, booted: BootedState) -> drift_policy.DriftAssessment:
        """Compare the paths that changed, and from time to time everything; return all drift."""
        now = self._clock.monotonic()
        is_overdue = now - self._checked_at >= self._full_check_s
        is_new_config = current != self._current or (self._expected is None and is_overdue)
        if is_new_config:
            self._checked_at, self._needs_full_check = now, True
            expected = self._node_configs.load_expected(current)
            self._current, self._expected, self._found = current, expected, {}
            self._update_watch()
        if self._expected is None:
            return drift_policy.DriftAssessment(is_checked=False)
        touched = self._watcher.take_touched()
        if self._needs_full_check or touched.is_incomplete or is_overdue:
            self._needs_full_check = True
            self._found = self._check.check_everything(self._expected, booted)
            self._checked_at, self._needs_full_check = now, False
        elif touched.paths:
            self._needs_full_check = True
            self._check_touched(self._expected, touched)
            self._needs_full_check = False
        all_drift = (drift for drifts in self._found.values() for drift in drifts)
        assessed = drift_policy.assess_drift(all_drift, self._policy, self._repairs, now)
        return replace(assessed, image_gaps=self._expected.image_gaps)

    def repair_drift(self, current: Target, drifts: Collection[drift_comparison.Drift]) -> None:
        """Restore these as the config says, all or none; a failed attempt counts as well."""
        split = self._node_configs.load_split(current)
        self._record_repairs(drifts)
        if split is None:
            return
        planned = self._configuration.plan_steps(split.wanted, current.config, split.provided)
        steps = drift_repair.plan_repair(planned.steps, drifts)
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

    def _record_repairs(self, drifts: Iterable[drift_comparison.Drift]) -> None:
        """Record that these were repaired, or that the repair was attempted."""
        now = self._clock.monotonic()
        for subject in {drift.subject for drift in drifts}:
            earlier = self._repairs.get(subject, ())
            self._repairs[subject] = (*earlier, now)[-self._policy.repairs_per_hour - 1 :]
            self._found.pop(subject, None)

    def _check_touched(
        self, expected_state: ExpectedState, touched: path_watcher.TouchedPaths
    ) -> None:
        results = self._check.check_touched(expected_state, touched.paths)
        if any(path.startswith(f"{node_paths.UNIT_DIRECTORY}/") for path in touched.paths):
            # A removed unknown drop-in yields no result: forget it by its directory.
            self._found = {
                subject: drifts
                for subject, drifts in self._found.items()
                if subject in expected_state.entries
                or not subject.startswith(f"{node_paths.UNIT_DIRECTORY}/")
            }
        self._found |= results
        self._found = {subject: drifts for subject, drifts in self._found.items() if drifts}

    def _update_watch(self) -> None:
        if self._expected is None:
            self._watcher.watch_paths((), directories=())
            return
        units = (
            (node_paths.UNIT_DIRECTORY, *self._check.find_link_directories())
            if self._expected.units.units
            else ()
        )
        self._watcher.watch_paths(
            self._expected.entries, directories=(*self._expected.dropin_directories, *units)
        )
