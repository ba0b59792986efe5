"""The config that ``treenail once`` brought a machine to last: what drifts, drifts from that."""

import json
from dataclasses import replace

from treenail.api.machineconfig import MachineConfig
from treenail.errors import ConfigError, HostError
from treenail.host.filesystem.files import Files

PATH = "/var/lib/treenail/once.json"
_LIMIT = 64 * 1024 * 1024


def keep(files: Files, config: MachineConfig) -> None:
    """Have a copy of the config, for its owner alone: its files may hold secrets.

    Users are not compared, and left out with their passwords. Raises `FileError`.
    """
    sections = {name: each for name, each in (config.config or {}).items() if name != "passwd"}
    document = replace(config, config=sections or None).to_json()
    files.write(PATH, json.dumps(document).encode(), mode=0o600)


def has_kept(files: Files) -> bool:
    """Whether there is a copy, of whichever config. Raises `FileError`."""
    directory, _, name = PATH.rpartition("/")
    return name in files.names(directory)


def kept(files: Files) -> MachineConfig | None:
    """The copy; None when there is none. Raises `HostError` for one that can't be read."""
    content = files.read(PATH, limit=_LIMIT)
    if content is None:
        return None
    try:
        return MachineConfig.from_json(json.loads(content))
    except (ValueError, ConfigError) as error:
        raise HostError(
            f"{PATH} is damaged: expected the config of the last treenail once",
            remedy="run treenail once again",
        ) from error
