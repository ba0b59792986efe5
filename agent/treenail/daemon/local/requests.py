"""Where people leave their requests for the agent: one file in /run, root's alone."""

import json
import logging

from treenail.errors import ConfigError, FileError
from treenail.host.filesystem.files import Files
from treenail.update.decision.request import Request, from_json, to_json

log = logging.getLogger(__name__)

PATH = "/run/treenail/request.json"
_LIMIT = 1024 * 1024


class RequestFile:
    """The one request there may be; a later one takes the place of an earlier."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def read(self) -> Request | None:
        """What is asked; None when nothing is, or nothing that can be understood."""
        try:
            content = self._files.read(PATH, limit=_LIMIT)
            return None if content is None else from_json(json.loads(content))
        except (FileError, ConfigError, ValueError, RecursionError) as error:
            log.warning("the request in %s is not obeyed: %s", PATH, error)
            self.drop()
            return None

    def leave(self, request: Request) -> None:
        """Ask for it; raises `FileError`."""
        self._files.write(PATH, json.dumps(to_json(request)).encode(), mode=0o600)

    def drop(self) -> None:
        """Have no request; a failure is told, and made up for the next time."""
        try:
            self._files.remove(PATH)
        except FileError as error:
            log.warning("a request is left: %s", error)
