"""Rendered configs: asked for by name, and kept on disk for when nobody can be asked."""

import json
import logging
from collections.abc import Iterable
from typing import Protocol

from treenail.api.machineconfig import MachineConfig
from treenail.errors import ClusterError, ConfigError, FileError, NotFoundError
from treenail.host.filesystem.files import FileSpec, HostFiles

log = logging.getLogger(__name__)

DIRECTORY = "/var/lib/treenail/configs"
_SUFFIX = ".json"
_LIMIT = 64 * 1024 * 1024


class MachineConfigSource(Protocol):
    """Who knows the configs by name; raises `ClusterError` and `ConfigError`."""

    def fetch_machine_config(self, name: str) -> MachineConfig: ...


class ConfigCache:
    """The configs that this node has and is to have. They hold secrets: 0600.

    Names are those of API objects, which are no paths.
    """

    def __init__(self, files: HostFiles, cluster: MachineConfigSource) -> None:
        self._files = files
        self._cluster = cluster

    def fetch_config(self, name: str) -> MachineConfig:
        """The config as the cluster has it, kept from now on; the kept one if nobody answers.

        Raises `ClusterError`, `ConfigError` and `FileError`.
        """
        try:
            config = self._cluster.fetch_machine_config(name)
        except NotFoundError:
            raise
        except ClusterError:
            kept = self.read_cached(name)
            if kept is None:
                raise
            return kept
        content = json.dumps(config.to_json()).encode()
        file = FileSpec(_cache_path(name), content, 0o600)
        if not self._files.has_file(file):
            self._files.make_directory(DIRECTORY, mode=0o700)
            self._files.write_files([file])
        return config

    def read_cached(self, name: str) -> MachineConfig | None:
        """The config that is on disk; None without one. A damaged one is none."""
        content = self._files.read_file(_cache_path(name), limit=_LIMIT)
        if content is None:
            return None
        try:
            return MachineConfig.from_json(json.loads(content))
        except (ValueError, ConfigError) as error:
            log.warning("the kept copy of %s is damaged: %s", name, error)
            return None

    def find_config(self, name: str) -> MachineConfig | None:
        """The config, kept or asked for; None when there is none of this name any more.

        What writing another was cut short with is taken away: it may hold secrets, and nothing
        else may be written there for long.
        """
        if not name:
            return None
        if self._files.list_directory(DIRECTORY):
            self._files.remove_leftovers(DIRECTORY)
        try:
            return self.read_cached(name) or self.fetch_config(name)
        except NotFoundError:
            return None

    def prune_cache(self, names: Iterable[str]) -> None:
        """Have no others on disk; a failure is told, and made up for the next time."""
        wanted = {f"{name}{_SUFFIX}" for name in names}
        try:
            for name in self._files.list_directory(DIRECTORY):
                if name not in wanted:
                    self._files.remove_file(f"{DIRECTORY}/{name}")
        except FileError as error:
            log.info("an old config is left: %s", error)


def _cache_path(name: str) -> str:
    return f"{DIRECTORY}/{name}{_SUFFIX}"
