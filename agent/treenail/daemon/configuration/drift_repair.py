"""Between updates: the machine is kept as its current config says."""

import json
import logging
from collections.abc import Collection
from dataclasses import replace

from treenail.api.machineconfig import MachineConfig
from treenail.clock import Clock
from treenail.config import names
from treenail.config.drift import Drift
from treenail.config.wanted import Wanted, wanted
from treenail.daemon.configuration.config_cache import Configs
from treenail.daemon.configuration.drift import Asked, Booted, DriftCheck, DriftWatch
from treenail.daemon.configuration.machine import Configuration
from treenail.daemon.configuration.mcd_state import CURRENT_CONFIG
from treenail.daemon.configuration.path_watcher import Watcher
from treenail.errors import ClusterError, ConfigError
from treenail.host.filesystem.files import Files
from treenail.log import MessageId
from treenail.update.drift.drift_policy import Drifted, DriftPolicy
from treenail.update.drift.drift_repair import healing
from treenail.update.impact.os_change import required
from treenail.update.state.record import Target

log = logging.getLogger(__name__)

_LIMIT = 64 * 1024 * 1024


class Sayings:
    """What the config of a target says about its machine, now that nothing changes."""

    def __init__(self, files: Files, configs: Configs) -> None:
        self._files = files
        self._configs = configs

    def wish(self, current: Target) -> Wanted | None:
        """All of it; None when nobody knows it. Raises `FileError`, `ConfigError`.

        In image mode files and units are those of the config that is baked into the image, which
        says itself which one that is; an image that says nothing, or another one, has none.
        """
        try:
            config = self._configs.known(current.config)
        except ClusterError as error:
            log.info("can't read %s now, and look for no drift meanwhile: %s", current, error)
            return None
        if config is None:
            return None
        wish = wanted(config)
        if not current.image:
            return wish
        baked = self._baked(current.config)
        return replace(baked or Wanted(), users=wish.users, os=wish.os)

    def asked(self, current: Target) -> Asked | None:
        """The same, to compare with; its contents are let go of."""
        wish = self.wish(current)
        if wish is None:
            return None
        return Asked.of(wish, frozenset() if current.image else required(wish.os))

    def _baked(self, name: str) -> Wanted | None:
        content = self._files.read(CURRENT_CONFIG, limit=_LIMIT)
        if content is None:
            return None
        try:
            config = MachineConfig.from_json(json.loads(content))
        except (ValueError, ConfigError) as error:
            log.warning("the config in this image, %s, can't be read: %s", CURRENT_CONFIG, error)
            return None
        return wanted(config) if config.name == name else None


class Upkeep:
    """Finds drift, and heals it. Raises `HostError` and `ConfigError`."""

    def __init__(
        self,
        sayings: Sayings,
        check: DriftCheck,
        watcher: Watcher,
        configuration: Configuration,
        files: Files,
        clock: Clock,
        *,
        policy: DriftPolicy,
        full_every_s: float,
    ) -> None:
        self._sayings = sayings
        self._configuration = configuration
        self._files = files
        self._watch = DriftWatch(
            check, watcher, sayings.asked, clock, policy=policy, full_every_s=full_every_s
        )

    def look(self, current: Target, booted: Booted) -> Drifted:
        """What drifted from the current config, as of now."""
        return self._watch.look(current, booted)

    def heal(self, current: Target, drifts: Collection[Drift]) -> None:
        """Have these as the config says, all or none; an attempt counts, also when it fails."""
        wish = self._sayings.wish(current)
        self._watch.healed(drifts)
        if wish is None:
            return
        steps = healing(self._configuration.plan(wish, current.config).steps, drifts)
        self._configuration.put_right(steps)
        for drift in drifts:
            log.info("healed: %s", drift, extra={"message_id": MessageId.HEALED})

    def forced(self) -> bool:
        """Whether somebody asks for the config to be applied whatever the machine is like."""
        return self._files.is_there(names.FORCE_FILE)

    def obeyed(self) -> None:
        """Return once that is asked no more."""
        if self._files.remove(names.FORCE_FILE):
            log.info("the config is applied anew, because of %s", names.FORCE_FILE)
