"""The copy of the config of ``treenail once``, with which ``treenail drift`` compares."""

from collections.abc import Iterator
from dataclasses import replace

from treenail.api.machineconfig import MachineConfig
from treenail.codec import encode_parts, parse_json
from treenail.errors import ConfigError, HostError
from treenail.host.filesystem.files import HostFiles

ONCE_CONFIG_PATH = "/var/lib/treenail/once.json"
_MAX_CONFIG_BYTES = 64 * 1024 * 1024


def encode_config(config: MachineConfig) -> Iterator[bytes]:
    """Yield the copy of the config in parts, without users and their password hashes.

    treenail drift does not compare these.
    """
    sections = {name: each for name, each in (config.config or {}).items() if name != "passwd"}
    yield from encode_parts(replace(config, config=sections or None).to_json())


def has_stored_config(files: HostFiles) -> bool:
    """Return whether a copy of any config exists. Raises `FileError`."""
    directory, _, name = ONCE_CONFIG_PATH.rpartition("/")
    return name in files.list_directory(directory)


def read_stored_config(files: HostFiles) -> MachineConfig | None:
    """Return the copy, None without one. Raises `HostError` if it is damaged."""
    content = files.read_file(ONCE_CONFIG_PATH, limit=_MAX_CONFIG_BYTES)
    if content is None:
        return None
    try:
        return MachineConfig.from_json(parse_json(content))
    except (ValueError, ConfigError) as error:
        raise HostError(
            f"cannot read {ONCE_CONFIG_PATH}: expected the config of the last treenail once",
            remedy="write it again: treenail once FILE",
        ) from error
