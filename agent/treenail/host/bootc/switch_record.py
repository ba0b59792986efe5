"""Records which image bootc switches to, from before the switch until its result is verified.

bootc may stage another image than the requested one. Without the record an agent that starts after
a kill would take that deployment for an administrator's, and the next reboot would boot it.
"""

import json
import logging

from treenail.codec import parse_json
from treenail.errors import FileError
from treenail.host.filesystem.files import HostFiles
from treenail.host.system.kernel import HostKernel
from treenail.host.system.state_file import STATE_DIRECTORY

log = logging.getLogger(__name__)

SWITCH_RECORD_PATH = f"{STATE_DIRECTORY}/bootc-switch.json"


class SwitchRecord:
    """The image of the unverified switch of this boot: no staged deployment outlives a boot."""

    def __init__(self, files: HostFiles, kernel: HostKernel) -> None:
        self._files = files
        self._kernel = kernel

    def read_image(self) -> str:
        """Return the pull spec; empty without a record of this boot. Raises `HostError`."""
        try:
            content = self._files.read_file(SWITCH_RECORD_PATH)
            found: object = None if content is None else parse_json(content)
        except (FileError, ValueError) as error:
            log.warning("cannot read the record of the last switch: %s", error)
            return ""
        match found:
            case {"image": str(image), "bootID": str(boot)} if boot == self._kernel.read_boot_id():
                return image
            case _:
                return ""

    def write_image(self, image: str) -> None:
        """Record the pull spec durably. Raises `HostError`."""
        document = {"image": image, "bootID": self._kernel.read_boot_id()}
        self._files.write_file(SWITCH_RECORD_PATH, json.dumps(document).encode(), mode=0o600)

    def remove_image(self) -> None:
        """Remove the record, if there is one. Raises `FileError`."""
        self._files.remove_file(SWITCH_RECORD_PATH)
