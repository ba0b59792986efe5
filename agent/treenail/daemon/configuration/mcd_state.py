"""What the Machine Config Daemon, or the server that a machine was made by, left on it."""

import json
import logging

from treenail.api import annotations as key
from treenail.api.decode import Fields, load_json
from treenail.api.machineconfig import MachineConfig
from treenail.errors import ConfigError, FileError
from treenail.host.filesystem.files import HostFiles

log = logging.getLogger(__name__)

DIRECTORY = "/etc/machine-config-daemon"
CURRENT_CONFIG = f"{DIRECTORY}/currentconfig"
"""The config that the machine has, as JSON."""
CURRENT_IMAGE = f"{DIRECTORY}/currentimage"
"""The image beside it, as a line of text; empty, or not there, without one."""
FIRST_BOOT_ANNOTATIONS = f"{DIRECTORY}/node-annotations.json"
"""What a machine that boots for the first time is to have its Node annotated with."""
_LIMIT = 64 * 1024 * 1024


class MCDState:
    """Reads it; what can't be read is told in the log, and as good as not there."""

    def __init__(self, files: HostFiles) -> None:
        self._files = files

    def read_annotations(self) -> dict[str, str]:
        """The annotations of a Node that has none yet; empty where nobody left any.

        Those of the first boot, or else what the machine is known to have.
        """
        try:
            content = self._files.read_file(FIRST_BOOT_ANNOTATIONS, limit=_LIMIT)
            if content is not None:
                found = Fields.from_json(
                    {"annotations": json.loads(content)}, FIRST_BOOT_ANNOTATIONS
                )
                texts = found.get_text_map("annotations")
                return {name: text for name, text in texts.items() if name.startswith(key.PREFIX)}
            return self._read_current()
        except (FileError, ConfigError, ValueError, RecursionError) as error:
            log.warning("what was left in %s is not of use: %s", DIRECTORY, error)
            return {}

    def _read_current(self) -> dict[str, str]:
        content = self._files.read_file(CURRENT_CONFIG, limit=_LIMIT)
        if content is None:
            return {}
        config = MachineConfig.from_json(load_json(content, where=CURRENT_CONFIG))
        image = (self._files.read_file(CURRENT_IMAGE) or b"").decode("utf-8", "replace").strip()
        found = {key.CURRENT_CONFIG: config.name}
        return found | {key.CURRENT_IMAGE: image} if image else found
