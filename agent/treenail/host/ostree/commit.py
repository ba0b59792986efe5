"""Commit metadata and origin files of deployments, as ostree stores them."""

import ast
import logging

from treenail.codec import parse_json
from treenail.errors import CommandError, FileError
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.root import Root
from treenail.host.ostree.deployments import parse_config_labels
from treenail.process import ProgramRunner

log = logging.getLogger(__name__)

OSTREE_PROGRAM = "/usr/bin/ostree"
_CONFIGURATION = "ostree.container.image-config"
_TIMEOUT_S = 20.0
_ORIGIN_LIMIT = 256 * 1024
_CACHE_LIMIT = 16
# Groups of an origin file that only rpm-ostree understands.
_RPM_OSTREE_GROUPS = {"rpmostree", "packages", "overrides", "modules"}


class OstreeMetadata:
    """Metadata of commits and deployments. It raises nothing: unknown values are empty."""

    def __init__(self, programs: ProgramRunner, root: Root) -> None:
        self._programs = programs
        self._root = root
        self._files = HostFiles(root)
        self._labels: dict[str, dict[str, str]] = {}

    def read_labels(self, checksum: str) -> dict[str, str]:
        """Return the labels of the image that the commit was imported from."""
        # Cache without expiry: a commit is named by its checksum and never changes.
        if checksum not in self._labels:
            if len(self._labels) >= _CACHE_LIMIT:
                self._labels.clear()
            self._labels[checksum] = self._read_commit_labels(checksum)
        return self._labels[checksum]

    def find_local_changes(self, origin: str) -> tuple[str, ...]:
        """Return the settings of the origin file that bootc does not support.

        Each one is a group and a line, such as ``packages requested=…``.
        """
        try:
            content = (
                self._files.read_file(f"/sysroot{origin}", limit=_ORIGIN_LIMIT) if origin else b""
            )
        except FileError:
            return ()
        section, found = "", list[str]()
        for line in map(str.strip, (content or b"").decode("utf-8", "replace").splitlines()):
            if line.startswith("["):
                section = line.strip("[]")
            elif line and section in _RPM_OSTREE_GROUPS:
                found.append(f"{section} {line.rstrip(';')}")
        return tuple(found)

    def _read_commit_labels(self, checksum: str) -> dict[str, str]:
        program = str(self._root.resolve_path(OSTREE_PROGRAM))
        command = [program, "show", f"--print-metadata-key={_CONFIGURATION}", checksum]
        try:
            output = self._programs.run_command(command, timeout_s=_TIMEOUT_S).decode()
            # ostree prints GVariant's text format, whose string literals Python can parse.
            return parse_config_labels(parse_json(ast.literal_eval(output.strip())))
        except (CommandError, ValueError, SyntaxError, TypeError) as error:
            log.debug("cannot read the labels of %s: %s", checksum, error)
            return {}
