"""Requests of the node's user to the agent: one file in /run that only root can write."""

import json
import logging

from treenail import errors
from treenail.encoding import json_text
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.update.decision import user_requests

log = logging.getLogger(__name__)

REQUEST_FILE = "/run/treenail/request.json"
_LIMIT = 1024 * 1024


class RequestFile:
    """The file of the one request; a later request replaces an earlier one."""

    def __init__(self, files: HostFiles) -> None:
        self._files = files

    def read_request(self) -> user_requests.UserRequest | None:
        """Read the request; None without one. An invalid request is logged and removed."""
        try:
            content = self._files.read_file(REQUEST_FILE, limit=_LIMIT)
            return (
                None if content is None else user_requests.from_json(json_text.parse_json(content))
            )
        except (errors.FileError, errors.ConfigError, ValueError) as error:
            log.warning("cannot read the request in %s: %s", REQUEST_FILE, error)
            self.remove_request()
            return None

    def write_request(self, request: user_requests.UserRequest) -> None:
        """Write a request. Raises `FileError`."""
        self._files.write_file(
            REQUEST_FILE, json.dumps(user_requests.to_json(request)).encode(), mode=0o600
        )

    def remove_request(self) -> None:
        """Remove the request. A failure is logged and retried next time."""
        try:
            self._files.remove_file(REQUEST_FILE)
        except errors.FileError as error:
            log.warning("cannot remove the request: %s", error)
