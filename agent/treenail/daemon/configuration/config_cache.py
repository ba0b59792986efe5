"""Rendered configs, read by name and cached on disk for when the API server is unreachable."""

import json
import logging
from collections.abc import Iterable
from typing import Protocol

from treenail.api.machineconfig import MachineConfig
from treenail.codec import parse_json
from treenail.errors import ClusterError, ConfigError, FileError, NotFoundError
from treenail.host.filesystem.files import FileSpec, HostFiles

log = logging.getLogger(__name__)

DIRECTORY = "/var/lib/treenail/configs"
_SUFFIX = ".json"
_LIMIT = 64 * 1024 * 1024


class MachineConfigSource(Protocol):
    """A source of configs by name. It raises `ClusterError` and `ConfigError`."""

    def fetch_machine_config(self, name: str) -> MachineConfig: ...


class ConfigCache:
    """The current and the desired config of this node. They contain secrets: mode 0600.

    Names are names of API objects and therefore contain no slash.
    """

    def __init__(self, files: HostFiles, cluster: MachineConfigSource) -> None:
        self._files = files
        self._cluster = cluster

    def fetch_config(self, name: str) -> MachineConfig:
        """Fetch the config and cache it; return the cached one when the API server fails.

        Raises `ClusterError`, `ConfigError` and `FileError`.
        """
        try:
            config = self._cluster.fetch_machine_config(name)
        except NotFoundError:
            raise
        except ClusterError:
            cached = self.read_cached(name)
            if cached is None:
                raise
            return cached
        content = json.dumps(config.to_json()).encode()
        file = FileSpec(_cache_path(name), content, 0o600)
        if not self._files.has_file(file):
            self._files.make_directory(DIRECTORY, mode=0o700)
            self._files.write_files([file])
        return config

    def read_cached(self, name: str) -> MachineConfig | None:
        """Read the config from the cache; None when it is missing or damaged."""
        content = self._files.read_file(_cache_path(name), limit=_LIMIT)
        if content is None:
            return None
        try:
            return MachineConfig.from_json(parse_json(content))
        except (ValueError, ConfigError) as error:
            log.warning("cannot read the cached config %s: %s", name, error)
            return None

    def find_config(self, name: str) -> MachineConfig | None:
        """Return the config from the cache or the API server; None when it no longer exists.

        Also removes temporary files of an interrupted write. They may contain secrets, and the
        next write to this directory may come late.
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
        """Remove all other configs from the cache. A failure is logged and retried next time."""
        wanted = {f"{name}{_SUFFIX}" for name in names}
        try:
            for name in self._files.list_directory(DIRECTORY):
                if name not in wanted:
                    self._files.remove_file(f"{DIRECTORY}/{name}")
        except FileError as error:
            log.info("cannot remove an old config from the cache: %s", error)


def _cache_path(name: str) -> str:
    return f"{DIRECTORY}/{name}{_SUFFIX}"
