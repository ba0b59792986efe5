"""Contents of MachineConfigs in a cluster: in memory where a pool uses them, else on request."""

import threading
from collections.abc import Callable, Collection
from dataclasses import replace

from treenail.api.decode import Json
from treenail.provisioning.content.source import PackedConfig, SourceUnreadyError

UNUSED_LIMIT = 1024 * 1024
"""Bytes of contents that no pool names. The newest are kept: a pool names a config later."""


class ConfigContents:
    """Keeps the contents of few MachineConfigs; clusters keep hundreds. Thread-safe.

    A pool that returns to an older config names one whose contents were dropped: `load_config`
    reads it again.
    """

    def __init__(
        self,
        fetch_config: Callable[[str], Json],
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
        self._contents: dict[str, PackedConfig] = {}
        self._is_dropping = False

    def pack_config(self, document: Json) -> PackedConfig:
        """Keep the contents of a new or changed object; return the rest. Raises `ConfigError`."""
        packed = PackedConfig.from_json(document)
        self._keep(packed)
        return replace(packed, content=b"")

    def forget_config(self, name: str) -> None:
        """Drop the contents of a deleted object."""
        with self._lock:
            self._contents.pop(name, None)

    def begin_dropping(self) -> None:
        """Drop contents that no pool names, now that the pools are known."""
        self._is_dropping = True
        self._drop_unused()

    def load_config(self, config: PackedConfig) -> PackedConfig:
        """Return a config with its contents.

        Raises `ClusterError` when the API server does not return them, and `SourceUnreadyError`
        when they have changed.
        """
        with self._lock:
            found = self._contents.get(config.name)
        if found is None or found.version != config.version:
            found = PackedConfig.from_json(self._fetch_config(config.name))
            if found.version != config.version:
                raise SourceUnreadyError(f"MachineConfig {config.name} has just changed")
            self._keep(found)
        return found

    def _keep(self, packed: PackedConfig) -> None:
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
