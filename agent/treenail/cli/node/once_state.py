"""The config that ``treenail once`` brought a machine to last: what drifts, drifts from that."""

import json
from dataclasses import replace

from treenail.api.machineconfig import MachineConfig
from treenail.errors import ConfigError, HostError
from treenail.host.filesystem.files import HostFiles

ONCE_CONFIG_PATH = "/var/lib/treenail/once.json"
_MAX_CONFIG_BYTES = 64 * 1024 * 1024


def store_config(files: HostFiles, config: MachineConfig) -> None:
    """Have a copy of the config, for its owner alone: its files may hold secrets.

    Users are not compared, and left out with their passwords. Raises `FileError`.
    """
    sections = {name: each for name, each in (config.config or {}).items() if name != "passwd"}
    document = replace(config, config=sections or None).to_json()
    files.write_file(ONCE_CONFIG_PATH, json.dumps(document).encode(), mode=0o600)


def has_stored_config(files: HostFiles) -> bool:
    """Whether there is a copy, of whichever config. Raises `FileError`."""
    directory, _, name = ONCE_CONFIG_PATH.rpartition("/")
    return name in files.list_directory(directory)


def read_stored_config(files: HostFiles) -> MachineConfig | None:
    """The copy; None when there is none. Raises `HostError` for one that can't be read."""
    content = files.read_file(ONCE_CONFIG_PATH, limit=_MAX_CONFIG_BYTES)
    if content is None:
        return None
    try:
        return MachineConfig.from_json(json.loads(content))
    except (ValueError, ConfigError) as error:
        raise HostError(
            f"{ONCE_CONFIG_PATH} is damaged: expected the config of the last treenail once",
            remedy="run treenail once again",
        ) from error
