"""Finds and repairs drift from the current config between updates."""

import logging
from collections.abc import Callable, Collection

from treenail.config import node_paths
from treenail.config.drift import Drift
from treenail.config.image_content import ImageContent, ImageSplit, compare_with_image
from treenail.config.wanted import WantedState, read_wanted_state
from treenail.daemon.configuration.config_cache import ConfigCache
from treenail.daemon.configuration.drift import BootedState, DriftCheck, DriftMonitor, ExpectedState
from treenail.daemon.configuration.machine import NodeConfiguration
from treenail.daemon.configuration.path_watcher import PathWatcher
from treenail.errors import ClusterError
from treenail.host.machine import Machine
from treenail.log import MessageId
from treenail.update.drift.drift_policy import DriftAssessment, DriftPolicy
from treenail.update.drift.drift_repair import plan_repair
from treenail.update.impact.os_change import list_required_packages
from treenail.update.state.record import Target

log = logging.getLogger(__name__)


class NodeConfigs:
    """The state that the current target's config wants of this machine."""

    def __init__(
        self, configs: ConfigCache, read_image: Callable[[WantedState], ImageContent]
    ) -> None:
        """``read_image`` returns the content of the booted image, for image mode."""
        self._configs = configs
        self._read_image = read_image

    def load_split(self, current: Target) -> ImageSplit | None:
        """Load the wanted state; None when the config is unavailable.

        In image mode too, the machine is compared with the whole config. Raises `HostError` and
        `ConfigError`.
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
            return ImageSplit(wanted)
        return compare_with_image(wanted, self._read_image(wanted))

    def load_expected(self, current: Target) -> ExpectedState | None:
        """Load the wanted state as digests, without the contents of files."""
        split = self.load_split(current)
        if split is None:
            return None
        os, image = split.wanted.os, current.image or split.wanted.os.image
        return ExpectedState.from_wanted(
            split.wanted,
            frozenset() if current.image else list_required_packages(os),
            digest=image.partition("@")[2],
            image_gaps=frozenset(each.subject for each in split.missing),
        )


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
