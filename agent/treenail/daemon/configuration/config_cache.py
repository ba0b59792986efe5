"""The configs of this node: read by name, cached on disk, parsed once for an update.

The cache serves while the API server is unreachable.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from treenail import errors
from treenail.api.machineconfig import MachineConfig
from treenail.config import image_content, node_paths, wanted_state
from treenail.daemon.configuration.drift import ExpectedState
from treenail.encoding import json_text
from treenail.host.filesystem import atomic_files
from treenail.update.state.ledger_record import Target

log = logging.getLogger(__name__)

DIRECTORY = "/var/lib/treenail/configs"
ONCE_CONFIG_PATH = "/var/lib/treenail/once.json"
"""The config of the last ``treenail once``, for a machine without an agent."""
_SUFFIX = ".json"
_LIMIT = 64 * 1024 * 1024
_PARSED_LIMIT = 2
"""An update has two configs, its origin and its target."""


class ConfigCache:
    """The current and the desired config of this node. They contain secrets: mode 0600.

    Names are names of API objects and therefore contain no slash. The last two configs also stay
    in memory, parsed, until `drop_parsed`.
    """

    def __init__(
        self,
        files: atomic_files.HostFiles,
        fetch: Callable[[str], MachineConfig],
        find_unnamed: Callable[[], MachineConfig | None] = lambda: None,
    ) -> None:
        """``fetch`` reads a config from the API server; raises `ClusterError` and `ConfigError`."""
        self._files = files
        self._fetch = fetch
        self._find_unnamed = find_unnamed
        self._parsed: dict[str, tuple[bytes, wanted_state.ParsedConfig]] = {}
        """By name, with the digest of the content; the last used is last."""

    def fetch_config(self, name: str) -> wanted_state.ParsedConfig:
        """Fetch the config and cache it; return the cached one when the API server fails.

        Raises `ClusterError`, `ConfigError` and `FileError`.
        """
        try:
            config = self._fetch(name)
        except errors.NotFoundError:
            raise
        except errors.ClusterError:
            cached = self.read_cached(name)
            if cached is None:
                raise
            return cached
        content = json.dumps(config.to_json()).encode()
        file = atomic_files.FileSpec(cache_path(name), content, 0o600)
        if not self._files.has_file(file):
            self._files.make_directory(DIRECTORY, mode=0o700)
            self._files.write_files([file])
        return self._find_parsed(name, content, config)

    def fetch_first_config(self, name: str) -> wanted_state.ParsedConfig:
        """Fetch the config of a machine that is new to its cluster.

        Raises as `fetch_config`, and `ConfigPendingError`: the first machines of a cluster may join
        before the config that they were served exists there.
        """
        try:
            return self.fetch_config(name)
        except errors.NotFoundError as error:
            if self._read_served_name() != name:
                raise
            raise errors.ConfigPendingError(
                f"waiting for MachineConfig {name}, which this machine was served: the cluster "
                "does not have it yet",
                remedy="the controller render creates it from the MachineConfigs; or apply it from "
                "machine-configs/ of the install directory with: kubectl apply -f FILE",
            ) from error

    def read_cached(self, name: str) -> wanted_state.ParsedConfig | None:
        """Read the config from the cache; None when it is missing or damaged."""
        content = self._files.read_file(cache_path(name), limit=_LIMIT)
        if content is None:
            return None
        try:
            return self._find_parsed(name, content)
        except (ValueError, errors.ConfigError) as error:
            log.warning("cannot read the cached config %s: %s", name, error)
            return None

    def find_config(self, name: str) -> wanted_state.ParsedConfig | None:
        """Return the config from the cache or the API server; None when it no longer exists.

        Also removes temporary files of an interrupted write. They may contain secrets, and the
        next write to this directory may come late.
        """
        if not name:  # the Node of a hosted machine names none until its first update
            unnamed = self._find_unnamed()
            return None if unnamed is None else wanted_state.ParsedConfig(unnamed)
        if self._files.list_directory(DIRECTORY):
            self._files.remove_leftovers(DIRECTORY)
        try:
            return self.read_cached(name) or self.fetch_config(name)
        except errors.NotFoundError:
            return None

    def _read_served_name(self) -> str:
        """Return the name of the config of the installation; empty without a readable one."""
        content = self._files.read_file(node_paths.SERVED_CONFIG, limit=_LIMIT)
        try:
            return (
                ""
                if content is None
                else MachineConfig.from_json(json_text.parse_json(content)).name
            )
        except (ValueError, errors.ConfigError):
            return ""

    def prune_cache(self, names: Collection[str]) -> None:
        """Remove all other configs from the cache. A failure is logged and retried next time."""
        self._parsed = {name: self._parsed[name] for name in names if name in self._parsed}
        wanted = {f"{name}{_SUFFIX}" for name in names}
        try:
            for name in self._files.list_directory(DIRECTORY):
                if name not in wanted:
                    self._files.remove_file(f"{DIRECTORY}/{name}")
        except errors.FileError as error:
            log.info("cannot remove an old config from the cache: %s", error)

    def drop_parsed(self) -> None:
        """Free the memory of the parsed configs; call it when no update is in progress."""
        self._parsed = {}

    def _find_parsed(
        self, name: str, content: bytes, config: MachineConfig | None = None
    ) -> wanted_state.ParsedConfig:
        """Return the parsed config of this content, parsed before or now.

        ``config`` is the decoded content; None to decode it if needed. The content of a name may
        change, because clients can delete and create MachineConfigs.
        """
        digest = hashlib.sha256(content).digest()
        known = self._parsed.pop(name, None)
        if known is None or known[0] != digest:
            decoded = config or MachineConfig.from_json(json_text.parse_json(content))
            known = digest, wanted_state.ParsedConfig(decoded)
        self._parsed[name] = known
        for oldest in list(self._parsed)[:-_PARSED_LIMIT]:
            del self._parsed[oldest]
        return known[1]


def cache_path(name: str) -> str:
    """Return the path of the copy of a config."""
    return f"{DIRECTORY}/{name}{_SUFFIX}"


class NodeConfigs:
    """The state that the current target's config wants of this machine."""

    def __init__(
        self,
        configs: ConfigCache,
        read_image: Callable[[wanted_state.WantedState], image_content.ImageContent],
    ) -> None:
        """``read_image`` returns the content of the booted image, for image mode."""
        self._configs = configs
        self._read_image = read_image

    def load_split(self, current: Target) -> image_content.ImageSplit | None:
        """Load the wanted state; None when the config is unavailable.

        In image mode too, the machine is compared with the whole config. Raises `HostError` and
        `ConfigError`.
        """
        try:
            parsed = self._configs.find_config(current.config)
        except errors.ClusterError as error:
            log.info("cannot read %s, no drift check until then: %s", current, error)
            return None
        if parsed is None:
            return None
        if not current.image:
            return image_content.ImageSplit(parsed.wanted)
        return image_content.compare_with_image(parsed.wanted, self._read_image(parsed.wanted))

    def load_expected(self, current: Target) -> ExpectedState | None:
        """Load the wanted state as digests, without the contents of files."""
        split = self.load_split(current)
        if split is None:
            return None
        os, image = split.wanted.os, current.image or split.wanted.os.image
        return ExpectedState.from_wanted(
            split.wanted,
            frozenset() if current.image else wanted_state.list_required_packages(os),
            digest=image.partition("@")[2],
            image_gaps=frozenset(gap.subject for gap in split.missing),
        )


def encode_once_config(config: MachineConfig) -> Iterator[bytes]:
    """Yield the copy of the config of ``treenail once`` in parts.

    It has no users, whose password hashes are secret: ``treenail drift`` does not compare these.
    """
    sections = {
        name: section for name, section in (config.config or {}).items() if name != "passwd"
    }
    yield from json_text.encode_parts(replace(config, config=sections or None).to_json())


def has_once_config(files: atomic_files.HostFiles) -> bool:
    """Return whether such a copy exists. Raises `FileError`."""
    directory, _, name = ONCE_CONFIG_PATH.rpartition("/")
    return name in files.list_directory(directory)


def read_once_config(files: atomic_files.HostFiles) -> MachineConfig | None:
    """Return the copy, None without one. Raises `HostError` if it is damaged."""
    content = files.read_file(ONCE_CONFIG_PATH, limit=_LIMIT)
    if content is None:
        return None
    try:
        return MachineConfig.from_json(json_text.parse_json(content))
    except (ValueError, errors.ConfigError) as error:
        raise errors.HostError(
            f"cannot read {ONCE_CONFIG_PATH}: expected the config of the last treenail once",
            remedy="write it again: treenail once FILE",
        ) from error
