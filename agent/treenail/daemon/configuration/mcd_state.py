"""State that the Machine Config Daemon or the Machine Config Server left on the machine."""

import logging

from treenail import errors
from treenail.api import annotations as key
from treenail.api import decode, machineconfig
from treenail.config import node_paths
from treenail.host.filesystem.atomic_files import HostFiles

log = logging.getLogger(__name__)

DIRECTORY = "/etc/machine-config-daemon"
CURRENT_CONFIG = f"{DIRECTORY}/currentconfig"
"""The machine's current MachineConfig, as JSON."""
CURRENT_IMAGE = f"{DIRECTORY}/currentimage"
"""Its image as a line of text; empty or missing without one."""
FIRST_BOOT_ANNOTATIONS = node_paths.FIRST_BOOT_ANNOTATIONS
"""The Node's first annotations, which the Machine Config Server adds to the Ignition config."""
_LIMIT = 64 * 1024 * 1024


class MCDState:
    """Reads this state. Unreadable files are logged and treated as missing."""

    def __init__(self, files: HostFiles) -> None:
        self._files = files

    def read_annotations(self) -> dict[str, str]:
        """Read the annotations for a Node that has none yet; empty without any state.

        The file of the first boot wins over the current config, as in the MCD.
        """
        try:
            texts = read_first_boot_annotations(self._files)
            if texts is None:
                return self._read_current()
            return {name: text for name, text in texts.items() if name.startswith(key.PREFIX)}
        except (errors.FileError, errors.ConfigError, ValueError) as error:
            log.warning("cannot read the state of the MCD in %s: %s", DIRECTORY, error)
            return {}

    def _read_current(self) -> dict[str, str]:
        content = self._files.read_file(CURRENT_CONFIG, limit=_LIMIT)
        if content is None:
            return {}
        config = machineconfig.MachineConfig.from_json(
            decode.load_json(content, where=CURRENT_CONFIG)
        )
        image = (self._files.read_file(CURRENT_IMAGE) or b"").decode("utf-8", "replace").strip()
        annotations = {key.CURRENT_CONFIG: config.name}
        return annotations | {key.CURRENT_IMAGE: image} if image else annotations


def read_first_boot_annotations(files: HostFiles) -> dict[str, str] | None:
    """Read the file of the first boot; None without one. Raises `FileError` and `ConfigError`."""
    content = files.read_file(FIRST_BOOT_ANNOTATIONS, limit=_LIMIT)
    if content is None:
        return None
    document = decode.load_json(content, where=FIRST_BOOT_ANNOTATIONS)
    fields = decode.Fields.from_json({"annotations": document}, FIRST_BOOT_ANNOTATIONS)
    return fields.get_text_map("annotations")
