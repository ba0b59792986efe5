"""Where people leave their requests for the agent: one file in /run, root's alone."""

import json
import logging

from treenail.errors import ConfigError, FileError
from treenail.host.filesystem.files import HostFiles
from treenail.update.decision.request import UserRequest, from_json, to_json

log = logging.getLogger(__name__)

REQUEST_FILE = "/run/treenail/request.json"
_LIMIT = 1024 * 1024


class RequestFile:
    """The one request there may be; a later one takes the place of an earlier."""

    def __init__(self, files: HostFiles) -> None:
        self._files = files

    def read_request(self) -> UserRequest | None:
        """What is asked; None when nothing is, or nothing that can be understood."""
        try:
            content = self._files.read_file(REQUEST_FILE, limit=_LIMIT)
            return None if content is None else from_json(json.loads(content))
        except (FileError, ConfigError, ValueError, RecursionError) as error:
            log.warning("the request in %s is not obeyed: %s", REQUEST_FILE, error)
            self.remove_request()
            return None

    def write_request(self, request: UserRequest) -> None:
        """Ask for it; raises `FileError`."""
        self._files.write_file(REQUEST_FILE, json.dumps(to_json(request)).encode(), mode=0o600)

    def remove_request(self) -> None:
        """Have no request; a failure is told, and made up for the next time."""
        try:
            self._files.remove_file(REQUEST_FILE)
        except FileError as error:
            log.warning("a request is left: %s", error)
